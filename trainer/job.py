"""The interface between a training job and the Trainer.

A *job* is what differs between pretraining, fine-tuning, ELECTRA and GLUE: data, model, loss, learning rate, logged metrics, saved
weights. The *Trainer* (trainer/loop.py) is what they share: the loop, updates, checkpoints, signals and reports. It knows
a job by this interface alone. CONTRIBUTING.md has a small job.

The Trainer calls a job in this order:

    overview, compile_model                    once, before the first update
    plan                                       for each epoch: its rows
      learning_rate                            for each update
        assembler[plan.recipe(rows)]           for each micro-batch, perhaps in a worker process: the batch
        loss(batch, totals)                    for each micro-batch, called by the engine, which says what it returns
      metrics                                  for each log line: its values
      evaluation.evaluate, .samples, save_weights
    trained                                    once
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from dataset.loader import MakesBatches
from trainer.batching import Batching
from trainer.calls import Caller
from trainer.engine import Engine, Update
from trainer.forecast import Forecast
from trainer.machine.command_line import StopSignals
from trainer.machine.ranks import Ranks
from trainer.settings import RunSettings

UNLIMITED = float("inf")
# Shorter runs take some tens of seconds: no measurement of the machine, no expected loss unless it is planned.
SHORT_RUN_FLOPS = 1e13


class JobPlan(Protocol):
    """The rows of one epoch, the same on every rank."""

    n_rows: int
    T: int  # positions per row
    fill: float  # fraction of the positions that hold a token

    def totals(self, lo: int, hi: int) -> Any:
        """Totals of the rows [lo, hi) of an update: a NamedTuple for the job's loss. Its `targets` counts the trained tokens."""

    def documents_of(self, lo: int, hi: int) -> Iterable[int]:
        """Numbers of the documents in the rows [lo, hi), for the message about a skipped update."""

    def recipe(self, rows: range) -> object:
        """Input of the job's assembler for the batch of these rows; small, since it is sent to a worker process."""


@dataclass(frozen=True)
class RunContext:
    """Ranks, device and stop signals of a run. command: its command line, for the report. notices: lines about the processes,
    printed before the first update. caller: of a call from Python.
    """

    ranks: Ranks
    device: torch.device
    signals: StopSignals
    command: str = ""
    notices: Sequence[str] = ()
    caller: Caller | None = None


@dataclass
class Progress:
    """Progress of a run, saved in every checkpoint."""

    epoch: int = 0
    row: int = 0  # next one of `epoch`, counted over all ranks, so a resume may change the world size
    update: int = 0
    step: int = -1  # last micro-batch, counted over all epochs and resumes
    # targets seen by all ranks, including those of skipped updates, and the rows that hold them
    tokens: int = 0
    rows: int = 0
    skipped: int = 0  # updates reported so far
    grad_norm: float | None = None  # of the last update whose outcome is known
    # lowest and latest validation loss
    best_val_loss: float = float("inf")
    val_loss: float = float("inf")
    val_data: str = ""  # Evaluation.data of these
    is_warm: bool = False  # The warm-up is over: a resume with larger updates does not start it again.
    evaluation_due: bool = False  # for example after a stop signal: the resume starts with it
    log_seconds: float = 0.0  # since the last log line
    tracker_ids: dict[str, str | None] = field(default_factory=dict)  # {tracker: id of the run in it}
    alarm: dict[str, Any] = field(default_factory=dict)  # state of the run's Alarm


class Clock(Protocol):
    """Moves the end of a run that has a time budget. All ranks have one.

    forecast: for its lines; set by the Trainer.
    """

    forecast: Forecast | None

    @property
    def end(self) -> int:
        """The last update of the run."""

    def factor(self, update: int) -> float | None:
        """Factor of the learning rate after `update` updates, once the end has moved; None: follow the schedule."""

    def after_update(self, update: int) -> None:
        """To be called on all ranks after each update. It may move the end."""

    def evaluating(self) -> AbstractContextManager[None]:
        """The context of an evaluation, whose time is no update's."""

    def state_dict(self) -> dict[str, float | None]: ...

    def load_state_dict(self, state: Mapping[str, float | None]) -> None: ...


@dataclass
class Length:
    """When a run ends: after `epochs` or, if `max_updates` is limited, after that many updates; the Trainer then sets the epochs that
    these take.

    clock: moves the end of a run with a time budget. flag: the one to raise to continue a finished run; "": none. rows_of_epoch:
    rows that count as an epoch if --max_updates sets the length of a run that is one plan (changing shares); 0: those of the data.
    """

    epochs: int = 1
    max_updates: float = UNLIMITED
    clock: Clock | None = None
    flag: str = "--epochs"
    rows_of_epoch: int = 0

    @property
    def last_update(self) -> float:
        """The last update, set by the clock of a budget or else by the flags."""
        return self.max_updates if self.clock is None else self.clock.end


@dataclass
class RunFiles:
    """Files that a run writes. stem: their path without suffix. outputs: {name: path} of the final files of save_weights.

    settings: to start the run again, written beside the weights. write_at_start: {path: its writer}, called before the
    first update. stale_patterns: globs of other files of an earlier run beside the stem; a fresh run moves them away.
    save_at: updates after which the run is saved, besides those of --save_interval and --save_minutes.
    """

    stem: Path
    outputs: Mapping[str, Path]
    settings: RunSettings
    write_at_start: Mapping[Path, Callable[[], None]] = field(default_factory=dict)
    stale_patterns: Sequence[str] = ()
    save_at: Container[int] = frozenset()


@dataclass(frozen=True)
class Identity:
    """Properties that a resume must share with its run: {name: value}, the same on all ranks.

    flags_to_check: {entry: flags to check if it differs}. ignored_on_resume: flags that a resume ignores. defaults: values of
    entries that an older checkpoint lacks.
    """

    entries: Mapping[str, object]
    flags_to_check: Mapping[str, str] = field(default_factory=dict)
    ignored_on_resume: Sequence[str] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)


# (engine, signals, updates so far) -> (figures including val_loss, number of a stop signal received meanwhile or 0)
Evaluate = Callable[[Engine, StopSignals, int], tuple[dict[str, float], int]]
# (stem of the files, state dict on the CPU): writes weights for other people's code
SaveBest = Callable[[Path, Mapping[str, torch.Tensor]], None]
# returns ([(prompt, text)], number of a stop signal received meanwhile or 0)
Samples = Callable[[Engine, StopSignals], tuple[list[tuple[str, str]], int]]


@dataclass
class Evaluation:
    """Evaluations during a run.

    evaluate: every `eval_interval` and at the end; None: never. samples: generated texts, every `sample_interval` updates and
    at the end; 0: with each evaluation. counts_updates: `eval_interval` and the intervals of the settings count updates;
    else micro-batches, as in MiniMind. save_best: writes the weights of the lowest validation loss; None: not saved. data:
    fingerprint of the validation documents, "" if a resume cannot have others.
    """

    evaluate: Evaluate | None = None
    eval_interval: int = 0
    samples: Samples | None = None
    sample_interval: int = 0
    counts_updates: bool = False
    save_best: SaveBest | None = None
    data: str = ""


@dataclass
class RunOverview:
    """Facts and forecasts of a run, printed and recorded before the first update."""

    plan: JobPlan  # of the next epoch
    lines: Sequence[str]  # on data and model, printed before the line on the run
    notices: Sequence[str]  # printed after it
    model_fields: Mapping[str, object]  # for the report
    n_documents: int
    # for the metrics file, besides documents, rows and their fill
    data_fields: Mapping[str, object] = field(default_factory=dict)
    flops_per_token: float = 0.0
    flops: float = 0.0  # of this rank in the whole run; 0: nothing is timed
    tokens: float = 0.0  # that the whole run trains
    # (loss of guessing, entropy of single tokens) in nats, see trainer/reporting/alarm.py
    guesses: tuple[float, float] = (math.inf, math.inf)
    shown: Sequence[str] = ("grad_norm",)  # fields of a log line besides loss and learning rate
    next_commands: Sequence[tuple[str, str]] = ()  # (purpose, command), at the end of the report
    forecast: Forecast | None = None  # None: unknown, and on ranks that do not print


class Job(ABC):
    """One run of one kind of training.

    The constructor reads the settings, opens the data, builds model and optimiser, and sets the attributes below that
    have no default. From then on the Trainer calls it.
    """

    settings: RunSettings
    batching: Batching
    engine: Engine  # model, optimisers and loss
    assembler: MakesBatches  # assembler[recipe] is a batch; worker processes get copies of it
    length: Length
    files: RunFiles
    identity: Identity
    evaluation: Evaluation

    @abstractmethod
    def plan(self, epoch: int) -> JobPlan:
        """The rows of an epoch, the same on every rank and at every call."""

    @abstractmethod
    def overview(self, progress: Progress) -> RunOverview:
        """Facts and forecasts of the run from here on."""

    def compile_model(self, overview: RunOverview) -> Sequence[str]:
        """Compile the model if that pays off. Returns lines for the user."""
        return ()

    @abstractmethod
    def learning_rate(self, update: Update, progress: Progress) -> float:
        """Learning rate of the next update."""

    @abstractmethod
    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, object], float]:
        """(metrics to log, tokens), from the objective's sums over some updates and all ranks."""

    @abstractmethod
    def save_weights(self, weights: Mapping[str, torch.Tensor], update: int, is_last: bool) -> None:
        """Write the weights for other people's code. weights: state dict on the CPU after `update` updates.

        Runs in the thread that writes checkpoints.
        """

    def trained(self, progress: Progress) -> Sequence[tuple[str, int, float]]:
        """(name, tokens, passes) of each source, once the run is finished. Called on rank 0."""
        return ()
