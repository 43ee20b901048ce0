"""The batches of an epoch of fine-tuning.

Which example stands where in an epoch depends on the seed and the epoch alone, so that ranks, workers and a resume
change nothing.

Shapes. N: examples of a file, R: rows (examples) of a batch, T: positions of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from common.arithmetic import ceil_div
from dataset.glue.features import NO_CLASS, Features
from dataset.glue.questions import Question
from dataset.loader import pinned, to_device
from dataset.packing import permutation
from dataset.store.interface import Ints
from dataset.tokenizing.sentence_encoder import SentenceEncoder

# Of a batch's T: few shapes, and of the kind that tensor cores like.
MULTIPLE = 8


class Totals(NamedTuple):
    """What an update trains, over all micro-batches and ranks."""

    # Tokens without padding.
    targets: int
    # Of the examples or, where words have them, of the words: what the loss is a mean over.
    labels: int


class GluePlan:
    """The examples of one epoch in their order: a row is an example."""

    def __init__(self, features: Features, seed: int, epoch: int) -> None:
        self._lengths = features.lengths
        self._n_labels = features.n_labels
        self.n_rows = len(features.first)
        self.T = int(self._lengths.max())
        # Batches are shorter: each is as long as its longest row.
        self.fill = float(self._lengths.mean()) / self.T
        self._order = permutation(np.random.PCG64([seed, epoch]), self.n_rows)

    def width(self, n: int) -> float:
        """The mean of the longest lengths in batches of n, which they are padded to."""
        first_of_batch = np.arange(0, self.n_rows, n)
        longest = np.maximum.reduceat(self._lengths[self._order], first_of_batch)
        return float(longest.mean())

    def totals(self, lo: int, hi: int) -> Totals:
        """The Totals of the rows [lo, hi)."""
        examples = self._order[lo:hi]
        return Totals(int(self._lengths[examples].sum()), int(self._n_labels[examples].sum()))

    def recipe(self, rows: Sequence[int] | Ints) -> Ints:
        """Numbers of the examples, int64 [R]."""
        return self._order[np.asarray(rows, dtype=np.int64)].astype(np.int64)

    def documents_of(self, lo: int, hi: int) -> list[int]:
        """The numbers of the examples in the rows [lo, hi)."""
        numbers: list[int] = self._order[lo:hi].tolist()
        return numbers


class Batch(NamedTuple):
    """Examples, padded to one length."""

    # int64 [R, T].
    ids: torch.Tensor
    # int64 [R, T]: 1 where there is a token.
    mask: torch.Tensor
    # int64 [R, T]: 1 in the second sentence; CLS has the tokenizer's own.
    types: torch.Tensor
    # [R]: int64 classes or float32 scores; [R, T]: classes of words; [R, 2]: an answer's positions; [0]: a test file's.
    labels: torch.Tensor

    def to(self, device: torch.device | str) -> "Batch":
        return to_device(self, device)

    def pin_memory(self) -> "Batch":
        return pinned(self)


class GlueAssembler:
    """assembler[numbers] is the Batch of these examples: CLS first SEP [second SEP], padded to the longest of them, up
    to a multiple of MULTIPLE but never beyond `max_seq_len`. full: to the longest of all, so that T is `width`."""

    def __init__(
        self,
        features: Features,
        encoder: SentenceEncoder,
        max_seq_len: int,
        full: bool = False,
        questions: Sequence[Question] = (),
    ) -> None:
        """questions: what the examples are parts of, where they have answers to be found."""
        self.features = features
        self.questions = questions
        self.max_seq_len = max_seq_len
        self.full = full
        self.width = self._padded(features.lengths)
        self.cls_id = encoder.cls_id
        self.sep_id = encoder.sep_id
        self.pad_id = encoder.pad_id
        self.cls_type = encoder.cls_type

    def _padded(self, lengths: Ints) -> int:
        """The width of a batch with examples of these lengths."""
        return min(ceil_div(int(lengths.max()), MULTIPLE) * MULTIPLE, self.max_seq_len)

    def __getitem__(self, numbers: Ints) -> Batch:
        f = self.features
        lengths = f.lengths[numbers]
        R = len(numbers)
        T = self.width if self.full else self._padded(lengths)
        ids = np.full((R, T), self.pad_id, dtype=np.int64)
        types = np.zeros((R, T), dtype=np.int64)
        ids[:, 0] = self.cls_id
        types[:, 0] = self.cls_type
        for r, number in enumerate(numbers):
            begin = f.begin[number]
            # CLS, the first sentence, SEP: the second one begins behind it.
            split = begin + f.first[number]
            place = 1 + f.first[number]
            ids[r, 1:place] = f.tokens[begin:split]
            ids[r, place] = self.sep_id
            if f.pair:
                end = place + 1 + f.second[number]
                ids[r, place + 1 : end] = f.tokens[split : split + f.second[number]]
                ids[r, end] = self.sep_id
                types[r, place + 1 : end + 1] = 1
        mask = (np.arange(T) < lengths[:, None]).astype(np.int64)
        labels = f.labels[numbers] if len(f.labels) else f.labels
        if len(f.classes):
            labels = np.full((R, T), NO_CLASS, dtype=np.int64)
            for r, number in enumerate(numbers):
                begin = f.begin[number]
                labels[r, 1 : 1 + f.first[number]] = f.classes[begin : begin + f.first[number]]
        return Batch(
            ids=torch.from_numpy(ids),
            mask=torch.from_numpy(mask),
            types=torch.from_numpy(types),
            labels=torch.from_numpy(labels),
        )
