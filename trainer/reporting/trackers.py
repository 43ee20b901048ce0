"""Experiment trackers: the same records to Weights & Biases, SwanLab, Trackio or TensorBoard."""

import importlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError

TRACKERS = ("wandb", "swanlab", "trackio", "tensorboard")


def open_tracker(
    kind: str, project: str, stem: Path, settings: Mapping[str, Any], run_id: str | None, step: int
) -> tuple[Any, str | None]:
    """Begin the run of the files `stem` in a tracker, or continue the one of `run_id` after `step`.

    Returns (an object with `log(numbers, step=...)` and `finish()`, the id by which a resume finds the run; None: by its files).
    Errors: UserError where the package is not installed or refuses.
    """
    try:
        if kind == "tensorboard":
            return TensorBoard(f"{stem}_tensorboard", settings, step), None
        # W&B and the two that took over its interface
        module = importlib.import_module(kind)
        if kind == "trackio":
            # It knows a run by its name alone, so the name is made unique and serves as the id.
            run_id = run_id or f"{stem.name}-{secrets.token_hex(4)}"
            module.init(project=project, name=run_id, resume="allow", config=settings)
            return module, run_id
        run = module.init(project=project, name=stem.name, id=run_id, resume="allow", config=settings)
        return module, run.id
    except ImportError as error:
        raise UserError(f"--tracker {kind} needs a package that is not here: pip install {kind}") from error
    except Exception as error:
        # Each package raises its own kinds of errors.
        hint = " (WANDB_MODE=offline needs neither account nor network)" if kind == "wandb" else ""
        raise UserError(f"--tracker {kind}: {' '.join(str(error).split())}{hint}") from error


class TensorBoard:
    """Event files; `tensorboard --logdir out` shows them."""

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
