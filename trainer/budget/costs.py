"""Costs of a planned run by model size (seconds, memory, floating-point operations), and the text that it can train on.

Seconds are estimated: FLOPs of an update / (FLOP/s of large matrix products * utilisation). The utilisation was measured on two
cores with AVX512-BF16, by models of width 64 to 384. For other machines, timing some sizes (`measure`) corrects the estimates.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import median

import numpy as np
import torch

from common.processes import seconds_since_start
from common.wording import announce
from dataset.corpus import EVAL_ROWS, MIN_DOCUMENTS, Corpus
from dataset.loader import to_device
from dataset.packing import RowPlan, Totals
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from model.config import ModelConfig, parameter_count
from model.induction import supports_induction
from model.model_minimind import MiniMindLM
from trainer.batching import Batching
from trainer.budget import laws
from trainer.budget.clock import EAGER_SLOWDOWN, FILES_S, REPORT_S, SAMPLE_S_OF_LAYER, evaluation_cost
from trainer.budget.compile_times import CompileTimes
from trainer.budget.difficulty import difficulty_of
from trainer.cuda_graphs import may_record
from trainer.engine import make_engine
from trainer.evaluation import read_prompts
from trainer.machine.compiling import PRODUCT_RATE, compile_blocks, failure_to_compile
from trainer.machine.measure import seconds
from trainer.machine.ranks import Ranks, first_rank_first, on_main
from trainer.optim.muon import NEWTON_SCHULZ_STEPS
from trainer.pretrain.data import DOCUMENTS, TextKind, open_corpus
from trainer.pretrain.loss import n_sums, pretrain_loss
from trainer.pretrain.memory import flops_per_token, mean_context, training_bytes
from trainer.pretrain.sampled_head import HeadSampler, rows_targets
from trainer.pretrain.settings import MODEL_FLAGS, PretrainSettings, seconds_of

# Utilisation: share of the FLOP/s of large products that a compiled micro-batch of width 128 reaches on a CPU, and its gain per
# doubling of the width. `PRODUCT_RATE` in trainer/machine/compiling.py is for the products alone, and assumed, not measured.
CPU_UTILISATION = 0.49
CPU_UTILISATION_PER_DOUBLING = 0.13
# Guessed bounds for unmeasured widths: the formula would give 0 for narrow models, and more than 1 for wide ones.
MIN_UTILISATION = 0.2
MAX_UTILISATION = 0.8
# The above is for rows of 512. A CPU computes attention scores across documents too: each position beyond 512 costs as much as this
# many of a token's own document. Measured: 1.2 in rows of 1,024 and 0.8 in rows of 2,048 (256 x 8), 0.4 in rows of 1,024 (160 x 2).
CPU_SCORES = 0.9
# Small products leave large GPUs idle. Not measured yet.
GPU_UTILISATION = 0.35
# Muon's products are smaller.
MUON_UTILISATION = 0.7
# Seconds of an update for each number of an embedding beyond those of laws.USUAL_ENTRIES, which the utilisation includes: gradients, moments
# and weights go through memory. 192 x 3 with 25,600 entries has 0.92 times the rate of 6,400, on two cores. GPUs: not measured.
ENTRY_SECONDS = {"cpu": 6e-9, "cuda": 5e-11, "mps": 5e-10}
# Updates that a compiled run must make for each of an eager one: compiling may take longer than expected, and gain less.
MIN_COMPILED_GAIN = 1.35
# Budgets of so many seconds find faults of a CPU by --verify_every; one update of 100 twice is 1 % of the time. On a GPU some kernels
# do not give the same bits twice, and its cost is not measured.
SECONDS_TO_VERIFY = 3600.0
VERIFY_EVERY = 100
# Upper bound of measured / estimated seconds. More on a CPU means that another program disturbed the measurement; the clock of
# the run corrects the rest. Small updates on a GPU wait for kernel launches, which the estimate ignores.
MAX_CORRECTION = {"cpu": 4.0, "cuda": 100.0, "mps": 100.0}
# Maximum share of the training time for evaluations before the last one, and their maximum number
EVALUATION_SHARE = 0.02
MAX_EVALUATIONS = 10
# Minimum number of updates that a measurement times, for a median; at most the share below of the run's updates
TIMED = 5
MEASURED_SHARE_OF_UPDATES = 0.05
# Minimum length of a measurement, as a share of the budget, and its upper bound: just after an installation, updates took
# 0.56 s at first and 0.33 s in the run.
TIMED_SHARE = 0.01
MAX_TIMED_S = 10.0
# Ids of `--sampled_softmax`: the most distinct targets of some rows, and this share of the vocabulary to draw, at most MOST_DRAWN;
# rounded up to a multiple that suits matrix products. A sample of more than MAX_HEAD_SHARE of all ids gains little.
DRAWN_SHARE = 1 / 16
MOST_DRAWN = 400
HEAD_STEP = 128
MAX_HEAD_SHARE = 0.7
# Held out if the user names no validation data: at most this share of the documents and about this many tokens, but at
# least about MIN_HELD_OUT documents; nothing of fewer than MIN_DOCUMENTS. All four are guesses: little text is lost,
# an evaluation stays short, and ten documents are at most a twentieth of them.
HELD_OUT_SHARE = 0.02
HELD_OUT_TOKENS = 100_000
MIN_HELD_OUT = 10
# A larger share of the tokens is a few long documents, or copies of one.
MAX_HELD_OUT_SHARE = 0.1
# Minimum held-out tokens of a corpus that is one document
MIN_HELD_OUT_TOKENS = 1000


@dataclass(frozen=True)
class Text:
    """The text of a run.

    rows: of the first pass. parts: its sources; in a mixture some repeat before others are used up. context: `mean_context`
    (trainer/pretrain/memory.py). difficulty: see `difficulty_of`. evaluated: positions of one evaluation.
    """

    corpus: Corpus
    vocab_size: int
    rows: RowPlan
    parts: tuple[laws.Part, ...]
    context: float
    difficulty: float
    evaluated: int

    @property
    def unique(self) -> float:
        """Unique tokens of all sources."""
        return laws.unique_tokens(self.parts)

    def tokens_of_update(self, rows: int) -> float:
        """Mean trained tokens of an update of this many rows: the last one of each pass has fewer."""
        return self.rows.n_pairs / max(1, math.ceil(self.rows.n_rows / rows))


def count_text(
    settings: PretrainSettings, ranks: Ranks, kind: TextKind = DOCUMENTS, difficulty: float | None = None
) -> Text:
    """Tokenise new text, and count. difficulty: of the same text, if it is known. Errors: DataError, UserError."""
    assert settings.tokenizer_path is not None
    tokenizer = load_tokenizer(settings.tokenizer_path)
    encoder = kind.make_encoder(tokenizer, settings)
    corpus = first_rank_first(ranks, partial(open_corpus, settings, encoder, ranks, kind))
    if settings.dry_run and difficulty is None and ranks.is_main:
        for line in corpus.notices:
            announce(line)
    is_free = not {"val_path", "val_fraction"} & settings.user_set
    # Asked of rank 0: the next line is for all ranks, or for none.
    share = on_main(ranks, partial(share_to_hold_out, corpus, encoder)) if is_free else 0.0
    if share:
        settings = replace(settings, val_fraction=share)
        corpus = first_rank_first(ranks, partial(open_corpus, settings, encoder, ranks, kind))
    rows = corpus.plan(0)
    # Shares of conversations count the answers alone; a plan counts all tokens.
    targets = rows.row_targets(0, rows.n_rows)
    tokens_per_target = rows.n_pairs / targets
    validation = corpus.validation()
    return Text(
        corpus=corpus,
        vocab_size=encoder.vocab_size,
        rows=rows,
        parts=tuple(part._replace(unique=tokens_per_target * part.unique) for part in laws.parts_of(corpus, targets)),
        context=mean_context(rows),
        difficulty=difficulty or difficulty_of(corpus.assembler(), rows, validation),
        evaluated=0 if validation is None else len(validation) * EVAL_ROWS * rows.T,
    )


def share_to_hold_out(corpus: Corpus, encoder: DocumentEncoder) -> float:
    """The share of a corpus that a plan holds out for validation; 0: nothing."""
    n_documents = len(corpus.documents)
    tokens_of_documents = np.diff(corpus.store.offsets)
    # Tokens of all sources: documents are held out before shares apply, and a pass may train a small part of them.
    n_tokens = int(tokens_of_documents[corpus.documents].sum())
    is_few = n_documents < MIN_DOCUMENTS
    fraction = max(min(HELD_OUT_SHARE, HELD_OUT_TOKENS / n_tokens), 0 if is_few else MIN_HELD_OUT / n_documents)
    # One digit is enough, and reads well in a command.
    fraction = float(f"{fraction:.1g}")
    whole, divided = corpus.split(encoder, fraction)
    if is_few:
        # A few long documents: the last part of the longest
        return fraction if divided is not None and HELD_OUT_SHARE * n_tokens >= MIN_HELD_OUT_TOKENS else 0.0
    # Copies of a document are held out together: with few unique ones it may be none or all.
    tokens_held_out = tokens_of_documents[whole].sum() if divided is None else fraction * n_tokens
    return fraction if 0 < tokens_held_out <= MAX_HELD_OUT_SHARE * n_tokens else 0.0


def sampled_ids(distinct: int, vocab_size: int) -> int:
    """`--sampled_softmax` for rows of so many distinct targets; 0: the whole vocabulary."""
    wanted = distinct + min(DRAWN_SHARE * vocab_size, MOST_DRAWN)
    n_ids = math.ceil(wanted / HEAD_STEP) * HEAD_STEP
    return n_ids if n_ids <= MAX_HEAD_SHARE * vocab_size else 0


@dataclass
class RunCosts:
    """Costs of runs with these settings on this text and machine, and their budget. A collective: all ranks make one.

    product_rate: FLOP/s of large matrix products, all ranks together, on a CPU at most PRODUCT_RATE per thread. available_memory:
    bytes that a rank may take; None: unknown.
    """

    settings: PretrainSettings
    text: Text
    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    product_rate: float
    available_memory: float | None = None
    # False: the whole head, unless the user says otherwise
    may_sample_head: bool = True
    # {width: measured / estimated seconds of an update}: seconds per FLOP depend on the width more than on the depth
    corrections: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # names of the settings that a plan leaves as they are
        self.fixed = self.settings.user_set | self.settings.fixed_in_plans
        if self.settings.from_weight != "none":
            # Existing weights have a fixed shape.
            self.fixed |= {*MODEL_FLAGS, "init_scheme", "optimizer"}
        self.optimizer = self.settings.optimizer if "optimizer" in self.fixed else "muon"
        self.n_prompts = len(read_prompts(self.settings.sample_prompts))
        self.max_passes = laws.max_passes(self.settings.from_weight)
        # a budget of time
        self.seconds = seconds_of(self.settings.budget) if self.settings.budget else None
        is_long = self.seconds is not None and self.seconds >= SECONDS_TO_VERIFY
        if is_long and self.device.type == "cpu" and "verify_every" not in self.fixed:
            self.settings = replace(self.settings, verify_every=VERIFY_EVERY)
        self.compile_times = CompileTimes()
        # `compile_key` of the code that a measurement has compiled
        self.compiled_key = ""
        # The run will be compiled. Rank 0 decides: some nodes may have a compiler, and others none.
        self.compiled = on_main(self.ranks, lambda: self.is_worth_compiling(self.compile_times.least()))

    @property
    def seconds_left(self) -> float | None:
        """What is left of a budget of time."""
        return None if self.seconds is None else self.seconds - seconds_since_start()

    def init_scheme(self, config: ModelConfig) -> str:
        """The `--init_scheme` of a run of this model. Induction heads were measured with planned rates only."""
        if "init_scheme" in self.fixed:
            return self.settings.init_scheme
        has_planned_rates = self.optimizer == "muon" and not {"learning_rate", "embed_lr", "muon_lr"} & self.fixed
        return "induction" if has_planned_rates and supports_induction(config) else "zero_out"

    @cached_property
    def head_ids(self) -> int:
        """`--sampled_softmax` of a plan's run; 0: the whole vocabulary."""
        if "sampled_softmax" in self.fixed:
            return self.settings.sampled_softmax
        # On a GPU the head is a small part, and a CUDA graph cannot have another sample for each update. Fine-tuning was not measured.
        if self.device.type != "cpu" or self.settings.from_weight != "none" or not self.may_sample_head:
            return 0
        distinct = max(len(set(row)) for row in rows_targets(self.text.corpus).tolist())
        return sampled_ids(distinct, self.text.vocab_size)

    def is_worth_compiling(self, seconds: float) -> bool:
        """Returns whether to compile a run that it takes so many seconds for: with a budget of time decided here, so that the run
        does what was planned; else a guess."""
        choice, device_type = self.settings.use_compile, self.device.type
        if choice == "0" or (choice == "auto" and device_type not in PRODUCT_RATE):
            return False
        left = self.seconds_left
        if choice == "auto" and left is not None and (left - seconds) * EAGER_SLOWDOWN < MIN_COMPILED_GAIN * left:
            return False
        # A run on a machine that cannot compile trains eagerly.
        return failure_to_compile(device_type) is None

    def compile_key(self, config: ModelConfig, batching: Batching) -> str:
        """Name of the code that a run of this model compiles, with any number of layers: all blocks are alike."""
        heads = f"{config.num_attention_heads} of {config.num_key_value_heads} heads"
        model = f"{config.generation} {config.hidden_size}, {heads}, experts {config.use_moe}, dropout {config.dropout}"
        rows = f"{batching.micro_rows} rows of {self.text.rows.T}, {self.dtype}"
        rows += f", {self.head_ids or 'all'} ids"
        return f"{model}; {rows}; {self.device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}"

    def compile_seconds(self, config: ModelConfig, batching: Batching) -> float:
        """Seconds that a run of this model takes to compile; 0: not compiled, or its code is from a measurement."""
        key = self.compile_key(config, batching)
        return 0.0 if not self.compiled or key == self.compiled_key else self.compile_times.expected(key)

    def estimated_seconds(self, config: ModelConfig, rows: int, compiled: bool) -> float:
        """Seconds of an update of this many rows, on a machine like the measured ones."""
        H = config.hidden_size
        context, utilisation = self.text.context, GPU_UTILISATION
        if self.device.type == "cpu":
            context += CPU_SCORES * max(self.text.rows.T - laws.USUAL_ROW, 0)
            utilisation = CPU_UTILISATION + CPU_UTILISATION_PER_DOUBLING * math.log2(H / 128)
            utilisation = min(max(utilisation, MIN_UTILISATION), MAX_UTILISATION)
        flops = flops_per_token(config, context, self.head_ids)
        work = rows * self.text.rows.T * flops / utilisation
        if not compiled:
            work *= EAGER_SLOWDOWN
        if self.optimizer == "muon":
            # Orthogonalising a matrix takes 4 m^2 n + 2 m^3 FLOPs a step, m the short side: about 5 H per weight of the blocks.
            weights = parameter_count(config) - config.vocab_size * H
            muon_flops = NEWTON_SCHULZ_STEPS * 5 * H * weights
            work += muon_flops / MUON_UTILISATION
        return (
            work / self.product_rate
            + ENTRY_SECONDS[self.device.type] * max(config.vocab_size - laws.USUAL_ENTRIES, 0) * H
        )

    def update_seconds(self, config: ModelConfig, rows: int) -> float:
        """Seconds of an update of this many rows: the estimate, corrected by measurements."""
        estimate = self.estimated_seconds(config, rows, self.compiled)
        if not self.corrections:
            return estimate
        nearest = min(self.corrections, key=lambda width: abs(math.log(width / config.hidden_size)))
        return estimate * self.corrections[nearest]

    def other_seconds(self, config: ModelConfig, batching: Batching, training_seconds: float) -> float:
        """Seconds of overhead: compiling, evaluations, files. training_seconds: of all updates."""
        seconds = FILES_S + REPORT_S * self.settings.report
        seconds += self.compile_seconds(config, batching)
        evaluations = 1 + self.evaluations(config, batching, training_seconds)
        return seconds + evaluations * self.evaluation_seconds(config, batching.rows)

    def evaluation_seconds(self, config: ModelConfig, rows: int) -> float:
        """Seconds of one evaluation, in a run with updates of this many rows."""
        position_seconds = self.update_seconds(config, rows) / (rows * self.text.rows.T)
        samples = SAMPLE_S_OF_LAYER * config.num_hidden_layers * self.n_prompts
        # An evaluation computes the whole head.
        position_seconds *= flops_per_token(config, self.text.context) / self.token_flops(config)
        return evaluation_cost(self.compiled) * position_seconds * self.text.evaluated + samples

    def evaluations(self, config: ModelConfig, batching: Batching, training_seconds: float) -> int:
        """Number of evaluations before the last one. training_seconds: of all updates."""
        is_free = "eval_interval" not in self.fixed
        if not self.text.evaluated or not (is_free or self.settings.eval_interval):
            return 0
        if is_free:
            affordable = EVALUATION_SHARE * training_seconds / self.evaluation_seconds(config, batching.rows)
            return int(min(affordable, MAX_EVALUATIONS))
        # At most one after each update
        updates_between = max(self.settings.eval_interval / batching.micro_batches, 1.0)
        return int(training_seconds / self.update_seconds(config, batching.rows) / updates_between)

    def memory(self, config: ModelConfig, rows: int) -> float:
        """Peak memory of a rank in bytes, with micro-batches of this many rows."""
        # Micro-batches of a GPU are as large as fit, so eager code counts, to which a run may fall back.
        compiled = self.compiled and self.device.type != "cuda"
        T = self.text.rows.T
        return training_bytes(config, rows, T, self.settings, self.dtype, self.device, compiled)

    def token_flops(self, config: ModelConfig) -> float:
        """Of a run of this model."""
        return flops_per_token(config, self.text.context, self.head_ids)

    def measure(self, config: ModelConfig, batching: Batching, updates: int, compiled: bool) -> None:
        """Time some updates of a plan of `updates` updates, to correct the estimates. A collective: all ranks must call it.

        Only the last measurement may be compiled: its code serves the run.
        """
        ranks = self.ranks
        times = max(1, min(TIMED, int(MEASURED_SHARE_OF_UPDATES * updates)))
        micro_batch, rest, first = self.timed(config, batching, times, compiled)
        # All ranks must plan with the same numbers.
        measured = on_main(ranks, lambda: micro_batch * batching.micro_batches + rest)
        if compiled:
            self.compiled_key = self.compile_key(config, batching)
            if ranks.is_main:
                self.compile_times.remember(self.compiled_key, first - 2 * micro_batch - rest)
        factor = measured / self.estimated_seconds(config, batching.rows, compiled)
        self.corrections[config.hidden_size] = min(factor, MAX_CORRECTION[self.device.type])

    def timed(self, config: ModelConfig, batching: Batching, times: int, compiled: bool) -> tuple[float, float, float]:
        """Returns (seconds of a micro-batch on this rank, of the rest of an update, of a first update of two
        micro-batches, which compiles), measured on the text itself: the time of some kernels depends on repeated tokens, and on
        several documents in a row.

        The first two are medians of at least `times` updates, and of more for a share of the budget: a machine may be slower at first than later
        in the run. The rest is the exchange of gradients and the optimiser. A collective: ranks wait for each
        other, as in the run.
        """
        device, dtype, ranks = self.device, self.dtype, self.ranks
        text, rows = self.text, batching.micro_rows
        sampler = None
        if self.head_ids:
            sampler = HeadSampler(rows_targets(text.corpus), config.vocab_size, self.head_ids, self.settings.seed)
        recomputes = self.settings.gradient_checkpointing
        recipe = text.rows.recipe(range(min(rows, text.rows.n_rows)))
        batch = text.corpus.assembler(rows)[recipe]
        batch = to_device(batch, device)
        may_use_graphs = self.settings.cuda_graphs != "0" and sampler is None
        model = MiniMindLM(config).train()
        if recomputes:
            model.checkpoint_activations()
        engine = make_engine(
            model,
            partial(pretrain_loss, model, head_sampler=sampler),
            replace(self.settings, optimizer=self.optimizer),
            n_sums=n_sums(config),
            identity={},
            cuda_graphs=may_record(may_use_graphs, device, ranks, dtype, recomputes, config.dropout),
            dtype=dtype,
            ranks=ranks,
            device=device,
        )
        # Also without compiling: it prepares the device for eager code as the run does.
        choice = "1" if compiled else "0"
        compile_blocks(model.compile_training, choice, device, (rows, text.rows.T), dtype=dtype)
        totals = Totals(batch.n_targets, batch.n_documents)
        micro_batch = partial(engine.micro_batch, batch, totals)

        def last_of_update() -> None:
            # Ranks may exchange gradients in its backward pass.
            micro_batch(last=True)
            engine.update(1e-6)

        def first_update() -> None:
            micro_batch()
            last_of_update()

        first_seconds = seconds(first_update, device)
        if engine.graphs is not None:
            # This one records them.
            micro_batch()
        assert self.seconds is not None, "only a budget of time is timed"
        least = min(TIMED_SHARE * self.seconds, MAX_TIMED_S)
        micro_batch_seconds: list[float] = []
        last_seconds: list[float] = []

        def is_too_short() -> bool:
            return sum(micro_batch_seconds) + sum(last_seconds) < least

        # Rank 0 decides: all ranks must time as many.
        while len(last_seconds) < times or on_main(ranks, is_too_short):
            micro_batch_seconds.append(seconds(micro_batch, device))
            last_seconds.append(seconds(last_of_update, device))
        engine.close()
        of_micro_batch = median(micro_batch_seconds)
        return of_micro_batch, median(last_seconds) - of_micro_batch, first_seconds
