"""How good a model's outputs are: the metrics and the loss of each kind of task.

N: examples, P: positions of all examples, n: outputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from common.arrays import Array
from common.packages import optional_package
from dataset.glue.features import NO_CLASS, Features
from dataset.glue.glue_dataset import GlueAssembler
from dataset.glue.glue_tasks import QUESTIONS, REGRESSION, TAGS, Task
from dataset.store.interface import Ints
from trainer.glue.entities import entity_scores
from trainer.glue.loss import loss_sum
from trainer.glue.squad import answer_scores, found_answers

# (labels [N], classes or scores [N]) -> the figure.
Metric = Callable[[Array, Array], float]


def correlation(measure: Callable[[Array, Array], Any]) -> Metric:
    """A correlation of scipy's as a Metric."""

    def score(labels: Array, scores: Array) -> float:
        # Undefined where one side is constant (or not finite).
        if np.ptp(labels) == 0 or not np.ptp(scores) > 0:
            return math.nan
        return float(measure(labels, scores).statistic)

    return score


def metric_of(name: str) -> Metric:
    """A Metric by its name in dataset/glue/glue_tasks.py. Errors: DataError where its package is not installed."""
    if name in ("pearson", "spearman"):
        measures = optional_package("scipy.stats", f"for the metric {name}")
        return correlation({"pearson": measures.pearsonr, "spearman": measures.spearmanr}[name])
    metrics = optional_package("sklearn.metrics", f"for the metric {name}", package="scikit-learn")

    def macro_f1(labels: Array, classes: Array) -> float:
        return float(metrics.f1_score(labels, classes, average="macro", zero_division=0.0))

    by_name: dict[str, Metric] = {
        "accuracy": metrics.accuracy_score,
        "f1": metrics.f1_score,
        "macro_f1": macro_f1,
        "matthews": metrics.matthews_corrcoef,
        "r2": metrics.r2_score,
    }
    return by_name[name]


def predicted(task: Task, logits: torch.Tensor, divisor: float = 1.0) -> Array:
    """Class numbers, or scores, of logits [N, n]: a numpy array. divisor: see `score_divisor`."""
    chosen = logits[:, 0] * divisor if task.kind == REGRESSION else logits.argmax(-1)
    return chosen.numpy()


def metrics_of_predicted(task: Task, logits: torch.Tensor, labels: Array, divisor: float = 1.0) -> dict[str, float]:
    """{metric: value} of logits [N, n] and the labels of an assembler's features. divisor: see `score_divisor`."""
    found = predicted(task, logits, divisor)
    return {name: float(metric_of(name)(labels, found)) for name in task.metrics}


def measured(task: Task, assembler: GlueAssembler, logits: torch.Tensor, divisor: float = 1.0) -> dict[str, float]:
    """{metric: value} of the outputs for a file, [N, n], or [P, n] where every position has its own. divisor: see
    `score_divisor`."""
    features = assembler.features
    if task.kind == TAGS:
        values = tag_scores(task, features, logits)
    elif task.kind == QUESTIONS:
        found = found_answers(assembler.questions, features, logits.numpy(), task.windows, assembler.max_seq_len)
        values = answer_scores(assembler.questions, found)
    else:
        return metrics_of_predicted(task, logits, features.labels, divisor)
    return {name: values[name] for name in task.metrics}


def mean_loss(task: Task, features: Features, logits: torch.Tensor, divisor: float) -> float:
    """The mean loss over a file's labels, of outputs as in `measured`."""
    if task.kind == QUESTIONS:
        return answer_loss(features, logits)
    labels = classes_of_positions(features) if task.kind == TAGS else features.labels
    return float(loss_sum(task, logits, torch.from_numpy(labels), divisor)) / max(int(features.n_labels.sum()), 1)


def answer_loss(features: Features, logits: torch.Tensor) -> float:
    """The mean cross-entropy of the answers' beginnings and ends, each a choice among the positions of a window."""
    rows = np.cumsum(features.lengths) - features.lengths
    losses = []
    for of_part, label in zip(logits.double().numpy().T, features.labels.T, strict=True):
        # log of the sum of exp over each window
        totals = np.logaddexp.reduceat(of_part, rows)
        losses.append(float((totals - of_part[rows + label]).mean()))
    return sum(losses) / len(losses)


# ------------------------------------------------------------------------------------------- words with tags


def places_of_tokens(features: Features) -> Ints:
    """Where each token of the one-sentence examples stands among the positions of all, CLS and SEP of each included."""
    examples = np.repeat(np.arange(len(features.first)), features.first)
    return np.arange(len(features.tokens)) + 2 * examples + 1


def classes_of_positions(features: Features) -> Ints:
    """[P]: the classes of the words at their first tokens, NO_CLASS elsewhere."""
    classes = np.full(int(features.lengths.sum()), NO_CLASS, dtype=np.int64)
    classes[places_of_tokens(features)] = features.classes
    return classes


def tags_of_sentences(task: Task, features: Features, classes: Ints) -> Iterator[list[str]]:
    """The tags of each sentence, joined from its parts, of the classes of all words."""
    sentence_of_word = np.repeat(features.part_of, features.n_labels)
    ends = np.flatnonzero(np.diff(sentence_of_word)) + 1
    for of_sentence in np.split(classes, ends):
        yield [task.labels[number] for number in of_sentence]


def found_classes(features: Features, logits: torch.Tensor) -> Ints:
    """The likeliest class of each word, of logits [P, n]."""
    classes = logits.argmax(-1).numpy()
    return classes[classes_of_positions(features) != NO_CLASS]


def tag_scores(task: Task, features: Features, logits: torch.Tensor) -> dict[str, float]:
    """Accuracy over words, and, where the tags are those of entities, how many of these are found."""
    right = features.classes[features.classes != NO_CLASS].astype(np.int64)
    found = found_classes(features, logits)
    values = {"accuracy": float((right == found).mean())}
    if any(name.startswith("entity") for name in task.metrics):
        values |= entity_scores(tags_of_sentences(task, features, right), tags_of_sentences(task, features, found))
    return values


def packages_for(tasks: Sequence[Task]) -> None:
    """Errors: DataError where a package that a metric needs is not installed."""
    for task in tasks:
        if not task.is_of_positions:
            for name in task.metrics:
                metric_of(name)
