"""Costs of a planned run by model size (seconds, memory, floating-point operations), and the text that it can train on.

Seconds are estimated: FLOPs of an update / (FLOP/s of large matrix products * utilisation). The utilisation was measured on two
cores with AVX512-BF16, by models of width 64 to 384. For other machines, timing some sizes (timing.py) corrects the estimates.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from common.processes import seconds_since_start
from common.wording import announce
from dataset.corpus import EVAL_ROWS, MIN_DOCUMENTS, Corpus
from dataset.packing import RowPlan
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from model.config import ModelConfig, parameter_count
from model.induction import supports_induction
from trainer.batching import Batching
from trainer.budget import laws
from trainer.budget.clock import FILES_S, REPORT_S, SAMPLE_S_OF_LAYER
from trainer.budget.difficulty import difficulty_of
from trainer.budget.measured import Measured
from trainer.evaluation import read_prompts
from trainer.machine.compiling import COMPILED_TIME, EAGER_TIME, PRODUCT_RATE, failure_to_compile
from trainer.machine.rank import ONE_RANK, Ranks
from trainer.optim.muon import NEWTON_SCHULZ_STEPS
from trainer.pretrain.data import DOCUMENTS, TextKind, open_corpus
from trainer.pretrain.memory import flops_per_token, mean_context, training_bytes
from trainer.pretrain.sampled_head import rows_targets
from trainer.pretrain.settings import PretrainSettings

# Utilisation: share of the FLOP/s of large products that a compiled micro-batch of width 128 reaches on a CPU, and its gain per
# doubling of the width
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
# and weights go through memory. GPUs: not measured.
ENTRY_SECONDS = {"cpu": 6e-9, "cuda": 5e-11, "mps": 5e-10}
# With `--sampled_softmax` on a CPU only the rows in use do: 192 x 3 with 51,200 entries has the rate of 6,400, in one process. Drawing the
# ids of a row takes two cores so many seconds for each entry.
DRAWING_SECONDS = 3e-9
# Time of an eager micro-batch relative to a compiled one; of an evaluation, which is never compiled, relative to a compiled training
# step on as many positions
EAGER_SLOWDOWN = EAGER_TIME / COMPILED_TIME
EVALUATION_COST = 0.75
# Updates that a compiled run must make for each of an eager one: compiling may take longer than expected, and gain less.
MIN_COMPILED_GAIN = 1.35
# Upper bound of measured / estimated seconds. More on a CPU means that another program disturbed the measurement; the clock of
# the run corrects the rest. Small updates on a GPU wait for kernel launches, which the estimate ignores.
MAX_CORRECTION = {"cpu": 4.0, "cuda": 100.0, "mps": 100.0}
# End of the name of an `evaluation_correction`
OF_EVALUATIONS = " of evaluations"
# Name of a measurement, 1 or 0
COMPILES = "torch.compile works"
# Maximum share of the training time for evaluations before the last one, and their maximum number
EVALUATION_SHARE = 0.02
MAX_EVALUATIONS = 10
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
# of a budget of time: an evaluation computes the whole head, a few percent of a run on a busy machine
HELD_OUT_PER_SECOND = 500
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


def count_text(settings: PretrainSettings, kind: TextKind = DOCUMENTS, difficulty: float | None = None) -> Text:
    """Tokenise new text, and count. difficulty: of the same text, if it is known. Errors: DataError, UserError."""
    assert settings.tokenizer_path is not None
    tokenizer = load_tokenizer(settings.tokenizer_path)
    encoder = kind.make_encoder(tokenizer, settings)
    corpus = open_corpus(settings, encoder, ONE_RANK, kind)
    if settings.dry_run and difficulty is None:
        for line in corpus.notices:
            announce(line)
    is_free = not {"val_path", "val_fraction"} & settings.user_set
    if is_free and (share := share_to_hold_out(corpus, encoder, settings.budget_seconds)):
        corpus = open_corpus(replace(settings, val_fraction=share), encoder, ONE_RANK, kind)
    return text_of(corpus, encoder, difficulty)


def text_of(corpus: Corpus, encoder: DocumentEncoder, difficulty: float | None = None) -> Text:
    """The text of a corpus. difficulty: if it is known."""
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
        difficulty=difficulty or difficulty_of(corpus.assembler(), rows, validation, encoder),
        evaluated=0 if validation is None else len(validation) * EVAL_ROWS * rows.T,
    )


def share_to_hold_out(corpus: Corpus, encoder: DocumentEncoder, seconds: float | None = None) -> float:
    """The share of a corpus that a plan holds out for validation; 0: nothing. seconds: a budget of time."""
    n_documents = len(corpus.documents)
    tokens_of_documents = np.diff(corpus.store.offsets)
    # Tokens of all sources: documents are held out before shares apply, and a pass may train a small part of them.
    n_tokens = int(tokens_of_documents[corpus.documents].sum())
    is_few = n_documents < MIN_DOCUMENTS
    most = min(HELD_OUT_TOKENS, HELD_OUT_PER_SECOND * (seconds or math.inf))
    fraction = max(min(HELD_OUT_SHARE, most / n_tokens), 0 if is_few else MIN_HELD_OUT / n_documents)
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


def head_ids_for(settings: PretrainSettings, text: Text, device: str) -> int:
    """`--sampled_softmax` of a planned run; 0: the whole vocabulary. device: its type."""
    if "sampled_softmax" in settings.fixed:
        return settings.sampled_softmax
    # On a GPU the head is a small part, and a CUDA graph cannot have another sample for each update. Fine-tuning was not measured.
    if device != "cpu" or settings.from_weight != "none":
        return 0
    distinct = max(len(set(row)) for row in rows_targets(text.corpus).tolist())
    return sampled_ids(distinct, text.vocab_size)


def entry_seconds(config: ModelConfig, rows: float, head_ids: int, device_type: str) -> float:
    """Seconds of an update of so many rows for entries beyond laws.USUAL_ENTRIES. head_ids: `--sampled_softmax`."""
    entries = max(config.vocab_size - laws.USUAL_ENTRIES, 0)
    if head_ids and device_type == "cpu":
        return DRAWING_SECONDS * rows * entries
    return ENTRY_SECONDS[device_type] * entries * config.hidden_size


class Machine(NamedTuple):
    """rate: FLOP/s of large products, all ranks together, on a CPU at most PRODUCT_RATE per thread. memory: bytes that a rank may
    take; None: unknown. device: its type. dtype: of products. name: of all that decides how long code takes on it."""

    rate: float
    memory: float | None
    device: str
    dtype: torch.dtype = torch.bfloat16
    ranks: Ranks = ONE_RANK
    name: str = ""


class Timed(NamedTuple):
    """Seconds of a micro-batch, of the rest of an update, and of a first update of two micro-batches, which compiles."""

    micro_batch: float
    rest: float
    first: float


# What: the price of a run of any size. The planner compares hundreds of sizes, so prices are formulas of a few numbers. Which way was
# not taken: training each size for a moment, which takes longer than a short budget. So only the best size is timed, and its ratio to
# the formula corrects those of about its width. Rank 0 plans alone: what all ranks do together (timing.py) has one place in planner.py.
@dataclass
class RunCosts:
    """Costs of runs with these settings on this text and machine, and their budget.

    settings: what the user leaves open has the planned value where one is known before the size: optimizer, tokenizer_path.
    """

    settings: PretrainSettings
    text: Text
    machine: Machine
    # `--sampled_softmax`; 0: the whole vocabulary
    head_ids: int = 0
    # The run will be compiled.
    compiled: bool = False
    # {width: measured / estimated seconds of an update}: seconds per FLOP depend on the width more than on the depth
    corrections: dict[int, float] = field(default_factory=dict)
    # of micro-batches alone, which an evaluation is like
    evaluation_correction: float = 1.0
    # `compile_key` of the code that a measurement has compiled
    compiled_key: str = ""
    measured: Measured = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.fixed = settings.fixed
        self.settings_with_head = replace(settings, sampled_softmax=self.head_ids)
        self.max_passes = laws.max_passes(settings.from_weight)
        self.n_prompts = len(read_prompts(settings.sample_prompts))
        self.seconds = settings.budget_seconds
        how = f"{settings.optimizer}, checkpointing {settings.gradient_checkpointing}, graphs {settings.cuda_graphs}"
        self.measured = Measured(f"{self.machine.name}, {how}")

    @property
    def seconds_left(self) -> float | None:
        """What is left of a budget of time."""
        return None if self.seconds is None else self.seconds - seconds_since_start()

    def init_scheme(self, config: ModelConfig) -> str:
        """The `--init_scheme` of a run of this model. Induction heads were measured with planned rates only."""
        if "init_scheme" in self.fixed:
            return self.settings.init_scheme
        has_planned_rates = (
            self.settings.optimizer == "muon" and not {"learning_rate", "embed_lr", "muon_lr"} & self.fixed
        )
        return "induction" if has_planned_rates and supports_induction(config) else "zero_out"

    def is_worth_compiling(self, seconds: float) -> bool:
        """Returns whether to compile a run that it takes so many seconds for: with a budget of time decided here, so that the run
        does what was planned; else a guess."""
        choice, device_type = self.settings.use_compile, self.machine.device
        if choice == "0" or (choice == "auto" and device_type not in PRODUCT_RATE):
            return False
        left = self.seconds_left
        if choice == "auto" and left is not None and (left - seconds) * EAGER_SLOWDOWN < MIN_COMPILED_GAIN * left:
            return False
        # Nothing is compiled to show a plan.
        if self.settings.dry_run:
            return bool(self.measured.numbers.get(COMPILES, any(map(shutil.which, ("g++", "clang++", "cl")))))
        # A run on a machine that cannot compile trains eagerly.
        compiles = failure_to_compile(device_type) is None
        self.measured.remember({COMPILES: float(compiles)})
        return compiles

    def model_key(self, config: ModelConfig) -> str:
        """Name of the model, with any number of layers: all blocks are alike."""
        heads = f"{config.num_attention_heads} of {config.num_key_value_heads} heads"
        return f"{config.generation} {config.hidden_size}, {heads}, experts {config.use_moe}, dropout {config.dropout}"

    def compile_key(self, config: ModelConfig, batching: Batching) -> str:
        """Name of the code that a run of this model compiles."""
        rows = f"{batching.micro_rows} rows of {self.text.rows.T}, {self.head_ids or 'all'} ids"
        return f"{self.model_key(config)}; {rows}"

    def compile_seconds(self, config: ModelConfig, batching: Batching) -> float:
        """Seconds that a run of this model takes to compile; 0: not compiled, or its code is from a measurement."""
        key = self.compile_key(config, batching)
        return 0.0 if not self.compiled or key == self.compiled_key else self.measured.seconds_to_compile(key)

    def estimated_seconds(self, config: ModelConfig, rows: int, compiled: bool) -> float:
        """Seconds of an update of this many rows, on a machine like the measured ones."""
        H = config.hidden_size
        context, utilisation = self.text.context, GPU_UTILISATION
        if self.machine.device == "cpu":
            context += CPU_SCORES * max(self.text.rows.T - laws.USUAL_ROW, 0)
            utilisation = CPU_UTILISATION + CPU_UTILISATION_PER_DOUBLING * math.log2(H / 128)
            utilisation = min(max(utilisation, MIN_UTILISATION), MAX_UTILISATION)
        flops = flops_per_token(config, context, self.head_ids)
        work = rows * self.text.rows.T * flops / utilisation
        if not compiled:
            work *= EAGER_SLOWDOWN
        if self.settings.optimizer == "muon":
            # Orthogonalising a matrix takes 4 m^2 n + 2 m^3 FLOPs a step, m the short side: about 5 H per weight of the blocks.
            weights = parameter_count(config) - config.vocab_size * H
            muon_flops = NEWTON_SCHULZ_STEPS * 5 * H * weights
            work += muon_flops / MUON_UTILISATION
        return work / self.machine.rate + entry_seconds(config, rows, self.head_ids, self.machine.device)

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
        update_seconds = self.evaluation_correction * self.estimated_seconds(config, rows, self.compiled)
        position_seconds = update_seconds / (rows * self.text.rows.T)
        samples = SAMPLE_S_OF_LAYER * config.num_hidden_layers * self.n_prompts
        # An evaluation computes the whole head.
        position_seconds *= flops_per_token(config, self.text.context) / self.token_flops(config)
        position_seconds *= EVALUATION_COST if self.compiled else EVALUATION_COST / EAGER_SLOWDOWN
        return position_seconds * self.text.evaluated + samples

    def evaluations(self, config: ModelConfig, batching: Batching, training_seconds: float) -> int:
        """Number of evaluations before the last one. training_seconds: of all updates."""
        is_free = "eval_interval" not in self.fixed
        if not self.text.evaluated or not (is_free or self.settings.eval_interval):
            return 0
        if is_free:
            affordable = EVALUATION_SHARE * training_seconds / self.evaluation_seconds(config, batching.rows)
            return int(min(affordable, MAX_EVALUATIONS))
        # At most one after each update
        updates_between = max(batching.updates_in(self.settings.eval_interval), 1.0)
        return int(training_seconds / self.update_seconds(config, batching.rows) / updates_between)

    def memory(self, config: ModelConfig, batching: Batching) -> float:
        """Peak memory of a rank in bytes."""
        # Micro-batches of a GPU are as large as fit, so eager code counts, to which a run may fall back.
        machine, T = self.machine, self.text.rows.T
        compiled = self.compiled and machine.device != "cuda"
        device, rows = torch.device(machine.device), batching.micro_rows
        return training_bytes(config, rows, T, self.settings_with_head, machine.dtype, device, compiled)

    def token_flops(self, config: ModelConfig) -> float:
        """Of a run of this model."""
        return flops_per_token(config, self.text.context, self.head_ids)

    def learn(self, config: ModelConfig, batching: Batching, timed: Timed, compiled: bool) -> None:
        """Correct the estimates by what was timed. Only the last one may be compiled: its code serves the run."""
        if compiled:
            self.compiled_key = self.compile_key(config, batching)
            self.measured.remember_compiling(self.compiled_key, timed.first - 2 * timed.micro_batch - timed.rest)
        micro_batches = timed.micro_batch * batching.micro_batches
        estimate = self.estimated_seconds(config, batching.rows, compiled)
        key, of_update = self.speed_key(config, compiled), (micro_batches + timed.rest) / estimate
        self.measured.remember({key: of_update, key + OF_EVALUATIONS: micro_batches / estimate})
        self._correct(config, key)

    def speed_key(self, config: ModelConfig, compiled: bool) -> str:
        """Name of the measured / estimated seconds of an update."""
        code = f"{'compiled' if compiled else 'plain'} {self.model_key(config)}"
        return f"correction of {code}, rows of {self.text.rows.T}, {self.head_ids or 'all'} ids"

    def recall(self, sizes: Sequence[ModelConfig]) -> None:
        """Correct the estimates by what was timed on this machine: by compiled code alone if that is known and the run is compiled."""
        for compiled in (True, False) if self.compiled else (False,):
            found = [size for size in sizes if self.speed_key(size, compiled) in self.measured.numbers]
            for size in found:
                self._correct(size, self.speed_key(size, compiled))
            if found:
                return

    def _correct(self, config: ModelConfig, key: str) -> None:
        """Correct the estimates by what `key` was timed at."""
        most = MAX_CORRECTION[self.machine.device]
        of_update, of_evaluation = (
            min(max(self.measured.numbers.get(name, 1.0), 1 / most), most) for name in (key, key + OF_EVALUATIONS)
        )
        self.corrections[config.hidden_size] = of_update
        self.evaluation_correction = of_evaluation
