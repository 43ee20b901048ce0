"""The batches of an epoch of fine-tuning.

Which example stands where in an epoch depends on the seed and the epoch alone, so that ranks, workers and a resume
change nothing.

Shapes. N: examples of a file, R: rows (examples) of a batch, T: positions of a row.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dataset.glue.features import Features
from dataset.loader import pinned, to_device
from dataset.packing import permutation
from dataset.store.format import Ints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of a batch's T: few shapes, and of the kind that tensor cores like.
MULTIPLE = 8


class Totals(NamedTuple):
    """What an update trains, over all micro-batches and ranks."""

    # Tokens without padding.
    targets: int
    examples: int


class GluePlan:
    """The examples of one epoch in their order: a row is an example."""

    def __init__(self, features: Features, seed: int, epoch: int) -> None:
        self._lengths = features.lengths
        self.n_rows = len(features.lengths)
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
        return Totals(int(self._lengths[self._order[lo:hi]].sum()), hi - lo)

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
    # int64 [R, T]: segments, as the tokenizer has them.
    types: torch.Tensor
    # [R]: int64 classes or float32 scores; [0]: a test file's.
    labels: torch.Tensor

    def to(self, device: torch.device | str) -> "Batch":
        return to_device(self, device)

    def pin_memory(self) -> "Batch":
        return pinned(self)


class GlueAssembler:
    """assembler[numbers] is the Batch of these examples, padded on the tokenizer's side to the longest of them, up to a
    multiple of MULTIPLE but never beyond `max_seq_len`. full: to the longest of all, so that T is `width`."""

    def __init__(
        self, features: Features, tokenizer: "PreTrainedTokenizerBase", max_seq_len: int, full: bool = False
    ) -> None:
        self.features = features
        self.max_seq_len = max_seq_len
        self.full = full
        self.width = self._padded(features.lengths)
        self.pad_id: int = tokenizer.pad_token_id
        self.pad_type: int = tokenizer.pad_token_type_id
        self.pads_left: bool = tokenizer.padding_side == "left"

    def _padded(self, lengths: Ints) -> int:
        """The width of a batch with examples of these lengths."""
        return min(math.ceil(int(lengths.max()) / MULTIPLE) * MULTIPLE, self.max_seq_len)

    def __getitem__(self, numbers: Ints) -> Batch:
        f = self.features
        lengths = f.lengths[numbers]
        shape = (len(numbers), self.width if self.full else self._padded(lengths))
        ids = np.full(shape, self.pad_id, dtype=np.int64)
        types = np.full(shape, self.pad_type, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        for r, (begin, length) in enumerate(zip(f.begin[numbers], lengths, strict=True)):
            row = slice(shape[1] - length, None) if self.pads_left else slice(length)
            ids[r, row] = f.tokens[begin : begin + length]
            types[r, row] = f.types[begin : begin + length]
            mask[r, row] = 1
        labels = f.labels[numbers] if len(f.labels) else f.labels
        return Batch(*map(torch.from_numpy, (ids, mask, types, labels)))
