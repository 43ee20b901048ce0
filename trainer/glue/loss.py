"""The loss of train_glue.py, what is logged of it, and what a model gives for a file: outputs, metrics, predictions.

N: examples, R: rows of a batch, n: outputs (classes, or one score).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from common.files import atomic_file
from common.packages import optional_package
from dataset.glue.glue_dataset import Batch, GlueAssembler, Totals
from dataset.glue.glue_tasks import Task
from model.electra.compiled_encoder import graphs_for, ready_mask, uses_graphs
from trainer.engine import Engine
from trainer.evaluation import rows_of_batches
from trainer.glue.model import has_segments
from trainer.machine.command_line import StopSignals

N_SUMS = 4
# Families that take a mask for every query as it is. Into one of [R, T] transformers looks, and drops it where nothing is padded: that
# waits for the device, and makes the compiler build two versions of a layer.
READY_MASK = frozenset({"albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"})
# (labels [N], classes or scores [N]) -> the figure.
Metric = Callable[[np.ndarray, np.ndarray], float]


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Logits, float32 [R, n]."""
    inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
    if model.config.model_type in READY_MASK:
        inputs["attention_mask"] = ready_mask(batch.mask.bool(), uses_graphs(model, batch.ids.shape))
    if has_segments(model.config):
        inputs["token_type_ids"] = batch.types
    with graphs_for(model, batch.ids.shape):
        logits: torch.Tensor = model(**inputs).logits.float()
    return logits


def loss_sum(task: Task, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over examples of the cross-entropy, or of a score's squared error. labels: [N]."""
    if task.is_regression:
        return F.mse_loss(logits[:, 0], labels, reduction="sum")
    return F.cross_entropy(logits, labels, reduction="sum")


def glue_loss(task: Task, model: Any, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
    """(a micro-batch's share of the update's loss, 0-d; float32 [N_SUMS] to add up: loss, examples, right ones, tokens)."""
    logits = forward(model, batch)
    loss = loss_sum(task, logits, batch.labels)
    with torch.no_grad():
        # A fill: a copy from the host would wait for the device.
        n = logits.new_full((), len(batch.labels))
        right = (logits.argmax(-1) == batch.labels).sum().float()
        sums = torch.stack((loss.detach(), n, right, batch.mask.sum().float()))
    return loss / max(totals.examples, 1), sums


def logged(task: Task, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
    """(what to log, tokens) of the sums of `glue_loss`."""
    loss, n, right, tokens = sums
    # All updates since the last line were skipped.
    if not n:
        return {"loss": math.nan}, 0
    values = {"loss": loss / n}
    if not task.is_regression:
        values["train_acc"] = right / n
    return values, tokens


# ------------------------------------------------------------------------------------------------------- metrics


def metric_of(name: str) -> Metric:
    """A Metric by its name in dataset/glue/glue_tasks.py. Errors: DataError where its package is not installed."""
    if name in ("pearson", "spearman"):
        stats = optional_package("scipy.stats", f"for the metric {name}")
        measure = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name]

        def correlation(labels: np.ndarray, scores: np.ndarray) -> float:
            # Undefined where one side is constant (or not finite).
            if np.ptp(labels) == 0 or not np.ptp(scores) > 0:
                return math.nan
            return float(measure(labels, scores).statistic)

        return correlation
    metrics = optional_package("sklearn.metrics", f"for the metric {name}", package="scikit-learn")
    by_name: dict[str, Metric] = {
        "accuracy": metrics.accuracy_score,
        "f1": metrics.f1_score,
        "macro_f1": lambda labels, found: metrics.f1_score(labels, found, average="macro", zero_division=0.0),
        "matthews": metrics.matthews_corrcoef,
        "r2": metrics.r2_score,
    }
    return by_name[name]


def predicted(task: Task, logits: torch.Tensor) -> np.ndarray:
    """Class numbers, or scores, of logits [N, n]."""
    chosen: np.ndarray = (logits[:, 0] if task.is_regression else logits.argmax(-1)).numpy()
    return chosen


def metrics_of(task: Task, logits: torch.Tensor, labels: np.ndarray) -> dict[str, float]:
    """{metric: value} of logits [N, n] and the labels of a file."""
    found = predicted(task, logits)
    return {name: float(metric_of(name)(labels, found)) for name in task.metrics}


# ------------------------------------------------------------------------------------- files of a task


def evaluate(
    engine: Engine[Batch, Totals],
    task: Task,
    dev: Mapping[str, GlueAssembler],
    batch_size: int,
    signals: StopSignals,
) -> tuple[dict[str, float], int]:
    """({metric: value} over the development files, with the first's val_loss; number of a stop signal or 0)."""
    found: dict[str, float] = {}
    for suffix, assembler in dev.items():
        logits, stop_signal = outputs(engine, task, assembler, batch_size, signals)
        if stop_signal:
            return {}, stop_signal
        labels = assembler.features.labels
        # MNLI has two development files. The first one's loss is the one to follow.
        found.setdefault("val_loss", float(loss_sum(task, logits, torch.from_numpy(labels))) / len(labels))
        for name, value in metrics_of(task, logits, labels).items():
            found[name + suffix] = value
    return found, 0


def outputs(
    engine: Engine[Batch, Totals], task: Task, assembler: GlueAssembler, batch_size: int, signals: StopSignals
) -> tuple[torch.Tensor, int]:
    """(logits of all examples of an assembler, float32 [N, outputs] on the CPU, the same on every world size; number of a stop
    signal or 0)."""
    # Examples of like length stand together, so that little is padding.
    order = np.argsort(assembler.features.lengths, kind="stable")
    batches = [order[lo : lo + batch_size] for lo in range(0, len(order), batch_size)]

    def compute(number: int) -> torch.Tensor:
        with engine.autocast():
            return forward(engine.model, assembler[batches[number]].to(engine.device))

    logits, stop_signal = rows_of_batches(engine, batches, compute, (len(order), task.outputs), signals)
    return logits.float(), stop_signal


def write_predictions(path: Path, task: Task, logits: torch.Tensor) -> None:
    """Write a TSV of the words of classes, or of scores, as the leaderboard wants it."""
    found = predicted(task, logits)
    # The leaderboard's scores have bounds.
    words = [f"{x:.3f}" for x in found.clip(*task.bounds)] if task.is_regression else [task.labels[i] for i in found]
    lines = ["index\tprediction", *(f"{i}\t{word}" for i, word in enumerate(words))]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(("\n".join(lines) + "\n").encode())
