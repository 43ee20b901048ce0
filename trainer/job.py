"""What a training job decides, and the words in which it talks with the Trainer.

A *job* is what differs between pretraining, fine-tuning, ELECTRA and GLUE: data, model, loss, learning rate, what is logged and what is
saved. A *Trainer* (trainer/loop.py) is what does not differ: the loop, updates, checkpoints, signals and reports. Neither
looks into the other. CONTRIBUTING.md has a small one.

In this order the Trainer asks a job:

    begin, outlook, make_fast                  once
    take_kept                                  once, where the run goes on with an earlier one
    replan                                     at the start, and where a clock moves the end
    plan                                       for each epoch: its rows
      learning_rate                            for each update
        assembler[plan.recipe(rows)]           for each micro-batch, perhaps in a worker process: the batch
        loss(batch, plan.totals(rows))         for each micro-batch: the forward pass
      metrics                                  now and then: what the log line says
      evaluate, samples, save_weights, kept    now and then
    trained, lines_at_the_end         once

The loss of a micro-batch is divided by the Totals of its whole update, over all micro-batches and ranks. So losses and
gradients are added up, and nobody divides by the number of micro-batches or ranks afterwards.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from common.wording import counted
from dataset.loader_workers import Loadable, MakesBatches
from dataset.mixed_plan import Move
from dataset.store.check import DigestCheck
from trainer.budget.clock import Clock
from trainer.engine import Engine
from trainer.machine.out_of_memory import plain_advice
from trainer.machine.ranks import Ranks
from trainer.machine.signals import StopSignals
from trainer.reporting.charts import COMMON, Chart
from trainer.reporting.next_commands import NextCommand
from trainer.sharding import Shards

UNLIMITED = float("inf")
# Stands for "no end" in a range of updates: no run comes so far.
LATEST_UPDATE = 10**12
# A run of fewer takes some tens of seconds: it does not wait for measurements, and nobody asks for its expected curve.
SHORT_RUN_FLOPS = 1e13
# A number, a text, or lists and dicts of them: what a metrics file or a checkpoint can hold.
Value = object


class Totals(Protocol):
    """What a whole update holds, over all its micro-batches and ranks."""

    @property
    def targets(self) -> int:
        """The tokens that are trained."""


# What a job's classes hand on to each other: what is sent to the process that makes a batch, the batch that is made of
# it, and what the update holds that the batch belongs to.
RecipeT = TypeVar("RecipeT")
BatchT = TypeVar("BatchT", bound=Loadable)
TotalsT = TypeVar("TotalsT", bound=Totals)
RecipeT_co = TypeVar("RecipeT_co", covariant=True)
TotalsT_co = TypeVar("TotalsT_co", bound=Totals, covariant=True)


class JobPlan(Protocol[RecipeT_co, TotalsT_co]):
    """The rows of one epoch, the same on every rank."""

    n_rows: int
    # Positions of a row.
    T: int
    # The share of the positions that hold a token.
    fill: float

    def totals(self, lo: int, hi: int) -> TotalsT_co:
        """The Totals of the rows [lo, hi)."""

    def documents_of(self, lo: int, hi: int) -> Iterable[int]:
        """The numbers of the documents in the rows [lo, hi), for the line on an update that was skipped."""

    def recipe(self, rows: range) -> RecipeT_co:
        """What the job's assembler needs to make the batch of these rows; small, since it goes to a worker process."""


class RunSettings(Protocol):
    """The flags that the Trainer itself reads; the settings of a job have more."""

    batch_size: int
    accumulation_steps: int
    rows_per_update: int
    grad_clip: float
    max_bad_updates: int
    num_workers: int
    log_interval: int
    save_interval: int
    save_minutes: str
    keep_checkpoints: int
    from_resume: bool
    gradient_checkpointing: bool
    report: bool
    tracker: str
    wandb_project: str


@dataclass(frozen=True)
class Surroundings:
    """The process that a run lives in. command: the one that started it, for the report. notices: lines on the processes,
    to be said before the first update. available_memory: bytes that could be had on the device before the process began with
    the run, None: it begins now, or the system does not tell.
    """

    ranks: Ranks
    device: torch.device
    signals: StopSignals
    command: str = ""
    notices: Sequence[str] = ()
    available_memory: int | None = None


@dataclass
class Progress:
    """Where a run stands. It is saved with every checkpoint."""

    epoch: int = 0
    # The row of `epoch` that comes next, counted over all ranks. So a resume may have another world size.
    row: int = 0
    update: int = 0
    # The last micro-batch, counted over all epochs and resumes.
    step: int = -1
    # Targets seen so far by all ranks, those of skipped updates included.
    tokens: int = 0
    # Updates that were not applied, as far as they are reported.
    skipped: int = 0
    # Of the last update whose outcome is known.
    grad_norm: float | None = None
    best_val_loss: float = float("inf")
    # The update after which the validation loss was that low, and the latest validation loss.
    best_val_update: int = 0
    val_loss: float = float("inf")
    # A stop signal came before an evaluation or within it: the resume begins with it.
    evaluation_due: bool = False
    # Where the run ends, and each time that its end has moved, for a job that `plans_to_end`.
    moves: list[Move] = field(default_factory=list)


@dataclass(frozen=True)
class Update(Generic[BatchT, TotalsT]):
    """One optimiser step: the rows [first_row, end_row) of an epoch of `n_rows` over all ranks, and this rank's part."""

    epoch: int
    n_rows: int
    first_row: int
    end_row: int
    # Of the epoch's micro-batches the first one of this update, counted from 0.
    first_step: int
    totals: TotalsT
    # One for each micro-batch; None where this rank has no rows left.
    batches: Sequence[BatchT | None]

    @property
    def last_step(self) -> int:
        """Of the epoch's micro-batches the last one of this update, counted from 0."""
        return self.first_step + len(self.batches) - 1


@dataclass
class Outlook:
    """What a job expects of its run: said before the first update, and used to make it fast."""

    # The plan of the epoch that comes next.
    plan: JobPlan[object, Totals]
    # On data and model, printed before the line on the run.
    lines: Sequence[str]
    # Printed behind it.
    notices: Sequence[str]
    # What the report shows of the model.
    model_fields: Mapping[str, Value]
    n_documents: int
    # What the metrics file notes of the data beside documents, rows and how full those are.
    data_fields: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    flops_per_token: float = 0.0
    # Of this rank in the whole run; 0: nothing is timed.
    flops: float = 0.0
    # Where updates limit the run: the epochs that they take.
    epochs: int | None = None


class Job(ABC, Generic[RecipeT, BatchT, TotalsT]):
    """One run of one kind of training.

    The constructor reads the settings, opens the data, builds model and optimiser, and sets the attributes below that
    have no default. From then on the Trainer asks.
    """

    # What is trained, and how.
    settings: RunSettings
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    # The precision of matrix products.
    dtype: torch.dtype
    # How `model` is divided among the ranks; None: each has the whole.
    shards: Shards | None = None
    # assembler[recipe] is a batch. A worker process gets a copy of it.
    assembler: MakesBatches[RecipeT, BatchT]
    # How many numbers `loss` gives to be added up.
    n_sums: int

    # Where the run ends: after so many epochs, or after so many updates, though that be in the middle of an epoch.
    epochs: int = 1
    max_updates: float = UNLIMITED
    # Whether the rows of its plan depend on where the run ends; then `Progress.moves` says it.
    plans_to_end: bool = False
    # Moves the end of a run with a time budget; None: `epochs` or `max_updates` say it.
    clock: Clock | None = None

    # The path of the run's files, without their endings.
    stem: Path
    # What `save_weights` leaves at the end: {what it is: path}.
    outputs: Mapping[str, Path]
    # Patterns of the names of what else an earlier run of this name may have left beside the stem. A fresh run moves it away.
    replaced: Sequence[str] = ()
    # More of that: what a run has written before its first save.
    begun: Sequence[Path] = ()
    # Updates after which the run is saved, beside those of --save_interval and --save_minutes.
    save_at: Container[int] = frozenset()

    # What a resumed checkpoint, and all ranks, must agree with: {what it is: value}.
    identity: Mapping[str, Value]
    # {entry of `identity`: the flags to look at where it differs}; not every entry has some.
    mended_by: Mapping[str, str] = {}
    # Flags that a resume may change, and then says so.
    may_change: Sequence[str] = ()
    # Flags that a resume does not read. It says so where they differ.
    only_at_start: Sequence[str] = ()

    # Fields of a log line beside loss and rate.
    shown: Sequence[str] = ("grad_norm",)
    # What the report draws, in this order.
    charts: Sequence[Chart] = COMMON
    # Compares the SHA-256 of the token files with what was written, in a thread on one rank of each machine.
    digest_check: DigestCheck | None = None

    # Whether `evaluate` gives figures, and how much is trained from one evaluation to the next, counted as `counts_updates`
    # says; 0: only one, at the end.
    evaluates: bool = False
    eval_interval: int = 0
    # Whether `samples` gives texts with each evaluation.
    has_samples: bool = False
    # Where it gives some at times of their own: the updates from one to the next; 0: nowhere.
    sample_interval: int = 0
    # What the intervals of the settings and `eval_interval` count: updates, or micro-batches as in MiniMind.
    counts_updates: bool = False

    # ----------------------------------------------------------------------------------- what is trained

    @abstractmethod
    def plan(self, epoch: int) -> JobPlan[RecipeT, TotalsT]:
        """The rows of an epoch, the same on every rank and at every call."""

    def replan(self, progress: Progress) -> bool:
        """The run is at its start or resumed, or a clock has moved its end: returns whether other rows than before come now.

        A job that `plans_to_end` notes that end in `progress.moves`. Errors: DataError where the data has too little for it.
        """
        return False

    def notice_of_rows(self) -> str | None:
        """A line on the rows that `replan` has planned, which is said once; None: there is nothing to say."""
        return None

    @abstractmethod
    def loss(self, batch: BatchT, totals: TotalsT) -> tuple[torch.Tensor, torch.Tensor]:
        """(this micro-batch's share of the update's loss, 0-d; float32 [n_sums] to add up for the log, detached)."""

    @abstractmethod
    def learning_rate(self, update: Update[BatchT, TotalsT], progress: Progress) -> float:
        """The rate of the update that comes next."""

    # --------------------------------------------------------------------------- before the first update

    def begin(self) -> None:  # noqa: B027 - most jobs have nothing to write before the first update
        """Called on all ranks when it is certain that there is something to train, before anything is printed."""

    @abstractmethod
    def outlook(self, progress: Progress) -> Outlook:
        """What the run will do from here on."""

    def make_fast(self, outlook: Outlook) -> list[str]:
        """Compile the model where that pays. Returns lines on what could not be done."""
        return []

    def settings_to_keep(self) -> RunSettings:
        """What is written beside the weights: settings with which this run can be started again."""
        return self.settings

    # ------------------------------------------------------------------------- log lines and evaluations

    @abstractmethod
    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, Value], float]:
        """(what to log, tokens) of the sums of `loss` over some updates and all ranks."""

    def expected_loss(self, tokens: int, rate: float) -> float | None:
        """The training loss of a run that goes well, after so many tokens and at this learning rate; None: not known."""
        return None

    def alarm(self, loss: float, expected: float | None) -> str | None:
        """What to say of the loss of a log line, on the main rank; None: nothing. expected: of expected_loss."""
        return None

    def evaluate(
        self, engine: Engine[BatchT, TotalsT], signals: StopSignals, update: int
    ) -> tuple[dict[str, float], int]:
        """(figures with val_loss among them, number of a stop signal that came meanwhile or 0)."""
        return {}, 0

    def samples(
        self, engine: Engine[BatchT, TotalsT], signals: StopSignals, is_last: bool
    ) -> tuple[list[tuple[str, str]], int]:
        """([(prompt, text)], number of a stop signal that came meanwhile or 0). is_last: no update comes after them."""
        return [], 0

    # ------------------------------------------------------------------------------------- what is saved

    @abstractmethod
    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        """Write what other people's code loads. weights: the model's state dict on the CPU after `update` updates.

        Runs in the thread that writes checkpoints.
        """

    def kept(self) -> dict[str, float | None]:
        """What else a resume needs of the job, beside model, optimiser and Progress: numbers and truth values by name. Called on all
        ranks; those of rank 0 are saved."""
        return {}

    def take_kept(self, kept: Mapping[str, float | None]) -> None:  # noqa: B027 - most jobs keep nothing
        """Take over what `kept` gave in the run before: the same names."""

    # ------------------------------------------------------------------------------------ how a run ends

    def trained(self, progress: Progress) -> list[tuple[str, int, float]]:
        """(name, tokens, passes) of each source of the data so far, for the end of a run. Called on the main rank."""
        return []

    def lines_at_the_end(self, progress: Progress) -> list[str]:
        """What to say of a run that has trained to its end, on the main rank."""
        return []

    def next_commands(self) -> list[NextCommand]:
        """What a user may want to do with the finished run, for the report."""
        return []

    def goal(self, progress: Progress, epochs: int) -> tuple[str, str]:
        """(what a finished run has done, the flag that lets it go on, "": none), for a run that is asked to do it again."""
        if progress.update >= self.max_updates:
            return counted(int(self.max_updates), "update"), "--max_steps"
        return counted(epochs, "epoch"), "--epochs"

    def memory_advice(self) -> str:
        """What helps where memory is used up, for the line that ends the run: flags, and what they do."""
        return plain_advice(self.settings, "a smaller --max_seq_len or model")
