"""The loss of train_glue.py and what it logs, by kind of task: classes, scores, classes of words, answers in a text."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from dataset.glue.features import NO_CLASS
from dataset.glue.glue_dataset import Batch, Totals
from dataset.glue.glue_tasks import QUESTIONS, REGRESSION, TAGS, Task
from model.electra.compiled_encoder import graphs_for
from trainer.glue.padding import way_of


def score_divisor(model: Any) -> float:
    """What the scores of a regression were divided by to train the model. Its config says it: a field of our own."""
    return float(getattr(model.config, "score_divisor", 1.0))


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Logits, float32 [R, outputs], or [R, T, outputs] where every position has its own."""
    with graphs_for(model, batch.ids.shape):
        return way_of(model)(model, batch).float()


def loss_sum(task: Task, logits: torch.Tensor, labels: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
    """The sum over examples (over words, where they have classes) of cross-entropy, or of the squared error of a score that
    is divided by `divisor`. The cross-entropy of an answer is the mean of its beginning's and its end's."""
    if task.kind == REGRESSION:
        return F.mse_loss(logits[:, 0], labels / divisor, reduction="sum")
    if task.kind == QUESTIONS:
        # [R, T, 2] -> [2 R, T]: a choice among positions for each beginning and each end
        choices = logits.transpose(1, 2).flatten(0, 1)
        return F.cross_entropy(choices, labels.flatten(), reduction="sum") / 2
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), reduction="sum", ignore_index=NO_CLASS)


def without_padding_as_answer(task: Task, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits in which no answer begins or ends in the padding. mask: [R, T]."""
    if task.kind != QUESTIONS:
        return logits
    return logits.masked_fill(mask[:, :, None] == 0, torch.finfo(logits.dtype).min)


def glue_loss(
    task: Task, model: PreTrainedModel, batch: Batch, totals: Totals, reduction: str = "mean"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(a micro-batch's share of the update's loss, 0-d; float32 [4] to add up: loss, labels, those that are right, tokens).
    A label is an example's or, where words have them, a word's. reduction: of the update's loss over them, mean or sum."""
    logits = without_padding_as_answer(task, forward(model, batch), batch.mask)
    loss = loss_sum(task, logits, batch.labels, score_divisor(model))
    with torch.no_grad():
        right, n_labels = right_labels(task, logits, batch.labels)
        sums = torch.stack((loss.detach(), n_labels.float(), right.float(), batch.mask.sum().float()))
    return loss if reduction == "sum" else loss / max(totals.labels, 1), sums


def right_labels(task: Task, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(how many labels of a batch are what is likeliest, how many there are), 0-d each. An answer is one label."""
    if task.kind == TAGS:
        return (logits.argmax(-1) == labels).sum(), (labels != NO_CLASS).sum()
    # A fill: a copy from the host would wait for the device.
    n_labels = labels.new_full((), len(labels))
    if task.kind == QUESTIONS:
        return (logits.argmax(1) == labels).all(-1).sum(), n_labels
    return (logits.argmax(-1) == labels).sum(), n_labels


def metrics(task: Task, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
    """(what to log, tokens) of the sums of `glue_loss`."""
    loss, n_labels, right, tokens = sums
    # All updates since the last line were skipped.
    if not n_labels:
        return {"loss": math.nan}, 0
    values = {"loss": loss / n_labels}
    if task.kind != REGRESSION:
        values["train_acc"] = right / n_labels
    return values, tokens
