"""Experiment trackers: the same records to Weights & Biases, SwanLab, Trackio or TensorBoard."""

import importlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from common.errors import UserError

TRACKERS = ("wandb", "swanlab", "trackio", "tensorboard")


class Experiment(Protocol):
    """A run in a tracker. `id` finds it again after a resume; None where the files alone do."""

    id: str | None

    def log(self, numbers: Mapping[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


def open_tracker(
    kind: str, project: str, stem: Path, settings: Mapping[str, Any], run_id: str | None = None, step: int = -1
) -> Experiment:
    """Begin the run of the files `stem` in a tracker, or continue the one of `run_id` after `step`.

    Errors: UserError where the package is not installed or refuses.
    """
    try:
        if kind == "tensorboard":
            return TensorBoard(f"{stem}_tensorboard", settings, step)
        return Tracker(kind, project, stem.name, settings, run_id)
    except ImportError as error:
        raise UserError(f"--tracker {kind} needs a package that is not here: pip install {kind}") from error
    except Exception as error:
        # Each package raises its own kinds of errors.
        hint = " (WANDB_MODE=offline needs neither account nor network)" if kind == "wandb" else ""
        raise UserError(f"--tracker {kind}: {' '.join(str(error).split())}{hint}") from error


class Tracker:
    """W&B and the two that took over its interface."""

    def __init__(self, kind: str, project: str, name: str, settings: Mapping[str, Any], run_id: str | None) -> None:
        self.module = importlib.import_module(kind)
        if kind == "trackio":
            # It knows a run by its name alone, so the name is made unique and serves as the id.
            self.id = run_id or f"{name}-{secrets.token_hex(4)}"
            self.module.init(project=project, name=self.id, resume="allow", config=settings)
        else:
            self.id = self.module.init(project=project, name=name, id=run_id, resume="allow", config=settings).id

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.module.log(numbers, step=step)

    def finish(self) -> None:
        self.module.finish()


class TensorBoard:
    """Event files; `tensorboard --logdir out` shows them."""

    id: str | None = None

    def __init__(self, folder: str, settings: Mapping[str, Any], step: int) -> None:
        # Its package is not needed by anybody who does not ask for it.
        from torch.utils.tensorboard import SummaryWriter

        # A killed run has logged beyond its last checkpoint: a resume takes those points away.
        self.writer = SummaryWriter(folder, purge_step=step + 1)
        self.writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()), 0)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()
