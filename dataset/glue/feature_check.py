"""Whether the features in a cache are ones that a file of a task may give: anybody may have put them beside the data."""

import numpy as np

from common.arrays import Array
from dataset.glue.features import NO_CLASS, Features, id_type
from dataset.glue.glue_tasks import QUESTIONS, REGRESSION, TAGS, Task
from dataset.tokenizing.sentence_encoder import SentenceEncoder


def check_features(features: Features, task: Task, encoder: SentenceEncoder, max_seq_len: int, labelled: bool) -> None:
    """Errors: ValueError where an array has another type or shape, or points to where nothing is."""
    n = features.first.size
    n_tokens = features.tokens.size
    require(n > 0, "no example")
    require(is_array(features.tokens, id_type(encoder), (n_tokens,)), "tokens")
    require(not n_tokens or features.tokens.max() < encoder.vocab_size, "ids of tokens")
    for name in ("begin", "first", "second"):
        array = getattr(features, name)
        require(is_array(array, np.int64, (n,)) and array.min() >= 0, name)
        # So small that no sum of them overflows.
        require(array.max() <= n_tokens, name)
    require(is_array(features.pair, np.bool_, ()), "pair")
    require(features.skipped.shape == () and np.issubdtype(features.skipped.dtype, np.integer), "skipped")
    require((features.begin + features.first + features.second).max() <= n_tokens, "ends of examples")
    require(features.lengths.max() <= max_seq_len, "lengths")
    check_labels(features, task, n, max_seq_len, labelled)
    if task.kind == TAGS:
        require(is_array(features.classes, np.int16, (n_tokens,)), "classes of words")
        check_classes(features.classes[features.classes != NO_CLASS], task)
    else:
        require(features.classes.shape == (0,), "classes of words")
    if task.kind in (TAGS, QUESTIONS):
        require(is_array(features.part_of, np.int64, (n,)) and features.part_of[0] == 0, "parts")
        # One sentence or question after the other, and none without a part.
        require(np.isin(np.diff(features.part_of), (0, 1)).all(), "parts")
    if task.kind == QUESTIONS:
        require(is_array(features.places, np.uint32, (n_tokens, 2)), "places")


def check_labels(features: Features, task: Task, n: int, max_seq_len: int, labelled: bool) -> None:
    """Errors: ValueError. n: examples."""
    labels = features.labels
    if task.kind == QUESTIONS:
        require(is_array(labels, np.int64, (n, 2)), "answers")
        require(labels.min() >= 0 and labels.max() < max_seq_len, "answers")
    elif task.kind == TAGS or not labelled:
        require(labels.shape == (0,), "labels")
    elif task.kind == REGRESSION:
        require(is_array(labels, np.float32, (n,)) and np.isfinite(labels).all(), "scores")
    else:
        require(is_array(labels, np.int64, (n,)), "classes")
        check_classes(labels, task)


def check_classes(classes: Array, task: Task) -> None:
    """Errors: ValueError for a class that the task does not have."""
    require(not classes.size or (classes.min() >= 0 and classes.max() < task.outputs), "classes")


def is_array(array: Array, dtype: type, shape: tuple[int, ...]) -> bool:
    return bool(array.dtype == dtype and array.shape == shape)


def require(holds: object, what: str) -> None:
    """Errors: ValueError that names what does not hold."""
    if not holds:
        raise ValueError(f"{what}: no features of ours")
