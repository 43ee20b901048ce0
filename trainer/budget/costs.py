"""What a planned run takes, for each size of a model: seconds, memory, floating-point operations; and the text that there is.

Seconds are estimated: the work of an update divided by the machine's rate of large matrix products, times the share of that rate
that training reaches. The shares were measured on two cores with AVX512-BF16, by runs of 64 to 384 wide models. A machine that
behaves otherwise is found out by timing some sizes (`measure`), which corrects the estimates.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from dataset.corpus import EVAL_ROWS, split_by_hash
from dataset.loader import Batch, to_device
from dataset.packing import Totals
from dataset.tokenizing.encoder import load_tokenizer
from model.config import MiniMindConfig, parameter_count
from model.induction import can_copy
from model.model_minimind import MiniMindForCausalLM
from trainer.budget import laws
from trainer.budget.clock import EAGER_TIMES, FILES_S, REPORT_S, SAMPLE_S_OF_LAYER, evaluation_share
from trainer.budget.settings import seconds_of
from trainer.cuda_graphs import can_be_recorded
from trainer.engine import make_engine
from trainer.evaluation import read_prompts
from trainer.machine.compiling import COMPILE_SECONDS, COMPILED_DEVICES, compile_blocks, failure_to_compile
from trainer.machine.measure import seconds
from trainer.machine.ranks import Ranks, on_main
from trainer.optim.muon import NEWTON_SCHULZ_STEPS
from trainer.pretrain.data import DOCUMENTS, TextKind, open_corpus
from trainer.pretrain.loss import n_sums, pretrain_loss
from trainer.pretrain.memory import flops_per_token, mean_context, training_bytes
from trainer.pretrain.settings import PretrainSettings

# Share of the rate of large products that a compiled micro-batch of width 128 reaches on a CPU, and what each doubling of the width
# adds. `PRODUCT_RATE` in trainer/machine/compiling.py is another figure: of the products alone, and without a measurement.
CPU_SHARE = 0.49
CPU_SHARE_OF_DOUBLING = 0.13
# Guesses, for widths that were not measured: without bounds narrow models would reach nothing, and wide ones more than all.
LOWEST_SHARE = 0.2
HIGHEST_SHARE = 0.8
# Those shares were measured with rows of 512. A CPU computes the scores of other documents too: each position beyond takes as long as
# so many of a token's own document. Measured: 1.2 in rows of 1,024 and 0.8 in rows of 2,048 (256 x 8), 0.4 in rows of 1,024 (160 x 2).
CPU_SCORES = 0.9
# Large cards wait for small products. No measurement exists yet.
GPU_SHARE = 0.35
# Muon's products are smaller.
MUON_SHARE = 0.7
# Seconds that compiling takes once the compiler has kept its results; COMPILE_SECONDS the first time
WARM_COMPILE_S = 6.0
# A run is compiled where its time is at least so many times that of compiling, which may take longer beside other programs.
WORTH_COMPILING = 3.5
# A CPU is no further above the estimate than this: another program has disturbed the measurement, and the clock of the run mends
# the rest. Small updates of a GPU wait for its launches, of which the estimate knows nothing.
MOST_CORRECTION = {"cpu": 4.0, "cuda": 100.0, "mps": 100.0}
# Evaluations before the last one may take this part of the run, and are no more than this.
EVALUATION_PART = 0.02
MOST_EVALUATIONS = 10
# Updates that a measurement times, and what part of a run's updates they may be. The middle one counts: a run meets all of
# them, and not one outlier.
TIMED = 5
MEASURED_PART_OF_UPDATES = 0.05
# Where such updates are over at once, a measurement goes on for so much of the time: just after an installation, updates took
# 0.56 s while they were measured and 0.33 s in the run.
TIMED_PART = 0.01
MOST_TIMED_S = 10.0
# Held out where the user names no validation data: no more than this part of the documents, and no more than about so
# many tokens, but some documents in any case. Of fewer documents than FEWEST_DOCUMENTS nothing is held out. All four are guesses:
# little text is lost, an evaluation stays short, and ten documents are at most a twentieth of them.
HELD_OUT_PART = 0.02
HELD_OUT_TOKENS = 100_000
FEWEST_HELD_OUT = 10
FEWEST_DOCUMENTS = 200
# No smaller part of a text that is one document is held out.
FEWEST_HELD_OUT_TOKENS = 1000


@dataclass(frozen=True)
class Data:
    """The text of a run.

    tokens_of_pass: that one pass reads, each with a target; parts: its sources, since later passes over a mixture bring other
    text of some. most: tokens that a run can train where shares change over the run; None: any number. T: positions of a row; fill:
    share of them that hold a token; length: that of the documents in a row, as `mean_context` in trainer/pretrain/memory.py has
    it. evaluated: positions of one evaluation. val_fraction: of the documents, that is held out. text_scale: how hard the text
    is, relative to that of the law. batch_of: the first so many rows. most_passes: how often it helps to read the text.
    """

    vocab_size: int
    tokens_of_pass: float
    T: int
    fill: float
    length: float
    bytes_per_target: float
    evaluated: int
    val_fraction: float
    text_scale: float
    parts: tuple[laws.Part, ...]
    batch_of: Callable[[int], Batch]
    most: float | None = None
    most_passes: float = laws.MOST_PASSES

    @property
    def different(self) -> float:
        """Tokens of different text."""
        return laws.different_tokens(self.parts)

    def tokens_of_update(self, rows: int) -> float:
        """What an update of so many rows trains in the mean: the last one of each pass over the text has fewer."""
        rows_of_pass = self.tokens_of_pass / (self.T * self.fill)
        # Both factors were rounded, and a whole number must stay one.
        updates_of_pass = max(1, math.ceil(rows_of_pass / rows - 1e-6))
        return self.tokens_of_pass / updates_of_pass


def look_at_data(
    settings: PretrainSettings, given: Collection[str], ranks: Ranks, kind: TextKind = DOCUMENTS, tell: bool = True
) -> Data:
    """Tokenise what is new, and count. given: what the user has said. tell: see open_corpus. Errors: DataError, UserError."""
    assert settings.tokenizer_path is not None
    tokenizer = load_tokenizer(settings.tokenizer_path)
    encoder = kind.make_encoder(tokenizer, settings)
    corpus = open_corpus(settings, encoder, ranks, kind, tell)
    epoch = corpus.plan(0)
    # What the user holds out is not in the plan of the corpus.
    held_out_now = 0.0
    n_documents = len(corpus.documents)
    # tokens of all sources, from which documents are held out before any share is drawn: a pass may train a small part of them.
    n_tokens = int(np.diff(corpus.store.offsets)[corpus.documents].sum())
    is_free = not {"val_path", "val_fraction"} & set(given)
    if (
        is_free
        and n_documents == 1
        and encoder.can_hold_out_part
        and HELD_OUT_PART * n_tokens >= FEWEST_HELD_OUT_TOKENS
    ):
        # One long text: its last part.
        held_out_now = float(f"{min(HELD_OUT_PART, HELD_OUT_TOKENS / n_tokens):.1g}")
    elif is_free and n_documents >= FEWEST_DOCUMENTS:
        fraction = max(min(HELD_OUT_PART, HELD_OUT_TOKENS / n_tokens), FEWEST_HELD_OUT / n_documents)
        # One digit is enough, and reads well in a command.
        held_out_now = float(f"{fraction:.1g}")
        # Copies of a text are held out together, so of few different texts it may be none or all.
        _, held_out = split_by_hash(corpus.store, corpus.documents, held_out_now)
        if not 0 < len(held_out) < n_documents:
            held_out_now = 0.0
    val_fraction = held_out_now or settings.val_fraction
    trained_part = 1 - held_out_now
    tokens_of_pass = trained_part * epoch.n_pairs
    validation = corpus.validation()
    batches = math.ceil(val_fraction * n_tokens / (EVAL_ROWS * epoch.T)) if validation is None else len(validation)

    def batch_of(rows: int) -> Batch:
        assembler = corpus.assembler(tokenizer.pad_token_id or 0, rows)
        return assembler[epoch.recipe(range(min(rows, epoch.n_rows)))]

    return Data(
        vocab_size=encoder.vocab_size,
        tokens_of_pass=tokens_of_pass,
        T=epoch.T,
        fill=epoch.fill,
        length=mean_context(epoch),
        bytes_per_target=corpus.bytes_per_target(),
        evaluated=batches * EVAL_ROWS * epoch.T,
        val_fraction=val_fraction,
        text_scale=laws.text_scale(corpus.store, tokenizer),
        parts=tuple(
            part._replace(different=trained_part * part.different) for part in laws.parts_of(corpus, epoch.n_pairs)
        ),
        batch_of=batch_of,
        # One pass is the longest run there is, see dataset/mixture.py.
        most=tokens_of_pass if corpus.is_one_plan else None,
        most_passes=laws.most_passes(settings.from_weight),
    )


@dataclass(frozen=True)
class Machine:
    """What the run has. product_rate: FLOP/s of large matrix products of all ranks together. memory: bytes that a rank may take;
    None: not known."""

    device: torch.device
    dtype: torch.dtype
    ranks: Ranks
    product_rate: float
    memory: float | None = None


class Cut(NamedTuple):
    """How an update is cut into micro-batches. batch_size: rows of a micro-batch, whichever ranks share it."""

    batch_size: int
    accumulation_steps: int
    at_once: int

    @property
    def rows(self) -> int:
        """Rows of the update."""
        return self.batch_size * self.accumulation_steps * self.at_once


def share_of_product_rate(device_type: str, width: int) -> float:
    """What a compiled micro-batch of this width reaches."""
    if device_type != "cpu":
        return GPU_SHARE
    share = CPU_SHARE + CPU_SHARE_OF_DOUBLING * math.log2(width / 128)
    return min(max(share, LOWEST_SHARE), HIGHEST_SHARE)


class RunCosts:
    """What runs with these settings cost on this data and machine, and what they may cost.

    given: names of the settings that the user has said. seconds, tokens, flops: the budget; two of them are None. seconds_left:
    what planning has left of the first. batch_size, accumulation_steps, eval_interval: that the user has said; None: free.
    compiled: whether the run will be.
    """

    def __init__(self, settings: PretrainSettings, data: Data, machine: Machine, given: Collection[str]) -> None:
        """A collective: all ranks must call it."""
        self.settings = settings
        self.given = given
        self.data = data
        self.machine = machine
        self.optimizer = settings.optimizer if "optimizer" in given else "muon"
        self.seconds = seconds_of(settings.budget) if settings.budget else None
        self.seconds_left = self.seconds
        self.tokens = settings.budget_tokens
        self.flops = settings.budget_flops
        self.batch_size = settings.batch_size if "batch_size" in given else None
        self.accumulation_steps = settings.accumulation_steps if "accumulation_steps" in given else None
        self.eval_interval = settings.eval_interval if "eval_interval" in given else None
        self.prompts = len(read_prompts(settings.sample_prompts))
        # Rank 0 decides: the machines of several nodes may differ in having a compiler.
        self.compiled = on_main(machine.ranks, self._is_compiled)
        # {(width, layers): how long an update took, relative to the estimate}, of the sizes that were measured
        self.corrections: dict[tuple[int, int], float] = {}
        # {width: the updates with which it was measured last}: all blocks of a width are alike, so what was compiled for one
        # number of layers serves the others.
        self.measured_cuts: dict[int, Cut] = {}

    def init_scheme(self, config: MiniMindConfig) -> str:
        """The `--init_scheme` of a run of this model. Heads that copy were measured with the rates of plans alone."""
        if "init_scheme" in self.given:
            return self.settings.init_scheme
        has_planned_rates = self.optimizer == "muon" and not {"learning_rate", "embed_lr", "muon_lr"} & set(self.given)
        return "induction" if has_planned_rates and can_copy(config) else "zero_out"

    def _is_compiled(self) -> bool:
        """Whether the run will be compiled: decided here, so that the run does what was planned."""
        choice = self.settings.use_compile
        device = self.machine.device
        if choice == "0":
            return False
        if choice == "auto":
            is_short = self.seconds is not None and self.seconds < WORTH_COMPILING * COMPILE_SECONDS
            if is_short or device.type not in COMPILED_DEVICES:
                return False
        # A run that is told to compile on a machine that cannot trains the plain code.
        return failure_to_compile(device.type) is None

    def estimated_seconds(self, config: MiniMindConfig, rows: int) -> float:
        """Seconds of an update of so many rows, on a machine like those that were measured."""
        H, ranks = config.hidden_size, self.machine.ranks
        device_type = self.machine.device.type
        length = self.data.length
        if device_type == "cpu":
            length += CPU_SCORES * max(self.data.T - laws.USUAL_ROW, 0)
        work = rows * self.data.T * flops_per_token(config, length) / share_of_product_rate(device_type, H)
        if not self.compiled:
            work *= EAGER_TIMES
        if self.optimizer == "muon":
            # Orthogonalising a matrix takes 4 m^2 n + 2 m^3 in each step, m the short side: about 5 H for each weight of the blocks.
            weights = parameter_count(config) - config.vocab_size * H
            flops = NEWTON_SCHULZ_STEPS * 5 * H * weights
            # The processes of one command share it; of a launcher's ranks each does all of it.
            times = 1 if ranks.sharing > 1 else ranks.world_size
            work += flops / MUON_SHARE * times
        return work / self.machine.product_rate

    def update_seconds(self, config: MiniMindConfig, rows: int) -> float:
        """Seconds of an update of so many rows, by the estimate and what was measured."""
        estimate = self.estimated_seconds(config, rows)
        if not self.corrections:
            return estimate

        # What an update takes per operation goes by the width more than by the depth.
        def distance(size: tuple[int, int]) -> tuple[float, float]:
            width, layers = size
            return abs(math.log(width / config.hidden_size)), abs(math.log(layers / config.num_hidden_layers))

        return estimate * self.corrections[min(self.corrections, key=distance)]

    def other_seconds(self, config: MiniMindConfig, cut: Cut, training_seconds: float) -> float:
        """Seconds of what is no training: compiling, evaluations, files. training_seconds: what all updates take."""
        seconds = FILES_S + REPORT_S * self.settings.report
        if self.compiled:
            measured = self.measured_cuts.get(config.hidden_size)
            is_known = measured is not None and measured.batch_size == cut.batch_size
            seconds += WARM_COMPILE_S if is_known else COMPILE_SECONDS
        evaluations = 1 + self.evaluations(config, cut, training_seconds)
        return seconds + evaluations * self.evaluation_seconds(config, cut.rows)

    def evaluation_seconds(self, config: MiniMindConfig, rows: int) -> float:
        """Seconds of one evaluation, in a run whose updates have so many rows."""
        of_position = self.update_seconds(config, rows) / (rows * self.data.T)
        samples = SAMPLE_S_OF_LAYER * config.num_hidden_layers * self.prompts
        return evaluation_share(self.compiled) * of_position * self.data.evaluated + samples

    def evaluations(self, config: MiniMindConfig, cut: Cut, training_seconds: float) -> int:
        """How many come before the last one, in a run whose updates take so many seconds."""
        if not self.data.evaluated or self.eval_interval == 0:
            return 0
        if self.eval_interval is None:
            affordable = EVALUATION_PART * training_seconds / self.evaluation_seconds(config, cut.rows)
            return int(min(affordable, MOST_EVALUATIONS))
        # There is one at most after each update.
        updates_between = max(self.eval_interval / cut.accumulation_steps, 1.0)
        return int(training_seconds / self.update_seconds(config, cut.rows) / updates_between)

    def memory(self, config: MiniMindConfig, batch_size: int) -> float:
        """Bytes at the peak, with micro-batches of so many rows."""
        device_type = self.machine.device.type
        return training_bytes(
            config,
            batch_size,
            self.data.T,
            half=self.machine.dtype.itemsize,
            # Micro-batches of a GPU are as large as they can be, so plain code counts, which a run may turn out to need.
            compiled=self.compiled and device_type != "cuda",
            recomputes=self.settings.gradient_checkpointing,
            device_type=device_type,
            sharing=self.machine.ranks.sharing,
        )

    def token_flops(self, config: MiniMindConfig) -> float:
        return flops_per_token(config, self.data.length)

    def timed_seconds(self) -> float:
        """How long the updates of a measurement take together, at least. Only a budget of time is measured for."""
        assert self.seconds is not None
        return min(TIMED_PART * self.seconds, MOST_TIMED_S)

    def measure(self, config: MiniMindConfig, cut: Cut, updates: int) -> None:
        """Time some updates of a plan that has so many, and correct the estimates by that. A collective: all ranks must call it."""
        ranks = self.machine.ranks
        times = max(1, min(TIMED, int(MEASURED_PART_OF_UPDATES * updates)))
        micro_batch, rest = self.timed(config, ranks.rows_of(cut.batch_size), times)
        if ranks.memory is not None:
            ranks.memory.give_back(ranks.rank)
        # All ranks must plan with the same numbers.
        measured = on_main(ranks, lambda: micro_batch * cut.accumulation_steps + rest)
        self.measured_cuts[config.hidden_size] = cut
        size = (config.hidden_size, config.num_hidden_layers)
        factor = measured / self.estimated_seconds(config, cut.rows)
        self.corrections[size] = min(factor, MOST_CORRECTION[self.machine.device.type])

    def timed(self, config: MiniMindConfig, rows: int, times: int) -> tuple[float, float]:
        """(seconds of a micro-batch of `rows` rows on this rank, of the rest of an update), on the text itself: where the same tokens
        come often, and where a row has several documents, some kernels take another time.

        Both are the middle of at least `times`, and of as many more as it takes until they have taken `timed_seconds()`: a machine
        may be slower for the first of them than it will be in the run. The rest is the exchange of gradients and the optimiser.
        All ranks must call it: they wait for each other, as in the run.
        """
        device = self.machine.device
        dtype = self.machine.dtype
        ranks = self.machine.ranks
        T = self.data.T
        recomputes = self.settings.gradient_checkpointing
        # What was compiled for another size is in the way. What is compiled here stays: the run most often has this size.
        torch.compiler.reset()
        batch = to_device(self.data.batch_of(rows), device)
        model = MiniMindForCausalLM(config).train()
        if recomputes:
            model.activation_checkpointing_enable({"use_reentrant": False})
        engine = make_engine(
            model,
            partial(pretrain_loss, model),
            replace(self.settings, optimizer=self.optimizer),
            n_sums=n_sums(config),
            identity={},
            is_recordable=can_be_recorded(device, ranks, dtype, recomputes, config.dropout),
            cuda_graphs=self.settings.cuda_graphs != "0",
            dtype=dtype,
            ranks=ranks,
            device=device,
        )
        # Also where nothing is compiled: it prepares the device for plain code as the run does.
        choice = "1" if self.compiled else "0"
        compile_blocks(model.compile_training, choice, device, (rows, T), dtype=dtype)
        totals = Totals(batch.n_targets, batch.n_documents)

        def micro_batch() -> None:
            engine.micro_batch(batch, totals)

        def last_of_update() -> None:
            # Ranks may exchange gradients in its backward pass.
            engine.micro_batch(batch, totals, last=True)
            engine.update(1e-6)

        # The first one compiles.
        micro_batch()
        last_of_update()
        of_micro_batch: list[float] = []
        of_last: list[float] = []

        def is_too_short() -> bool:
            return sum(of_micro_batch) + sum(of_last) < self.timed_seconds()

        # Rank 0 decides, so that all ranks time as many.
        while len(of_last) < times or on_main(ranks, is_too_short):
            of_micro_batch.append(seconds(micro_batch, device))
            of_last.append(seconds(last_of_update, device))
        engine.close()
        return median(of_micro_batch), median(of_last) - median(of_micro_batch)
