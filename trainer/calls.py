"""A call of a trainer from Python: what it gets besides flags, and what it gives back. Imports nothing that takes time."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any, Literal

# gets a line of the metrics file; None: nobody does
OnLog = Callable[[dict[str, Any]], object] | None


@dataclass(frozen=True)
class Result:
    """How a run has ended, and what it has written. Losses are the last ones in the metrics file; None: there are none.

    reason: "stopped" by the event or a signal, so that from_resume=True continues; "planned": dry_run=True writes nothing.
    samples: [(prompt, continuation)], those of the last update that has some.
    """

    reason: Literal["finished", "stopped", "planned"]
    weights: Path | None = None
    training_loss: float | None = None
    val_loss: float | None = None
    report: Path | None = None
    samples: tuple[tuple[str, str], ...] = ()


@dataclass
class Caller:
    """The other arguments of `trainer.train`, and its result."""

    on_log: OnLog
    stop: Event
    result: Result = Result("planned")


class CallableModule(ModuleType):
    """The module of a command, which can be called like its function `train`."""

    def __call__(self, **arguments: Any) -> Any:
        return self.train(**arguments)
