"""The weights of the lowest validation loss: `pretrain_512.best.pth`, beside those of the last update once the loss has risen.

A checkpoint holds them too, and the files follow from it: they are written or deleted before each checkpoint and at each resume.
So a killed run loses no lowest point that came before its checkpoint, and keeps none from the part that it has lost.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.engine import Engine
from trainer.job import Job
from trainer.saving.checkpoint import snapshot
from trainer.saving.places import best_stem
from trainer.saving.weights import weights_to_save


class BestWeights:
    """weights: on rank 0, in the type in which they are saved; none before the first evaluation."""

    def __init__(self, job: Job[Any, Any, Any]) -> None:
        self.save = job.looks.save_best
        self.stem = best_stem(job.files.stem)
        self.weights: dict[str, torch.Tensor] = {}

    def take(self, engine: Engine[Any, Any]) -> None:
        """The validation loss has just been found lowest. A collective where the model is sharded."""
        if self.save is None:
            return
        weights = engine.weights()
        if engine.ranks.is_main:
            self.weights = weights_to_save(snapshot(weights))

    def restore(self, weights: dict[str, torch.Tensor], progress: Mapping[str, Any]) -> None:
        """On rank 0: go on from a checkpoint. Arguments and errors as those of `write`."""
        self.weights = weights
        self.write(weights, progress)

    def write(self, weights: Mapping[str, torch.Tensor], progress: Mapping[str, Any]) -> None:
        """On rank 0: make the files those of a checkpoint with these weights and this Progress. Errors: OSError."""
        if self.save is None:
            return
        # NaN has risen too.
        if weights and progress["val_loss"] != progress["best_val_loss"]:
            self.save(weights)
            return
        for ending in ("pth", "json"):
            Path(f"{self.stem}.{ending}").unlink(missing_ok=True)
