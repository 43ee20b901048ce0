"""What a fine-tuned model gives: its outputs for the files of a task, their metrics and predictions."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from common.files import atomic_file
from dataset.glue.glue_dataset import Batch, GlueAssembler, Totals
from dataset.glue.glue_tasks import Task
from trainer.engine import Engine
from trainer.glue.loss import forward, loss_sum, metrics_of, predicted
from trainer.machine.signals import StopSignals


class Evaluation:
    """evaluation(update) -> ({metric: value} over the development files, with their first's val_loss; number of a stop
    signal that came meanwhile or 0). It is remembered: asked again for the same update, nothing is computed."""

    def __init__(
        self,
        engine: Engine[Batch, Totals],
        task: Task,
        dev: Mapping[str, GlueAssembler],
        batch_size: int,
        signals: StopSignals,
    ) -> None:
        self.engine = engine
        self.task = task
        self.dev = dev
        self.batch_size = batch_size
        self.signals = signals
        # The update that was evaluated last, and its figures.
        self._latest: tuple[int, dict[str, float]] | None = None

    def __call__(self, update: int, anew: bool = False) -> tuple[dict[str, float], int]:
        if self._latest is not None and self._latest[0] == update and not anew:
            return self._latest[1], 0
        found: dict[str, float] = {}
        for suffix, assembler in self.dev.items():
            logits, stop_signal = self.outputs(assembler)
            if stop_signal:
                return {}, stop_signal
            labels = assembler.features.labels
            # MNLI has two development files. The first one's loss is the one to follow.
            loss = float(loss_sum(self.task, logits, torch.from_numpy(labels))) / len(labels)
            found.setdefault("val_loss", loss)
            for name, value in metrics_of(self.task, logits, labels).items():
                found[name + suffix] = value
        self._latest = (update, found)
        return found, 0

    @torch.no_grad()
    def outputs(self, assembler: GlueAssembler) -> tuple[torch.Tensor, int]:
        """(logits of all examples of an assembler, float32 [N, outputs] on the CPU; number of a stop signal or 0).

        The batches hold examples of like length and are the same on every world size. Batch i is computed by rank i mod
        world size; the sum over ranks adds zeros to it, so that all get the same. Where the ranks have sharded the model they
        compute together: one that has no batch left computes the last one, and nothing comes of it.
        """
        engine = self.engine
        ranks = engine.ranks
        # Examples of like length stand together, so that little is padding.
        order = np.argsort(assembler.features.lengths, kind="stable")
        n_rows = len(order)
        # Behind them a row for the stop signal of each rank.
        logits = torch.zeros(n_rows + ranks.world_size, self.task.outputs)
        engine.model.eval()
        batches = [order[lo : lo + self.batch_size] for lo in range(0, n_rows, self.batch_size)]
        for first in range(0, len(batches), ranks.world_size):
            if engine.largest(self.signals.signum):
                logits[n_rows + ranks.rank, 0] = self.signals.signum
                break
            number = first + ranks.rank
            has_batch = number < len(batches)
            if not has_batch and engine.shards is None:
                break
            numbers = batches[number if has_batch else -1]
            with engine.autocast():
                found = forward(engine.model, assembler[numbers].to(engine.device)).cpu()
            if has_batch:
                logits[numbers] = found
        engine.model.train()
        if ranks.world_size > 1:
            logits = logits.to(engine.device)
            dist.all_reduce(logits)
            logits = logits.cpu()
        return logits[:n_rows], int(logits[n_rows:, 0].max())


def write_predictions(path: Path, task: Task, logits: torch.Tensor) -> None:
    """Write a TSV of the words of classes, or of scores, as the leaderboard wants it."""
    found = predicted(task, logits)
    # The leaderboard's scores have bounds.
    words = [f"{x:.3f}" for x in found.clip(*task.bounds)] if task.is_regression else [task.labels[i] for i in found]
    lines = ["index\tprediction", *(f"{i}\t{word}" for i, word in enumerate(words))]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(("\n".join(lines) + "\n").encode())
