"""Examples as token ids: what is made of a file once, and kept in a cache.

A file's lines become *features*: the token ids of one or two sentences, cut to fit, and a label.

Shapes. N: examples of a file.
"""

from typing import NamedTuple

import numpy as np

from common.arrays import Array
from dataset.glue.glue_tasks import Task
from dataset.glue.tables import Rows
from dataset.store.interface import Ints
from dataset.tokenizing.sentence_encoder import SentenceEncoder

# Of a task that has no such numbers.
NONE = np.zeros(0, dtype=np.int64)
# In the place of a class: the position has none. It is what torch's cross-entropy leaves out.
NO_CLASS = -100


def longest_first(first: Ints, second: Ints, budget: int) -> tuple[Ints, Ints]:
    """(tokens kept of the first, of the second): while both exceed the budget together, the longer one gives its last,
    at a tie the second. Arrays [N]; the lengths that ELECTRA's own loop of pops ends with."""
    kept = np.minimum(second, np.maximum(budget // 2, budget - first))
    return np.minimum(first, budget - kept), kept


class Features(NamedTuple):
    """A file's examples. tokens: the ids of all sentences, one after the other; the rest arrays [N], or [N, 2] where an
    answer has a first and a last position."""

    tokens: Ints
    # Of an example's first token.
    begin: Ints
    # Tokens of its first sentence.
    first: Ints
    # And of its second; 0 in single-sentence tasks.
    second: Ints
    # int64 classes, float32 scores, or an answer's positions, [N, 2]; [0] for a test file, and where words have classes.
    labels: Array
    # bool, 0-d: whether the task has two sentences.
    pair: Array
    # 0-d: lines of the file that were left out.
    skipped: Ints
    # Of each token its word's class, at the word's first token; NO_CLASS at the others. [0] where examples have classes.
    classes: Ints = NONE
    # Of each example the number of the sentence or question that it is a part of; [0] where it is whole.
    part_of: Ints = NONE
    # Of each token of a text that is asked about where it begins and ends in there, in characters: [tokens, 2], or [0].
    places: Ints = NONE

    @property
    def lengths(self) -> Ints:
        """Positions that the examples take, CLS and SEP included."""
        return self.first + self.second + 2 + int(self.pair)

    @property
    def n_labels(self) -> Ints:
        """How many labels each example has: one, or those of its words."""
        if not len(self.classes):
            return np.ones_like(self.first)
        before = np.concatenate([[0], np.cumsum(self.classes != NO_CLASS)])
        return before[self.begin + self.first] - before[self.begin]


def in_both_orders(rows: Rows) -> Rows:
    """The examples of two sentences, and behind them the same with the sentences swapped: `double_unordered` of
    https://github.com/google-research/electra, which does so for the training files of MRPC and STS-B."""
    first, second = rows.sentences
    return rows._replace(sentences=[first + second, second + first], labels=rows.labels + rows.labels)


def encode_rows(rows: Rows, task: Task, encoder: SentenceEncoder, max_seq_len: int) -> Features:
    """The Features of Rows, cut longest-first to max_seq_len positions."""
    ids = [encoder.encode(column) for column in rows.sentences]
    lengths = []
    for column in ids:
        lengths.append(np.array([len(sentence) for sentence in column], dtype=np.int64))
    pair = len(ids) == 2
    if pair:
        # CLS first SEP second SEP
        first, second = longest_first(lengths[0], lengths[1], max_seq_len - 3)
    else:
        # CLS first SEP
        first = np.minimum(lengths[0], max_seq_len - 2)
        second = np.zeros_like(first)
    tokens: list[int] = []
    for i in range(len(first)):
        tokens += ids[0][i][: first[i]]
        if pair:
            tokens += ids[1][i][: second[i]]
    labels = np.array(rows.labels, dtype=np.int64 if task.labels else np.float32)
    begin = np.cumsum(first + second) - (first + second)
    return Features(
        tokens=np.array(tokens, dtype=id_type(encoder)),
        begin=begin,
        first=first,
        second=second,
        labels=labels,
        pair=np.array(pair),
        skipped=np.array(rows.skipped),
    )


def id_type(encoder: SentenceEncoder) -> type[np.uint16 | np.uint32]:
    """What the ids of a tokenizer are kept in."""
    return np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32
