"""ELECTRA's examples: two segments of neighbouring lines of one document, masked afresh in every epoch.

Lines of a document are gathered up to a target length, then split into a first and a second segment. What does not fit
starts the next example, so every token is in exactly one example of an epoch. The grouping of lines depends on the data,
the length and the seed; the order of the examples and the masks depend on the epoch too, but not on ranks, workers or a
resume.

Shapes. N: examples, R: rows (examples) of a batch, T: positions of a row, K: masked positions of a row at most.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common.errors import DataError
from dataset.arrays import Ints
from dataset.packing import chunks, permutation
from dataset.reading.settings import PARAGRAPHS
from dataset.store.token_store import Documents, Tokens
from dataset.tokenizing.encoder import DocumentEncoder
from model.config import IGNORE

# Minimum positions of an example: two segments and their special tokens
MIN_POSITIONS = 5
# Share of the examples with one segment, as in single-sentence tasks
SINGLE_SEGMENT = 0.1
# Share of the examples with a random target length, from MIN_POSITIONS up
RANDOM_TARGET = 0.05
# Probability that a line which overfills the first segment is still added to it
OVERFLOW = 0.5


class LineEncoder(DocumentEncoder):
    """Encodes documents line by line: the ids of each line, then SEP. Lines without tokens are left out; in a .txt file
    a blank line ends a document."""

    document_end = PARAGRAPHS
    should_keep_text = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer)
        self.sep_id = tokenizer.sep_token_id
        # Only SEP is added: no BOS and EOS around a text, and no literal ones removed from it.
        self.bos_id = self.eos_id = self._bos = self._eos = None
        self.fingerprint = hashlib.sha256(f"lines {self.sep_id} {self.fingerprint}".encode()).hexdigest()

    def ends_line(self, token_id: int) -> bool:
        """SEP marks the end of a line."""
        return token_id == self.sep_id

    def encode_in_parts(self, text: str) -> Iterator[Ints]:
        """Yields the ids of one text's lines, each followed by SEP."""
        for line in text.split("\n"):
            has_tokens = False
            # SEP comes after all parts of a long line.
            for ids in self._body_in_parts(line):
                has_tokens = has_tokens or len(ids) > 0
                yield ids
            if has_tokens:
                yield np.array([self.sep_id])


class Examples:
    """Position of every example in a token store of a LineEncoder.

    The original code walks through a document line by line, as the test does. Here all documents take a step at once, a few array
    operations: each yields its next example, and those with text left take the next step.

    In the store every line ends with a SEP, which is no position of an example. So tokens are counted without SEPs, and
    `start`, `stop` and `line_ends` are such counts. A line's end is one past the last token of each line.

    Attributes, arrays [N]: begin (first token in the store), span (tokens and SEPs in the store), first and second
    (tokens of the two segments; second may be 0), lengths (positions taken, CLS and SEP included), candidates (tokens
    that may be masked: not `unk_id`, from which there is nothing to learn).
    """

    def __init__(
        self, store: Documents, max_seq_len: int, sep_id: int, seed: int, unk_id: int, documents: Ints
    ) -> None:
        """documents: numbers, ascending, of those to use. Errors: DataError if they have no text."""
        self.max_seq_len = max_seq_len
        seps = _positions(store.tokens, sep_id)
        line_ends = seps - np.arange(len(seps))
        self.offsets = store.offsets
        bounds = self.offsets - np.searchsorted(seps, self.offsets)
        start = bounds[:-1][documents]
        stop = bounds[1:][documents]
        bits = np.random.PCG64([seed, 0xE1EC])
        steps = []
        # Documents without text left drop out.
        while (has_more := start < stop).any():
            start = start[has_more]
            stop = stop[has_more]
            first, second = self._next(start, stop, line_ends, bits)
            steps.append(np.stack((start, first, second)))
            start = start + first + second
        if not steps:
            raise DataError("--data_path: no document with text to learn from")
        examples = np.concatenate(steps, axis=1)
        start, first, second = examples[:, np.argsort(examples[0])]
        self.first = first.astype(np.int32)
        self.second = second.astype(np.int32)
        # Back to indices into the store: plus a SEP for each line that ended before.
        last = start + self.first + self.second - 1
        self.begin = start + np.searchsorted(line_ends, start, side="right")
        self.span = (last + np.searchsorted(line_ends, last, side="right") + 1 - self.begin).astype(np.int32)
        self.lengths = positions_taken(self.first, self.second)
        unknown = _positions(store.tokens, unk_id)
        counts = np.searchsorted(unknown, self.begin + self.span) - np.searchsorted(unknown, self.begin)
        self.candidates = self.first + self.second - counts.astype(np.int32)

    def _next(self, start: Ints, stop: Ints, line_ends: Ints, bits: np.random.PCG64) -> tuple[Ints, Ints]:
        """(tokens of the first, of the second segment) of the examples that start at `start` in documents that end at
        `stop`."""
        T = self.max_seq_len
        n = len(start)
        # The order of these draws must never change: it is part of the data order.
        draws = unit_interval(np.asarray(bits.random_raw(4 * n))).reshape(4, n)
        kind_draw, target_draw, single_draw, overflow_draw = draws
        # Tokens to gather
        random_target = MIN_POSITIONS + target_draw * (T - MIN_POSITIONS + 1)
        target = np.where(kind_draw < RANDOM_TARGET, random_target, T).astype(np.int64)
        # Target length of the first segment: half of the target without CLS and two SEPs, or unbounded.
        first_target = np.where(single_draw < SINGLE_SEGMENT, 1 << 40, (target - 3) // 2)

        def end_of_line(at: Ints) -> Ints:
            """The end of the line that holds the token before `at`."""
            line = np.minimum(np.searchsorted(line_ends, at), len(line_ends) - 1)
            return np.minimum(line_ends[line], stop)

        # Whole lines, until there are at least `target` tokens.
        end = end_of_line(start + target)
        # The first segment: the lines that stay below `first_target`, but one line at least.
        whole = line_ends[np.maximum(np.searchsorted(line_ends, start + first_target) - 1, 0)]
        split = np.minimum(np.maximum(end_of_line(start + 1), whole), end)
        # By chance, also the line that overfills it.
        takes_one_more = (split < end) & (split - start < first_target) & (overflow_draw < OVERFLOW)
        split = np.where(takes_one_more, end_of_line(split + 1), split)
        # Tokens beyond the row start the next example.
        first = np.minimum(split - start, T - 2)
        second = np.minimum(end - split, np.maximum(T - 3 - first, 0))
        return first, second


def positions_taken(first: Ints, second: Ints) -> Ints:
    """Positions of examples with these tokens per segment: plus CLS and SEP, and another SEP after a second segment."""
    return first + second + 2 + (second > 0)


def _positions(tokens: Tokens, value: int) -> Ints:
    """Positions of `value` in a large array of tokens, int64."""
    parts = [np.empty(0, np.int64)]
    for lo, hi in chunks(len(tokens)):
        parts.append(np.flatnonzero(tokens[lo:hi] == value) + lo)
    return np.concatenate(parts)


class Totals(NamedTuple):
    """Totals of an update, over all micro-batches and ranks."""

    targets: int  # discriminator: positions without padding
    masked: int  # generator


class Recipe(NamedTuple):
    """The examples of a batch: arrays [R]."""

    example: Ints
    begin: Ints
    span: Ints
    first: Ints
    second: Ints
    epoch: int


class ElectraPlan:
    """The examples of one epoch in their order: a row is an example."""

    def __init__(self, examples: Examples, mask_share: float, seed: int, epoch: int, shuffle: bool = True) -> None:
        """mask_share: of an example's positions that are masked. shuffle: else in the order of the data."""
        self.examples = examples
        self.mask_share = mask_share
        self.epoch = epoch
        self.T = examples.max_seq_len
        self.n_rows = len(examples.lengths)
        bits = np.random.PCG64([seed, epoch])
        self._order = permutation(bits, self.n_rows) if shuffle else np.arange(self.n_rows)
        self.fill = float(examples.lengths.sum(dtype=np.int64)) / (self.n_rows * self.T)

    def totals(self, lo: int, hi: int) -> Totals:
        """The Totals of the rows [lo, hi)."""
        rows = self._order[lo:hi]
        lengths = self.examples.lengths[rows]
        masked = np.minimum(mask_count(lengths, self.mask_share), self.examples.candidates[rows])
        return Totals(int(lengths.sum()), int(masked.sum()))

    def recipe(self, rows: Sequence[int] | Ints) -> Recipe:
        """The Recipe of the given rows (a range or an int array)."""
        example = self._order[np.asarray(rows, dtype=np.int64)]
        e = self.examples
        return Recipe(example, e.begin[example], e.span[example], e.first[example], e.second[example], self.epoch)

    def documents_of(self, lo: int, hi: int) -> list[int]:
        """The numbers of the documents in the rows [lo, hi), each once."""
        begin = self.examples.begin[self._order[lo:hi]]
        documents = np.searchsorted(self.examples.offsets, begin, side="right") - 1
        return list(dict.fromkeys(documents.tolist()))


class Batch(NamedTuple):
    """int64 tensors; see ElectraPretrainer.forward."""

    ids: torch.Tensor  # [R, T]
    masked_ids: torch.Tensor  # [R, T]
    positions: torch.Tensor  # [R, K]
    labels: torch.Tensor  # [R, K]
    token_type_ids: torch.Tensor  # [R, T]
    lengths: torch.Tensor  # [R]


class ElectraAssembler:
    """assembler[recipe] is the Batch of these examples, masked for the recipe's epoch."""

    def __init__(
        self,
        store: Documents,
        tokenizer: PreTrainedTokenizerBase,
        max_seq_len: int,
        mask_share: float,
        style: str,
        seed: int,
    ) -> None:
        """mask_share: of an example's positions that are masked. style: "electra" writes [MASK] at 85 % of them and leaves the
        rest, "bert" writes [MASK] at 80 %, any ordinary token at 10 %."""
        self.store = store
        self.T = max_seq_len
        self.mask_share = mask_share
        self.style = style
        self.seed = seed
        self.pad_id = tokenizer.pad_token_id
        self.cls_id = tokenizer.cls_token_id
        self.sep_id = tokenizer.sep_token_id
        self.mask_id = tokenizer.mask_token_id
        self.special_ids = np.array(sorted(tokenizer.all_special_ids))
        self.ordinary_ids = np.setdiff1d(np.arange(len(tokenizer)), self.special_ids)
        self.K = int(mask_count(max_seq_len, mask_share))

    def __getitem__(self, recipe: Recipe) -> Batch:
        R = len(recipe.example)
        T = self.T
        n_random = T + 2 * self.K
        ids = np.full((R, T), self.pad_id, dtype=np.int64)
        types = np.zeros((R, T), dtype=np.int64)
        random = np.empty((R, n_random), dtype=np.uint64)
        ids[:, 0] = self.cls_id
        for r in range(R):
            begin = recipe.begin[r]
            first = recipe.first[r]
            second = recipe.second[r]
            # The SEPs of lines are only in the store.
            piece = self.store.tokens[begin : begin + recipe.span[r]]
            piece = piece[piece != self.sep_id]
            ids[r, 1 : first + 1] = piece[:first]
            ids[r, first + 1] = self.sep_id
            if second:
                end = first + second + 2
                ids[r, first + 2 : end] = piece[first:]
                ids[r, end] = self.sep_id
                types[r, first + 2 : end + 1] = 1
            # A generator for each example and epoch: masks depend on nothing else.
            key = (self.seed << 32 | recipe.epoch, int(recipe.example[r]))
            random[r] = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(n_random)
        lengths = positions_taken(recipe.first, recipe.second).astype(np.int64)
        return Batch(*map(torch.from_numpy, (ids, *self.mask(ids, lengths, random), types, lengths)))

    def mask(self, ids: np.ndarray, lengths: Ints, random: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int64 arrays: the generator's input [R, T], the masked positions [R, K] in ascending order and their original
        tokens [R, K]; unused slots have position 0 and label IGNORE.

        ids: int64 [R, T]; lengths: int64 [R]; random: uint64 [R, T + 2 K] of random bits. Special tokens and padding are
        never masked; in a row with fewer other tokens than `mask_count` all of them are.
        """
        R, T = ids.shape
        K = self.K
        candidates = ~np.isin(ids, self.special_ids)
        counts = np.minimum(mask_count(lengths, self.mask_share), candidates.sum(1))
        # Each candidate gets a random key, any other position the maximum: the smallest keys are chosen. The upper bit of
        # a candidate's key is cleared, so that it is always smaller.
        keys = np.where(candidates, random[:, :T] >> np.uint64(1), ~np.uint64(0))
        chosen = np.argpartition(keys, np.arange(K), axis=1)[:, :K]
        is_used = np.arange(K) < counts[:, None]
        # Ascending, with unused slots at the end.
        positions = np.sort(np.where(is_used, chosen, T), axis=1)
        positions[~is_used] = 0
        rows = np.arange(R)[:, None]
        tokens = ids[rows, positions]
        labels = np.where(is_used, tokens, IGNORE)

        unit = unit_interval(random[:, T : T + K])
        if self.style == "electra":
            written = np.where(unit < 0.85, self.mask_id, tokens)
        else:
            ordinary = self.ordinary_ids[random[:, T + K :] % np.uint64(len(self.ordinary_ids))]
            written = np.where(unit < 0.8, self.mask_id, np.where(unit < 0.9, ordinary, tokens))
        masked = ids.copy()
        masked[np.broadcast_to(rows, is_used.shape)[is_used], positions[is_used]] = written[is_used]
        return masked, positions, labels


def mask_count(lengths: np.ndarray | int, mask_share: float) -> np.ndarray:
    """Positions to mask in examples of the given lengths (CLS and SEP included): max(1, round(mask_share · length))."""
    counts: np.ndarray = np.maximum(1, np.rint(mask_share * np.asarray(lengths)))
    return counts.astype(np.int64)


def unit_interval(bits: np.ndarray) -> np.ndarray:
    """Random bits, uint64, as float64 in [0, 1): the upper 53 bits, as many as a float64 holds."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
