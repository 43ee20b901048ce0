"""Packs documents into rows, and orders the rows of an epoch.

A document of n tokens has n-1 (input, target) pairs and takes n-1 positions of a row. A *piece* is a document or a
part of one that fits a row; the parts of a document share their boundary token, so that every target is used
exactly once.

`naive_rows` is the specification, one piece after the other. `EpochPlan` gives the same rows for millions of documents.

A plan depends on the document lengths, `max_seq_len`, the seed and the epoch alone. It uses numpy's raw bit stream and sorts of
distinct keys, whose results are the same in every numpy and on every machine.

Shapes. T: positions of a row, R: rows, P: pieces. "pairs" are (input, target) pairs of a piece or a document.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dataset.arrays import Ints
from dataset.store.token_store import Documents

# (document, first token within it, pairs)
Piece = tuple[int, int, int]


def naive_rows(lengths: Sequence[int], T: int, bits: np.random.PCG64) -> list[list[Piece]]:
    """The packed rows of an epoch. lengths: tokens of each document. Random numbers are drawn from `bits`."""
    pieces = []
    for document, length in enumerate(lengths):
        for start in range(0, length - 1, T):
            pieces.append((document, start, min(T, length - 1 - start)))

    # Best-fit decreasing, as in https://arxiv.org/abs/2404.10830: from the longest to the shortest, each piece goes into the
    # fullest row that has room for it, or else into a new row. Of equally full rows, those filled with the same lengths are a
    # group: the newest group comes first (groups are numbered from 0 down, 1: empty rows), and of its rows the first. Any other
    # rule fills the rows as well; this one is that of `best_fit`, which knows only lengths. Pieces of 9 6 6 3 3 2 2, T = 11:
    #
    #     row 0   9 9 9 9 9 9 9 9 9 . .    Each row has two free positions when the first piece of 2 comes. Rows 1 and 2 are the
    #     row 1   6 6 6 6 6 6 3 3 3 . .    newest group, filled with 6 and 3: the piece goes into row 1, and the next one into
    #     row 2   6 6 6 6 6 6 3 3 3 . .    row 2. A third one would go into row 0.
    open_rows: list[list[tuple[int, int]]] = [[] for _ in range(T + 1)]  # [free positions]: a heap of (group, row)
    groups: dict[tuple[int, int], int] = {}
    rows: list[list[Piece]] = []
    row_of_piece = []
    for pairs in sorted((pairs for _, _, pairs in pieces), reverse=True):
        free = next((free for free in range(pairs, T) if open_rows[free]), T)
        if free == T:
            heapq.heappush(open_rows[T], (1, len(rows)))
            rows.append([])
        group, row = heapq.heappop(open_rows[free])
        group = groups.setdefault((group, pairs), -len(groups))
        heapq.heappush(open_rows[free - pairs], (group, row))
        row_of_piece.append(row)

    # The rows get random positions in the epoch, and pieces of equal length are shuffled: both sorts are stable, by as many
    # random bits as the keys of EpochPlan have.
    position_of_row = np.argsort(bits.random_raw(len(rows)) >> np.uint64(32), kind="stable")
    draws = bits.random_raw(len(pieces)) >> np.uint64(32 + T.bit_length())
    shuffled = [pieces[number] for number in np.argsort(draws, kind="stable")]
    by_length = sorted(shuffled, key=lambda piece: piece[2], reverse=True)
    for piece, row in zip(by_length, row_of_piece, strict=True):
        rows[position_of_row[row]].append(piece)
    return [sorted(row) for row in rows]


# Documents or rows processed at once: bounds the memory of temporaries.
CHUNK = 1 << 18

# A sort key has 64 bits: the sort criterion in the high half, the number of the item in the low half. So an in-place
# sort of the keys is an argsort. No two keys are equal, so the order does not depend on how numpy breaks ties. The keys
# of this file, from the highest bit to the lowest:
#
#     permutation          32 random bits                                  | 32 bits: the number
#     _pieces_by_length    T - length in w bits, then 32 - w random bits   | 32 bits: the piece (w: bits that T takes)
#     _pack_rows           32 bits: the row of the epoch                   | 32 bits: the piece
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


class Totals(NamedTuple):
    """Counts of an update, over all micro-batches and ranks."""

    targets: int
    documents: int  # pieces of documents, see `Batch.n_documents`


class Recipe(NamedTuple):
    """All that a worker process needs to build a batch: some numbers per piece, without the plan."""

    per_row: Ints  # [R] pieces of each row
    begin: Ints  # [P] first token of each piece in the store
    pairs: Ints  # [P]
    T: int
    is_padded: bool


def chunks(n: int) -> Iterator[tuple[int, int]]:
    """(lo, hi) slices of at most CHUNK that cover range(n)."""
    return ((lo, min(lo + CHUNK, n)) for lo in range(0, n, CHUNK))


def permutation(bits: np.random.PCG64 | None, n: int) -> Ints:
    """A random order of range(n), uint32 [n], drawn from a numpy bit generator; in order if that is None."""
    if bits is None:
        return np.arange(n, dtype=np.uint32)
    # Raw bits and a sort, not `Generator.permutation`: numpy guarantees only the bits across versions.
    keys = bits.random_raw(n)
    for lo, hi in chunks(n):
        keys[lo:hi] &= ~LOW
        keys[lo:hi] |= np.arange(lo, hi, dtype=np.uint64)
    keys.sort()
    keys &= LOW
    return keys.astype(np.uint32)


def all_documents(store: Documents) -> Ints:
    """The numbers of all documents, in uint32 if they fit, as they nearly always do: half the memory."""
    return np.arange(len(store), dtype=np.uint32 if len(store) <= 1 << 32 else np.int64)


def target_counts(store: Documents) -> Ints:
    """uint32 [documents]: the targets of each document, one less than its tokens."""
    # -1 for an empty document
    return np.maximum(np.diff(store.offsets) - 1, 0).astype(np.uint32)


# consecutive rows: (first row, number of rows)
Span = tuple[int, int]
# (first row, number of rows, next pieces that each of them takes)
Run = tuple[int, int, int]


def best_fit(counts: Ints, T: int) -> tuple[list[Run], list[list[Span]], int]:
    """Best-fit decreasing: counts [T+1], pieces of each length -> (runs, room, number of rows).

    `runs` take the pieces in order of decreasing length; room[r]: spans of rows that end with r free positions.

    The rule is that of `naive_rows`. Only the length of a piece and the free room of a row matter, so all pieces of one
    length are placed at once, and rows with the same room are kept together as spans (its groups). The time depends on the
    number of distinct lengths, some hundreds, not of documents, some millions.
    """
    runs: list[Run] = []
    room: list[list[Span]] = [[] for _ in range(T + 1)]
    # occupied[r]: there may be rows with r free positions
    occupied = np.zeros(T + 1, dtype=bool)
    n_rows = 0
    # Only lengths that occur: each costs a search of all T.
    for length in (np.flatnonzero(counts[1:]) + 1)[::-1].tolist():
        count = int(counts[length])
        # A row that takes pieces here ends with less room than `length`, unless the pieces run out, which ends the
        # loop. So no row returns to this list, and it is made once.
        fullest_first = np.flatnonzero(occupied[length:]) + length
        for free in [*fullest_first.tolist(), T]:
            if not count:
                break
            # A row that takes a piece is now the fullest one with room, so the next piece of this length goes there too: rows
            # are filled one after the other, each with as many pieces as fit.
            fit = free // length
            if free == T:
                # No open row has room. New rows come last in the list: an empty row has the most room.
                needed = -(-count // fit)
                room[free].append((n_rows, needed))
                n_rows += needed
            while room[free] and count:
                first, rows = room[free].pop()
                # The last row takes what is left.
                each = min(fit, count)
                taken = min(rows, count // each)
                runs.append((first, taken, each))
                count -= taken * each
                left = free - each * length
                room[left].append((first, taken))
                occupied[left] = True
                if taken < rows:
                    room[free].append((first + taken, rows - taken))
            occupied[free] = bool(room[free])
    return runs, room, n_rows


# Return type of `RowPlan.pieces`
PiecesOfRows = tuple[Ints, Ints, Ints, Ints]


class RowPlan(ABC):
    """Rows, and the pieces of documents in them.

    n_rows: number of rows. T: positions of a row. pack: documents share rows. n_pairs: positions that hold a token, each
    with a target, used for training or not. fill: their fraction of all positions. targets: int [R], trained targets of each row.
    offsets: of the documents' store.
    """

    n_rows: int
    T: int
    pack: bool
    fill: float
    n_pairs: int
    targets: Ints
    offsets: Ints

    @abstractmethod
    def pieces(self, rows: Sequence[int] | Ints) -> PiecesOfRows:
        """The pieces of the given rows (int array [R]), row by row.

        Returns int64 arrays (count [R], document [P], start [P], pairs [P]): pieces of each row; the number of a
        piece's document in the store, its first token within the document, and its pairs.
        """

    def row_targets(self, lo: int, hi: int) -> int:
        """Targets in the rows [lo, hi)."""
        return int(self.targets[lo:hi].sum(dtype=np.int64))

    def source_targets(self, rows: int) -> list[int]:
        """Targets of each source in the first rows. Documents without shares are one source."""
        return [self.row_targets(0, rows)]

    def totals(self, lo: int, hi: int) -> Totals:
        """The Totals of the rows [lo, hi)."""
        count, *_ = self.pieces(range(lo, hi))
        return Totals(self.row_targets(lo, hi), int(count.sum()))

    def recipe(self, rows: Sequence[int] | Ints) -> Recipe:
        """The Recipe of the given rows (a range or an int array)."""
        count, document, start, pairs = self.pieces(rows)
        # A position in the store is one number: the recipe names no documents, and the worker looks none up.
        return Recipe(count, self.offsets[document] + start, pairs, self.T, not self.pack)

    def documents_of(self, lo: int, hi: int) -> list[int]:
        """The numbers of the documents in the rows [lo, hi), each once."""
        _, document, _, _ = self.pieces(range(lo, hi))
        # A dict, not a set, keeps the order of the rows.
        return list(dict.fromkeys(document.tolist()))

    def pieces_of_row(self, row: int) -> list[Piece]:
        _, document, start, pairs = self.pieces([row])
        return list(zip(document.tolist(), start.tolist(), pairs.tolist(), strict=True))


class EpochPlan(RowPlan):
    """The rows of one epoch.

    offsets: of the store, int64 [documents + 1]. documents: numbers of those to use; None: all.
    pack: documents share rows of T = max_seq_len positions; `long_documents` "split" cuts what is longer than a row
    into pieces, "truncate" keeps the first max_seq_len tokens. Not pack: one document per row in the layout of
    PretrainDataset, T = max_seq_len - 1, truncated.
    shuffle=False: pieces and rows in a fixed order (evaluation).
    trained_pairs: int [documents of the store], of each document, default all; only without splitting.
    Documents of fewer than two tokens have nothing to predict and are left out.

    Takes about 16 bytes per document, 24 while it is built, which takes seconds for 10 million documents.
    """

    def __init__(
        self,
        offsets: Ints,
        max_seq_len: int,
        seed: int,
        epoch: int,
        pack: bool = True,
        long_documents: str = "split",
        documents: Ints | None = None,
        shuffle: bool = True,
        trained_pairs: Ints | None = None,
    ) -> None:
        assert long_documents in ("split", "truncate")
        assert max_seq_len >= 2, "room for an input and a target"
        self.is_split = pack and long_documents == "split"
        # Maximum pairs of a piece: a document truncated at max_seq_len tokens has one pair less than tokens.
        self.limit = max_seq_len if self.is_split else max_seq_len - 1
        self.offsets = offsets
        self.documents = np.arange(len(offsets) - 1, dtype=np.uint32) if documents is None else documents
        self.pack = pack
        self.T = max_seq_len if pack else max_seq_len - 1
        # From seed and epoch alone: a resumed run rebuilds the plan of its epoch without the earlier ones.
        bits = np.random.PCG64([seed, epoch]) if shuffle else None

        # [i]: number of the first piece of the i-th chosen document
        self._first_piece = np.zeros(len(self.documents) + 1, dtype=np.uint32)
        # pieces of each length
        counts = np.zeros(self.T + 1, dtype=np.int64)
        # pairs of each piece, in one or two bytes
        lengths = [np.empty(0, dtype=np.min_scalar_type(self.T))]
        for lo, hi in chunks(len(self.documents)):
            chosen = np.asarray(self.documents[lo:hi], dtype=np.int64)
            # -1 for an empty document
            pairs = np.maximum(self.offsets[chosen + 1] - self.offsets[chosen] - 1, 0)
            if not self.is_split:
                pairs = np.minimum(pairs, self.limit)
            pieces = -(-pairs // self.limit)
            self._first_piece[lo + 1 : hi + 1] = int(self._first_piece[lo]) + np.cumsum(pieces)
            # All pieces are full but the last one of a document, which holds the rest. A document without pairs has no piece.
            part = np.full(pieces.sum(), self.limit, dtype=lengths[0].dtype)
            has_any = pieces > 0
            last = np.cumsum(pieces)[has_any] - 1
            part[last] = (pairs - (pieces - 1) * self.limit)[has_any]
            counts += np.bincount(part, minlength=self.T + 1)
            lengths.append(part)
        self._lengths = np.concatenate(lengths)
        del lengths
        self.n_pieces = len(self._lengths)
        assert self.n_pieces <= int(LOW) and self.T < 1 << 24, "piece numbers and lengths share a 64-bit key"
        if pack:
            self._pack_rows(counts, bits)
        else:
            # One row per piece.
            self.n_rows = self.n_pieces
            self._order: Ints = permutation(bits, self.n_pieces)
            self._row_start = np.arange(self.n_rows + 1, dtype=np.uint32)
            self.targets = self._lengths[self._order]
        self.n_pairs = self.row_targets(0, self.n_rows)
        self.fill = self.n_pairs / max(self.n_rows * self.T, 1)
        if trained_pairs is not None:
            assert not self.is_split, "the trained pairs of a single piece are unknown"
            for lo, hi in chunks(self.n_rows):
                count, document, _, _ = self.pieces(range(lo, hi))
                sums = np.add.reduceat(trained_pairs[document], np.cumsum(count) - count, dtype=np.int64)
                self.targets[lo:hi] = sums

    def _pack_rows(self, counts: Ints, bits: np.random.PCG64 | None) -> None:
        """Pack the pieces into shared rows. counts [T+1]: pieces of each length.

        `best_fit` says how many pieces each row takes from the list of all pieces, sorted by decreasing length. Pieces
        of equal length are in random order there, and rows get random numbers in the epoch. So the pieces that share a
        row, and its number, differ between epochs, and rows are as full as best-fit makes them.

        Two sorts of one array of keys do this. The first sorts by the length of each piece, which gives the list. Then
        the length is overwritten by the piece's row, and the second sort gives the pieces row by row.
        """
        runs, room, self.n_rows = best_fit(counts, self.T)
        # The number in the epoch of each row of `best_fit`. Drawn before the order of the pieces, from the same stream:
        # the other way round would give another epoch.
        epoch_row = permutation(bits, self.n_rows)
        # Stored for all rows, in one or two bytes each: the totals of an update are needed without its batches.
        self.targets = np.empty(self.n_rows, dtype=np.min_scalar_type(self.T))
        for free, spans in enumerate(room):
            for first, rows in spans:
                self.targets[epoch_row[first : first + rows]] = self.T - free

        keys = self._pieces_by_length(bits)
        # Runs consume the list in order; the next one starts at `at`.
        at = 0
        for first_row, rows, each in runs:
            for lo, hi in chunks(rows):
                # A view: changes go to `keys`.
                part = keys[at : at + (hi - lo) * each]
                rows_of_part = epoch_row[first_row + lo : first_row + hi].astype(np.uint64)
                part &= LOW
                part |= np.repeat(rows_of_part << HALF, each)
                at += len(part)
        assert at == self.n_pieces
        # Freed before the sort: with many rows it is large.
        del epoch_row
        keys.sort()
        # The first key of a row is the smallest with its number in the high half; one row more gives the end.
        self._row_start = np.empty(self.n_rows + 1, dtype=np.uint32)
        for lo, hi in chunks(self.n_rows + 1):
            first_key_of_row = np.arange(lo, hi, dtype=np.uint64) << HALF
            self._row_start[lo:hi] = np.searchsorted(keys, first_key_of_row)
        keys &= LOW
        self._order = keys.astype(np.uint32)

    def _pieces_by_length(self, bits: np.random.PCG64 | None) -> Ints:
        """Keys with the piece number in the low half, by decreasing length, in random order among equal lengths.

        The high half holds, from the top, T - length in as many bits as T has, and then random bits.
        """
        keys = np.empty(self.n_pieces, dtype=np.uint64)
        width = np.uint64(self.T.bit_length())
        for lo, hi in chunks(self.n_pieces):
            # The random bits are shifted to make room for the length. At least 8 of them stay: T has 24 bits at most.
            part = keys[lo:hi]
            part[:] = 0 if bits is None else (bits.random_raw(hi - lo) >> width) & ~LOW
            part |= (self.T - self._lengths[lo:hi]).astype(np.uint64) << (np.uint64(64) - width)
            part |= np.arange(lo, hi, dtype=np.uint64)
        keys.sort()
        return keys

    def pieces(self, rows: Sequence[int] | Ints) -> PiecesOfRows:
        of_rows = [self._order[self._row_start[row] : self._row_start[row + 1]] for row in rows]
        count = np.array([len(of_row) for of_row in of_rows], dtype=np.int64)
        piece = np.concatenate([self._order[:0], *of_rows])
        # `_first_piece` rises, with equal entries where a document has no piece, so the last entry that is not above
        # the number of a piece belongs to its document.
        document = np.searchsorted(self._first_piece, piece, side="right") - 1
        start = (piece.astype(np.int64) - self._first_piece[document]) * self.limit
        return count, np.asarray(self.documents[document], dtype=np.int64), start, self._lengths[piece].astype(np.int64)
