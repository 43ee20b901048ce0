"""What a fine-tuned model gives: its outputs for the files of a task, and what is made of them at the end of a run."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dataset.glue.glue_dataset import Batch, GlueAssembler, Totals
from dataset.glue.glue_tasks import Task
from trainer.engine import Engine
from trainer.glue.ensemble import OUTPUTS, Outputs, write_outputs
from trainer.glue.files import Data
from trainer.glue.head import saved_weights
from trainer.glue.loss import forward, score_divisor
from trainer.glue.measures import mean_loss, measured
from trainer.glue.padding import real_outputs
from trainer.glue.predictions import PREDICTIONS, suffix_of, write_predictions
from trainer.glue.results import line_of
from trainer.glue.settings import GlueSettings
from trainer.machine.collectives import on_main
from trainer.machine.signals import StopSignals
from trainer.reporting.reporter import Say


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
        # The outputs for each development file that they are the figures of, by its suffix.
        self.logits: dict[str, torch.Tensor] = {}

    def __call__(self, update: int, anew: bool = False) -> tuple[dict[str, float], int]:
        if self._latest is not None and self._latest[0] == update and not anew:
            return self._latest[1], 0
        found: dict[str, float] = {}
        for suffix, assembler in self.dev.items():
            logits, stop_signal = self.outputs(assembler)
            if stop_signal:
                return {}, stop_signal
            self.logits[suffix] = logits
            divisor = score_divisor(self.engine.model)
            loss = mean_loss(self.task, assembler.features, logits, divisor)
            # MNLI has two development files. The first one's loss is the one to follow.
            found.setdefault("val_loss", loss)
            for name, value in measured(self.task, assembler, logits, divisor).items():
                found[name + suffix] = value
        self._latest = (update, found)
        return found, 0

    @torch.no_grad()
    def outputs(self, assembler: GlueAssembler) -> tuple[torch.Tensor, int]:
        """(logits of all examples of an assembler, float32 [N, outputs] on the CPU, or [P, outputs] of the positions of all
        examples where every position has its own; number of a stop signal or 0).

        The batches hold examples of like length and are the same on every world size. Batch i is computed by rank i mod
        world size; the sum over ranks adds zeros to it, so that all get the same. Where the ranks have sharded the model they
        compute together: one that has no batch left computes the last one, and nothing comes of it.
        """
        engine = self.engine
        model = engine.model
        ranks = self.engine.ranks
        n = self.task.outputs
        # Examples of like length stand together, so that little is padding.
        order = np.argsort(assembler.features.lengths, kind="stable")
        sizes = assembler.features.lengths if self.task.is_of_positions else np.ones_like(order)
        ends = np.cumsum(sizes)
        n_rows = int(ends[-1])
        # Behind them a row for the stop signal of each rank.
        logits = torch.zeros(n_rows + ranks.world_size, n)
        model.eval()
        batches = [order[lo : lo + self.batch_size] for lo in range(0, len(order), self.batch_size)]
        for first in range(0, len(batches), ranks.world_size):
            if engine.largest(self.signals.signum):
                logits[n_rows + ranks.rank, 0] = self.signals.signum
                break
            number = first + ranks.rank
            has_batch = number < len(batches)
            if not has_batch and engine.shards is None:
                break
            numbers = batches[number if has_batch else -1]
            batch = assembler[numbers].to(engine.device)
            with engine.autocast():
                found = real_outputs(forward(model, batch), batch).cpu()
            if not has_batch:
                break
            places = np.concatenate([np.arange(ends[i] - sizes[i], ends[i]) for i in numbers])
            logits[places] = found
        model.train()
        if ranks.world_size > 1:
            logits = logits.to(engine.device)
            dist.all_reduce(logits)
            logits = logits.cpu()
        return logits[:n_rows], int(logits[n_rows:, 0].max())


def look_back(
    settings: GlueSettings, data: Data, folder: Path, evaluation: Evaluation, result: dict[str, Any], say: Say
) -> int:
    """Evaluate and predict at the end of a run, into `result` and files; the number of a stop signal that came, or 0."""
    where = f"{data.name}, seed {result['seed']}"
    outputs = Outputs({}, {}, score_divisor(evaluation.engine.model))
    if settings.do_eval:
        values, stop_signal = evaluation(result["updates"])
        if stop_signal:
            return stop_signal
        result["results"] = without_loss(values)
        say(f"{where}: {line_of(result['results'])}")
        outputs.dev.update(evaluation.logits)
    stop_signal = predict(data, folder, evaluation, outputs.test, say)
    if not stop_signal:
        on_main(evaluation.engine.ranks, lambda: write_outputs(folder / OUTPUTS, outputs, data))
    if not stop_signal and settings.eval_all_checkpoints and settings.do_eval:
        result["checkpoints"], stop_signal = evaluate_checkpoints(folder, evaluation, where, say)
    return stop_signal


def evaluate_checkpoints(
    folder: Path, evaluation: Evaluation, where: str, say: Say
) -> tuple[dict[str, dict[str, float]], int]:
    """({update: {metric: value}} of the models that a run has saved on its way, number of a stop signal that came, or 0).
    where: task and seed, for the lines."""
    found: dict[str, dict[str, float]] = {}
    engine = evaluation.engine
    for update, path in saved_models(folder):
        engine.load_weights(saved_weights(engine.model, path / "model.safetensors"))
        values, stop_signal = evaluation(update, anew=True)
        if stop_signal:
            return found, stop_signal
        metrics = without_loss(values)
        found[str(update)] = metrics
        say(f"{where}, update {update}: {line_of(metrics)}")
    return found, 0


def predict(data: Data, folder: Path, evaluation: Evaluation, found: dict[str, torch.Tensor], say: Say) -> int:
    """Write the predictions for the test files, and put the outputs that they are made of into `found`. Returns the number
    of a stop signal that came, or 0."""
    for name, assembler in data.test.items():
        logits, stop_signal = evaluation.outputs(assembler)
        if stop_signal:
            return stop_signal
        found[name] = logits
        target = folder / PREDICTIONS / f"{name}{suffix_of(data.task)}"
        # All ranks have the same logits; one writes.
        divisor = score_divisor(evaluation.engine.model)
        write = partial(write_predictions, target, data.task, assembler, logits, divisor)
        on_main(evaluation.engine.ranks, write)
        say(f"predictions: {target}")
    return 0


def saved_models(folder: Path) -> list[tuple[int, Path]]:
    """[(update, folder)] of the models that a run has saved on its way, in order."""
    found = []
    for path in folder.glob("checkpoint-*[0-9]"):
        found.append((int(path.name.rpartition("-")[2]), path))
    return sorted(found)


def without_loss(values: Mapping[str, float]) -> dict[str, float]:
    """The metrics alone."""
    return {name: value for name, value in values.items() if name != "val_loss"}
