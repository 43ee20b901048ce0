"""What a training job decides, and the words in which it talks with the Trainer.

A *job* is what differs between pretraining, ELECTRA and GLUE: data, model, loss, learning rate, what is logged and what is
saved. A *Trainer* (trainer/loop.py) is what does not differ: the loop, updates, checkpoints, signals and reports. Neither
looks into the other. CONTRIBUTING.md has a job of about sixty lines.
"""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from common.wording import counted
from dataset.store.check import TokenCheck
from trainer.engine import Engine
from trainer.machine.ranks import Ranks
from trainer.machine.signals import StopSignals
from trainer.reporting.charts import COMMON, Chart
from trainer.reporting.next_commands import NextCommand

UNLIMITED = float("inf")


class Totals(Protocol):
    """What a whole update holds, over all its micro-batches and ranks."""

    @property
    def targets(self) -> int:
        """The tokens that are trained."""


class Plan(Protocol):
    """The rows of one epoch, the same on every rank."""

    n_rows: int
    T: int  # positions of a row
    fill: float  # share of the positions that hold a token

    def totals(self, lo: int, hi: int) -> Any:
        """The Totals of the rows [lo, hi)."""

    def documents_of(self, lo: int, hi: int) -> Iterable[int]:
        """The numbers of the documents in the rows [lo, hi), for the line on an update that was skipped."""

    def recipe(self, rows: range) -> Any:
        """What the job's assembler needs to make the batch of these rows; small, since it goes to a worker process."""


class Assembler(Protocol):
    """Makes batches from recipes, here or in a worker process."""

    def __getitem__(self, recipe: Any) -> Any: ...


class RunSettings(Protocol):
    """The flags that the Trainer itself reads; the settings of a job have more."""

    batch_size: int
    accumulation_steps: int
    grad_clip: float
    max_bad_updates: int
    num_workers: int
    log_interval: int
    save_interval: int
    keep_checkpoints: int
    from_resume: bool
    report: bool
    tracker: str
    wandb_project: str


@dataclass(frozen=True)
class Surroundings:
    """The process that a run lives in."""

    ranks: Ranks
    device: torch.device
    signals: StopSignals
    command: str = ""  # that started it, for the report


@dataclass
class Progress:
    """Where a run stands. `row` is the global row of `epoch` that comes next, whatever the world size."""

    epoch: int = 0
    row: int = 0
    update: int = 0
    step: int = -1  # the last micro-batch, counted over all epochs and resumes
    tokens: int = 0  # targets seen so far by all ranks, those of skipped updates included
    skipped: int = 0  # updates that were not applied, as far as they are reported
    grad_norm: float | None = None  # of the last update whose outcome is known
    best_val_loss: float = float("inf")
    evaluation_due: bool = False  # a stop signal came before or in an evaluation


@dataclass(frozen=True)
class Update:
    """One optimiser step: the global rows [first_row, end_row) of an epoch of `n_rows`, and this rank's part of them."""

    epoch: int
    n_rows: int
    first_row: int
    end_row: int
    first_step: int  # of the epoch's micro-batches the first one of this update, counted from 0
    totals: Any
    batches: Sequence[Any]  # one for each micro-batch; None where this rank has no rows left


@dataclass
class Outlook:
    """What a job expects of its run: said before the first update, and used to make it fast."""

    rows: Plan  # of the epoch that comes next
    lines: Sequence[str]  # on data and model, printed before the line on the run
    notices: Sequence[str]  # printed behind it
    model_fields: Mapping[str, Any]  # what the report shows of the model
    n_documents: int
    flops_per_token: float = 0.0
    flops: float = 0.0  # of this rank in the whole run; 0: nothing is timed
    epochs: int | None = None  # where updates limit the run: the epochs that they take


BatchT = TypeVar("BatchT")


class Job(ABC, Generic[BatchT]):
    """One run of one kind of training. Attributes without a default are set by the job's constructor."""

    settings: RunSettings  # a dataclass of the job's own
    stem: Path  # of the run's files, without their endings
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    dtype: torch.dtype  # of matrix products
    n_sums: int  # numbers that `loss` gives to be added up
    assembler: Assembler
    outputs: Mapping[str, Path]  # what `save_weights` leaves at the end: {what: path}
    identity: dict[str, Any]  # what a resumed checkpoint must agree with: {what: value}
    mended_by: Mapping[str, str] = {}  # {entry of `identity`: the flags that may mend it where it differs}

    epochs: int = 1
    max_updates: float = UNLIMITED  # the run ends there, though it be in the middle of an epoch
    save_at: Container[int] = frozenset()  # updates after which it is saved, beside those of --save_interval
    shown: Sequence[str] = ("grad_norm",)  # fields of a log line beside loss and rate
    may_change: Sequence[str] = ()  # flags that a resume may change, and then says so
    only_at_start: Sequence[str] = ()  # flags that a resume does not read, and says so where they differ
    replaced: Sequence[Path] = ()  # what else an earlier run may have left; a fresh one moves it away
    begun: Sequence[Path] = ()  # that of it which a run leaves before it has saved anything
    token_check: TokenCheck | None = None  # of the data, on one rank of a machine
    charts: Sequence[Chart] = COMMON  # what the report draws, in this order
    evaluates: bool = False
    eval_interval: int = 0  # micro-batches between evaluations, 0: one at the end
    has_samples: bool = False

    @abstractmethod
    def plan(self, epoch: int) -> Plan:
        """The rows of an epoch, the same on every rank and at every call."""

    @abstractmethod
    def loss(self, batch: BatchT, totals: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(this micro-batch's share of the update's loss, 0-d; float32 [n_sums] to add up for the log, detached)."""

    @abstractmethod
    def learning_rate(self, update: Update, progress: Progress) -> float:
        """The rate of the update that comes next."""

    @abstractmethod
    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
        """(what to log, tokens) of the sums of `loss` over some updates and all ranks."""

    @abstractmethod
    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        """Write what other people's code loads. weights: the model's state dict on the CPU after `update` updates.

        Runs in the thread that writes checkpoints.
        """

    @abstractmethod
    def outlook(self, progress: Progress) -> Outlook:
        """What the run will do from here on."""

    def next_commands(self) -> list[NextCommand]:
        """What a user may want to do with the finished run, for the report."""
        return []

    def settings_to_keep(self) -> RunSettings:
        """What is written beside the weights: settings with which this run can be started again."""
        return self.settings

    def begin(self) -> None:  # noqa: B027 - most jobs have nothing to write before the first update
        """Called on all ranks when it is certain that there is something to train, before anything is printed."""

    def make_fast(self, outlook: Outlook) -> list[str]:
        """Compile the model where that pays. Returns lines on what could not be done."""
        return []

    def evaluate(self, engine: Engine, signals: StopSignals, update: int) -> tuple[dict[str, float], int]:
        """(figures with val_loss among them, number of a stop signal that came meanwhile or 0)."""
        return {}, 0

    def samples(self, engine: Engine, signals: StopSignals) -> tuple[list[tuple[str, str]], int]:
        """([(prompt, text)], number of a stop signal that came meanwhile or 0)."""
        return [], 0

    def goal(self, progress: Progress, epochs: int) -> tuple[str, str]:
        """(what a finished run has done, the flag that lets it go on), for a run that is asked to do it again."""
        if progress.update >= self.max_updates:
            return counted(int(self.max_updates), "update"), "--max_steps"
        return counted(epochs, "epoch"), "--epochs"
