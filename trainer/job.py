"""What a training job decides, and the words in which it talks with the Trainer.

A *job* is what differs between pretraining, fine-tuning, ELECTRA and GLUE: data, model, loss, learning rate, what is logged and what is
saved. A *Trainer* (trainer/loop.py) is what does not differ: the loop, updates, checkpoints, signals and reports. Neither
looks into the other. CONTRIBUTING.md has a small one.

In this order the Trainer asks a job:

    outlook, make_fast                         once, before the first update
    plan                                       for each epoch: its rows
      learning_rate                            for each update
        assembler[plan.recipe(rows)]           for each micro-batch, perhaps in a worker process: the batch
        engine.objective(batch, totals)        for each micro-batch: the forward pass
      metrics                                  now and then: what the log line says
      evaluation.evaluate, .samples, save_weights
    trained                                    once

The loss of a micro-batch is divided by the Totals of its whole update, over all micro-batches and ranks. So losses and
gradients are added up, and nobody divides by the number of micro-batches or ranks afterwards.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from dataset.loader import MakesBatches
from dataset.store.format import DigestCheck
from trainer.advice import Command, Forecast
from trainer.budget.clock import Clock
from trainer.engine import Engine, Update
from trainer.machine.command_line import StopSignals
from trainer.machine.ranks import Ranks
from trainer.settings import RunSettings

UNLIMITED = float("inf")
# A run of fewer takes some tens of seconds: it does not wait for measurements, and nobody asks for its expected curve.
SHORT_RUN_FLOPS = 1e13


class JobPlan(Protocol):
    """The rows of one epoch, the same on every rank."""

    n_rows: int
    # Positions of a row.
    T: int
    # The share of the positions that hold a token.
    fill: float

    def totals(self, lo: int, hi: int) -> Any:
        """What the rows [lo, hi) of an update hold: a NamedTuple for the job's loss, whose `targets` are the tokens that are trained."""

    def documents_of(self, lo: int, hi: int) -> Iterable[int]:
        """The numbers of the documents in the rows [lo, hi), for the line on an update that was skipped."""

    def recipe(self, rows: range) -> object:
        """What the job's assembler needs to make the batch of these rows; small, since it goes to a worker process."""


@dataclass(frozen=True)
class Surroundings:
    """The process that a run lives in. command: the one that started it, for the report. notices: lines on the processes,
    to be said before the first update.
    """

    ranks: Ranks
    device: torch.device
    signals: StopSignals
    command: str = ""
    notices: Sequence[str] = ()


@dataclass
class Progress:
    """Where a run stands. It is saved with every checkpoint."""

    epoch: int = 0
    # The row of `epoch` that comes next, counted over all ranks. So a resume may have another world size.
    row: int = 0
    update: int = 0
    # The last micro-batch, counted over all epochs and resumes.
    step: int = -1
    # Targets seen so far by all ranks, those of skipped updates included; and the rows that hold them.
    tokens: int = 0
    rows: int = 0
    # Updates that were not applied, as far as they are reported.
    skipped: int = 0
    # gradient norm of the last update whose outcome is known
    grad_norm: float | None = None
    # lowest and latest validation loss
    best_val_loss: float = float("inf")
    val_loss: float = float("inf")
    # A stop signal came before an evaluation or within it: the resume begins with it.
    evaluation_due: bool = False
    # seconds since the last log line
    log_seconds: float = 0.0
    # {tracker: id of the run in it}
    tracker_ids: dict[str, str | None] = field(default_factory=dict)


@dataclass
class Length:
    """Where a run ends: after so many epochs or, where they are limited, after so many updates. Then the Trainer sets the epochs that
    these take.

    clock: moves that end in a run with a time budget. flag: raised, it lets a finished run go on; "": none does. rows_of_epoch: of
    a run that is one plan, whose parts have as many rows as its flags ask for; 0: the rows of an epoch are the data's.
    """

    epochs: int = 1
    max_updates: float = UNLIMITED
    clock: Clock | None = None
    flag: str = "--epochs"
    rows_of_epoch: int = 0

    @property
    def last_update(self) -> float:
        """The last update, as the clock of a budget or else the flags say."""
        return self.max_updates if self.clock is None else self.clock.end

    def is_reached(self, progress: Progress) -> bool:
        """Whether the run has done all of it."""
        if self.last_update < UNLIMITED:
            return progress.update >= self.last_update
        return progress.epoch >= self.epochs


@dataclass
class RunFiles:
    """What a run writes. stem: path of its files without their endings. outputs: {name: path} that save_weights leaves at the end.

    settings: with which the run can be started again; written beside the weights. write_at_start: {path: what writes it} before the
    first update. stale_patterns: names of what else an earlier run may have left beside the stem; a fresh run moves it away.
    save_at: updates after which the run is saved, beside those of --save_interval and --save_minutes.
    """

    stem: Path
    outputs: Mapping[str, Path]
    settings: RunSettings
    write_at_start: Mapping[Path, Callable[[], None]] = field(default_factory=dict)
    stale_patterns: Sequence[str] = ()
    save_at: Container[int] = frozenset()


@dataclass(frozen=True)
class Identity:
    """What a resume must have in common with its run: {what it is: value}, the same on all ranks.

    mended_by: {entry: the flags to look at where it differs}. only_at_start: flags that a resume does not read.
    """

    entries: Mapping[str, object]
    mended_by: Mapping[str, str] = field(default_factory=dict)
    only_at_start: Sequence[str] = ()


# (figures with val_loss among them, number of a stop signal that came meanwhile or 0), after so many updates
Evaluate = Callable[[Engine, StopSignals, int], tuple[dict[str, float], int]]
# Writes a state dict on the CPU for other people's code, to files that begin so
SaveBest = Callable[[Path, Mapping[str, torch.Tensor]], None]
# ([(prompt, text)], number of a stop signal that came meanwhile or 0)
Samples = Callable[[Engine, StopSignals], tuple[list[tuple[str, str]], int]]


@dataclass
class Evaluation:
    """What a job finds out of its model now and then, and how often.

    evaluate: None: not at all; else after every `eval_interval`, and at the end. samples: texts, with each evaluation, and
    after every `sample_interval` updates. counts_updates: what the intervals of the settings and `eval_interval` count;
    else micro-batches, as in MiniMind. save_best: writes the weights of the lowest validation loss; None: they are not kept.
    """

    evaluate: Evaluate | None = None
    eval_interval: int = 0
    samples: Samples | None = None
    sample_interval: int = 0
    counts_updates: bool = False
    save_best: SaveBest | None = None


@dataclass
class Outlook:
    """What a job expects of its run: said and recorded before the first update."""

    # The plan of the epoch that comes next.
    plan: JobPlan
    # On data and model, printed before the line on the run.
    lines: Sequence[str]
    # Printed behind it.
    notices: Sequence[str]
    # What the report shows of the model.
    model_fields: Mapping[str, object]
    n_documents: int
    # What the metrics file notes of the data beside documents, rows and how full those are.
    data_fields: Mapping[str, object] = field(default_factory=dict)
    flops_per_token: float = 0.0
    # operations of this rank in the whole run; 0: nothing is timed
    flops: float = 0.0
    # Fields of a log line beside loss and rate
    shown: Sequence[str] = ("grad_norm",)
    # The commands that the report ends with
    next_commands: Sequence[Command] = ()
    # The loss of a run that goes well, shown beside its own; None: not known
    forecast: Forecast | None = None


class Job(ABC):
    """One run of one kind of training.

    The constructor reads the settings, opens the data, builds model and optimiser, and sets the attributes below that
    have no default. From then on the Trainer asks.
    """

    settings: RunSettings
    # Model, optimiser and loss
    engine: Engine
    # assembler[recipe] is a batch. A worker process gets a copy of it.
    assembler: MakesBatches
    length: Length
    files: RunFiles
    identity: Identity
    evaluation: Evaluation
    # Compares the SHA-256 of the token files with what was written, in a thread on one rank of each machine.
    digest_check: DigestCheck | None = None

    @abstractmethod
    def plan(self, epoch: int) -> JobPlan:
        """The rows of an epoch, the same on every rank and at every call."""

    @abstractmethod
    def outlook(self, progress: Progress) -> Outlook:
        """What the run will do from here on."""

    def make_fast(self, outlook: Outlook) -> Sequence[str]:
        """Compile the model, where that pays. Returns lines for the user."""
        return ()

    @abstractmethod
    def learning_rate(self, update: Update, progress: Progress) -> float:
        """The rate of the update that comes next."""

    @abstractmethod
    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, object], float]:
        """(what to log, tokens) of the sums of the objective over some updates and all ranks."""

    @abstractmethod
    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        """Write what other people's code loads. weights: the model's state dict on the CPU after `update` updates.

        Runs in the thread that writes checkpoints.
        """

    def trained(self, progress: Progress) -> Sequence[tuple[str, int, float]]:
        """(name, tokens, passes) of each source, of a run that has trained to its end. Called on the main rank."""
        return ()
