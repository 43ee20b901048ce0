"""Experiment trackers: the same records to Weights & Biases, SwanLab, Trackio or TensorBoard."""

import importlib
import secrets
from pathlib import Path
from typing import Any, Protocol

from common.errors import UserError

TRACKERS = ("wandb", "swanlab", "trackio", "tensorboard")


class AnyTracker(Protocol):
    """A run in an experiment tracker. id: goes into the checkpoint, to continue the same run."""

    id: str | None

    def log(self, numbers: dict[str, float], step: int) -> None: ...
    def finish(self) -> None: ...


def open_tracker(
    kind: str,
    project: str,
    name: str,
    settings: dict[str, Any],
    folder: str | Path,
    run_id: str | None = None,
    step: int = -1,
) -> AnyTracker:
    """Begin the run `name` in a tracker, or continue the one of `run_id` after `step`.

    folder: where TensorBoard's files go. Returns an object with `id` (for the checkpoint), log(numbers, step) and finish().
    Errors: UserError where the package is not installed or refuses.
    """
    try:
        if kind == "tensorboard":
            return TensorBoard(f"{folder}/{name}_tensorboard", settings, step)
        return Tracker(importlib.import_module(kind), kind, project, name, settings, run_id)
    except ImportError as error:
        raise UserError(f"--tracker {kind} needs a package that is not here: pip install {kind}") from error
    except Exception as error:
        # Each package raises its own kinds.
        hint = " (WANDB_MODE=offline needs neither account nor network)" if kind == "wandb" else ""
        raise UserError(f"--tracker {kind}: {' '.join(str(error).split())}{hint}") from error


class Tracker:
    """W&B and the two that took over its interface."""

    id: str | None

    def __init__(
        self, module: Any, kind: str, project: str, name: str, settings: dict[str, Any], run_id: str | None
    ) -> None:
        self.module = module
        # Trackio knows a run by its name alone.
        if kind == "trackio":
            self.id = run_id or f"{name}-{secrets.token_hex(4)}"
            module.init(project=project, name=self.id, resume="allow", config=settings)
        else:
            run = module.init(project=project, name=name, id=run_id, resume="allow", config=settings)
            self.id = run.id

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.module.log(numbers, step=step)

    def finish(self) -> None:
        self.module.finish()


class TensorBoard:
    """Event files; `tensorboard --logdir out` shows them."""

    id: str | None = None

    def __init__(self, folder: str, settings: dict[str, Any], step: int) -> None:
        # Here: who does not ask for TensorBoard does not need its package.
        from torch.utils.tensorboard import SummaryWriter

        # A killed run has logged beyond its last checkpoint.
        self.writer = SummaryWriter(folder, purge_step=step + 1)
        self.writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()), 0)

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()
