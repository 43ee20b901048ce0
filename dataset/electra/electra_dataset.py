"""ELECTRA's examples: two segments of neighbouring lines of one document, masked anew in every epoch.

Lines of a document are gathered up to a target length, then cut into a first and a second segment. What does not fit
an example begins the next one, so that every token is in exactly one example of an epoch. Which lines stand together
depends on the data, the length and the seed; the order of the examples and what is masked depend on the epoch too, and
on nothing else: neither on ranks, workers nor a resume.

Shapes. N: examples, R: rows (examples) of a batch, T: positions of a row, K: masked positions of a row at most.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from dataset.loader import pinned, to_device
from dataset.packing import CHUNK, permutation
from dataset.reading.documents import DataError
from model.electra.model_electra import mask_count, mask_tokens
from model.electra.sizes import SHORTEST

# Share of the examples that are one segment, as in single-sentence tasks.
SINGLE = 0.1
# Share whose target length is random, from SHORTEST up.
RANDOM_TARGET = 0.05
# Chance that a line that would overfill the first segment goes into it all the same.
OVERFLOW = 0.5


class Examples:
    """Where every example lies in a token store of a LineEncoder.

    Attributes, arrays [N]: begin (first token in the store), span (tokens and SEPs in the store), first and second
    (tokens of the two segments; second may be 0), lengths (positions taken, CLS and SEP included), candidates (tokens
    that may be masked: not `unk_id`, from which there is nothing to learn).
    """

    def __init__(self, store, max_seq_len, sep_id, seed, unk_id=None) -> None:
        """Errors: ValueError for a length below SHORTEST, DataError where the store has no text."""
        if max_seq_len < SHORTEST:
            raise ValueError(f"max_seq_len must be at least {SHORTEST} for two segments, not {max_seq_len}")
        self.store, self.max_seq_len = store, max_seq_len
        ends = _positions(store.tokens, sep_id)
        # Below, a place is counted without the SEPs: `line_ends` and the document's bounds are such places.
        self._line_ends = line_ends = ends - np.arange(len(ends))
        bounds = np.asarray(store.offsets) - np.searchsorted(ends, store.offsets)
        place, stop = bounds[:-1][bounds[:-1] < bounds[1:]], bounds[1:][bounds[:-1] < bounds[1:]]
        found, bits = [], np.random.PCG64([seed, 0xE1EC])
        # The next example of every document at once.
        while len(place):
            first, second = self._next(place, stop, line_ends, bits)
            found.append(np.stack((place, first, second)))
            place = place + first + second
            more = place < stop
            place, stop = place[more], stop[more]
        if not found:
            raise DataError("--data_path: no document with text to learn from")
        place, first, second = np.concatenate(found, axis=1)
        order = np.argsort(place)
        place, self.first, self.second = place[order], first[order].astype(np.int32), second[order].astype(np.int32)
        last = place + self.first + self.second - 1
        self.begin = place + np.searchsorted(line_ends, place, side="right")
        self.span = (last + np.searchsorted(line_ends, last, side="right") + 1 - self.begin).astype(np.int32)
        self.lengths = self.first + self.second + 2 + (self.second > 0)
        unknown = _positions(store.tokens, unk_id) if unk_id is not None else np.empty(0, np.int64)
        counts = np.searchsorted(unknown, self.begin + self.span) - np.searchsorted(unknown, self.begin)
        self.candidates = self.first + self.second - counts.astype(np.int32)

    def _next(self, place, stop, line_ends, bits):
        """(tokens of the first, of the second segment) of the examples that begin at `place` in documents that end at
        `stop`."""
        T, n = self.max_seq_len, len(place)
        target = np.where(_uniform(bits, n) < RANDOM_TARGET, SHORTEST + (_uniform(bits, n) * (T - SHORTEST + 1)), T)
        target = target.astype(np.int64)
        # Of the first segment.
        wanted = np.where(_uniform(bits, n) < SINGLE, 1 << 40, (target - 3) // 2)
        overflows = _uniform(bits, n) < OVERFLOW

        def end_of_line(at):  # of the line that holds the token before the place `at`
            return np.minimum(line_ends[np.minimum(np.searchsorted(line_ends, at), len(line_ends) - 1)], stop)

        end = end_of_line(place + target)
        # Lines that leave it short.
        whole = line_ends[np.maximum(np.searchsorted(line_ends, place + wanted) - 1, 0)]
        split = np.minimum(np.maximum(end_of_line(place + 1), whole), end)
        split = np.where((split < end) & (split - place < wanted) & overflows, end_of_line(split + 1), split)
        first = np.minimum(split - place, T - 2)
        second = np.minimum(end - split, np.maximum(T - 3 - first, 0))
        return first, second


def _positions(tokens, value):
    """Where `value` stands in a large array of tokens, int64."""
    parts = (np.flatnonzero(tokens[lo : lo + CHUNK] == value) + lo for lo in range(0, len(tokens), CHUNK))
    return np.concatenate([np.empty(0, np.int64), *parts])


def _uniform(bits, n):
    """n numbers in [0, 1), float64, from a numpy bit generator; the same in every numpy."""
    return (bits.random_raw(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Totals(NamedTuple):
    """What an update trains, over all micro-batches and ranks."""

    targets: int  # positions without padding: the discriminator's
    masked: int  # the generator's


class Recipe(NamedTuple):
    """What a batch is built from: arrays [R]."""

    example: np.ndarray
    begin: np.ndarray
    span: np.ndarray
    first: np.ndarray
    second: np.ndarray
    epoch: int


class ElectraPlan:
    """The examples of one epoch in their order: a row is an example."""

    def __init__(self, examples, share, seed, epoch) -> None:
        self.examples, self.share, self.epoch = examples, share, epoch
        self.T, self.n_rows = examples.max_seq_len, len(examples.lengths)
        self._order = permutation(np.random.PCG64([seed, epoch]), self.n_rows)
        self.fill = float(examples.lengths.sum(dtype=np.int64)) / (self.n_rows * self.T)

    def totals(self, lo, hi):
        rows = self._order[lo:hi]
        lengths, candidates = self.examples.lengths[rows], self.examples.candidates[rows]
        return Totals(int(lengths.sum()), int(np.minimum(mask_count(lengths, self.share), candidates).sum()))

    def recipe(self, rows):
        example, e = self._order[np.asarray(rows, dtype=np.int64)], self.examples
        return Recipe(example, e.begin[example], e.span[example], e.first[example], e.second[example], self.epoch)

    def documents_of(self, lo, hi):
        begin = self.examples.begin[self._order[lo:hi]]
        documents = np.searchsorted(self.examples.store.offsets, begin, side="right") - 1
        return list(dict.fromkeys(documents.tolist()))


class Batch(NamedTuple):
    """int64 tensors; see ElectraPretrainer.forward."""

    ids: torch.Tensor  # [R, T]
    masked_ids: torch.Tensor  # [R, T]
    positions: torch.Tensor  # [R, K]
    labels: torch.Tensor  # [R, K]
    token_type_ids: torch.Tensor  # [R, T]
    lengths: torch.Tensor  # [R]

    to = to_device
    pin_memory = pinned


class ElectraAssembler(Dataset):
    """assembler[recipe] is the Batch of these examples, masked as the recipe's epoch has it."""

    def __init__(self, store, tokenizer, max_seq_len, share, style, seed) -> None:
        self.store, self.T, self.share, self.style, self.seed = store, max_seq_len, share, style, seed
        self.pad_id, self.cls_id = tokenizer.pad_token_id, tokenizer.cls_token_id
        self.sep_id, self.mask_id = tokenizer.sep_token_id, tokenizer.mask_token_id
        self.special_ids = np.array(sorted(tokenizer.all_special_ids))
        self.ordinary_ids = np.setdiff1d(np.arange(len(tokenizer)), self.special_ids)
        self.K = int(mask_count(max_seq_len, share))

    def __getitem__(self, recipe):
        R, T, K = len(recipe.example), self.T, self.K
        ids = np.full((R, T), self.pad_id, dtype=np.int64)
        types = np.zeros((R, T), dtype=np.int64)
        random = np.empty((R, T + 2 * K), dtype=np.uint64)
        for r, (example, begin, span, first, second) in enumerate(zip(*recipe[:5], strict=True)):
            piece = self.store.tokens[begin : begin + span]
            piece = piece[piece != self.sep_id]
            ids[r, 0], ids[r, 1 : first + 1], ids[r, first + 1] = self.cls_id, piece[:first], self.sep_id
            if second:
                end = first + second + 2
                ids[r, first + 2 : end], ids[r, end], types[r, first + 2 : end + 1] = piece[first:], self.sep_id, 1
            key = (self.seed << 32 | recipe.epoch, int(example))
            random[r] = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(T + 2 * K)
        lengths = (recipe.first + recipe.second + 2 + (recipe.second > 0)).astype(np.int64)
        candidates = ~np.isin(ids, self.special_ids)
        masked = mask_tokens(
            ids, lengths, candidates, self.share, self.style, self.mask_id, self.ordinary_ids, random, K
        )
        return Batch(*map(torch.from_numpy, (ids, masked.ids, masked.positions, masked.labels, types, lengths)))
