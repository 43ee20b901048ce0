"""Which documents share which row, and in which order the rows of an epoch come.

A document of n tokens has n-1 (input, target) pairs and takes n-1 positions of a row. A *piece* is a document or a
part of one that fits a row; the parts of a document share their boundary token, so that every target is trained
exactly once.

A plan depends on the document lengths, `max_seq_len`, the seed and the epoch alone: every rank makes the same one
without communication, and a position in it is one number, the row. It uses numpy's raw bit stream and sorts of
distinct keys, which are the same in every numpy and on every machine.

Shapes. T: positions of a row, R: rows, P: pieces. "pairs" are (input, target) pairs of a piece or a document.
"""

from typing import NamedTuple

import numpy as np

CHUNK = 1 << 18  # documents or rows handled at once: bounds the temporaries
LOW = np.uint64(0xFFFFFFFF)  # sort keys carry what is sorted by in the high half and a number in the low half
HALF = np.uint64(32)


class Totals(NamedTuple):
    """What an update trains, over all micro-batches and ranks."""

    targets: int
    documents: int


class Recipe(NamedTuple):
    """What it takes to build a batch, without its plan: some numbers per piece. Worker processes get only this."""

    count: np.ndarray  # [R] pieces of each row
    begin: np.ndarray  # [P] first token of each piece in the store
    pairs: np.ndarray  # [P]
    T: int
    padded: bool


def chunks(n):
    """(lo, hi) slices of at most CHUNK that cover range(n)."""
    return ((lo, min(lo + CHUNK, n)) for lo in range(0, n, CHUNK))


def permutation(bits, n):
    """A random order of range(n), uint32 [n], drawn from a numpy bit generator; in order if that is None."""
    if bits is None:
        return np.arange(n, dtype=np.uint32)
    keys = bits.random_raw(n)
    for lo, hi in chunks(n):
        keys[lo:hi] &= ~LOW
        keys[lo:hi] |= np.arange(lo, hi, dtype=np.uint64)
    keys.sort()
    keys &= LOW
    return keys.astype(np.uint32)


def best_fit(counts, T):
    """Best-fit decreasing: each piece, longest first, goes to the fullest row that still has room for it.

    Works on rows of equal room at once, so its time depends on the number of different lengths, not of documents.
    counts [T+1]: pieces of each length. Returns (runs, room): `runs` lists (first row, rows, pieces in each) in the
    order in which the pieces, sorted by falling length, are taken; room[r] lists (first row, rows) of the rows that
    end with r positions free.
    """
    room = [[] for _ in range(T + 1)]
    occupied = np.zeros(T + 1, dtype=bool)  # occupied[r]: room[r] may be non-empty
    runs, n_rows = [], 0
    for length in range(T, 0, -1):
        left = int(counts[length])
        if not left:
            continue
        for r in [*(np.flatnonzero(occupied[length:]) + length).tolist(), T]:
            per_row = r // length
            if r == T:  # nothing open has room: as many new rows as are needed
                need = -(-left // per_row)
                room[T].append((n_rows, need))
                n_rows += need
            while room[r] and left:
                first, rows = room[r].pop()
                whole = min(rows, left // per_row)
                rest = left - whole * per_row if whole < rows else 0  # of the one row that is not filled to the end
                for at, n, each in ((first, whole, per_row), (first + whole, 1, rest)):
                    if n and each:
                        runs.append((at, n, each))
                        room[r - each * length].append((at, n))
                        occupied[r - each * length] = True
                        left -= n * each
                        first, rows = first + n, rows - n
                if rows:
                    room[r].append((first, rows))
            occupied[r] = bool(room[r])
            if not left:
                break
    return runs, room


class EpochPlan:
    """The rows of one epoch.

    store: anything with `.offsets`, int64 [documents + 1]. documents: the numbers of those to use, default all.
    pack: rows of T = max_seq_len positions which documents share; `long_documents` "split" cuts what is longer than a
    row into pieces, "truncate" keeps the first max_seq_len tokens. Not pack: one document a row in the layout of
    PretrainDataset, T = max_seq_len - 1, the rest cut off.
    shuffle=False: pieces and rows in a fixed order (evaluation).
    Documents of fewer than two tokens have nothing to predict and are left out.

    Attributes: n_rows, n_pieces, T, fill (share of the positions that hold a token).
    Holds about 14 bytes a document and builds in a second or so for 10 million.
    """

    def __init__(
        self, store, max_seq_len, seed, epoch, pack=True, long_documents="split", documents=None, shuffle=True
    ):
        if long_documents not in ("split", "truncate"):
            raise ValueError(f"long_documents must be split or truncate, not {long_documents!r}")
        if max_seq_len < 2:
            raise ValueError(f"max_seq_len must be at least 2 to hold an input and a target, not {max_seq_len}")
        self.offsets, self.documents = store.offsets, documents
        self.n_documents = len(self.offsets) - 1 if documents is None else len(documents)
        self.pack, self.split = pack, pack and long_documents == "split"
        self.T = max_seq_len if pack else max_seq_len - 1
        self.limit = max_seq_len if self.split else max_seq_len - 1  # pairs of a piece at most
        bits = np.random.PCG64([seed, epoch]) if shuffle else None

        counts = np.zeros(self.T + 1, dtype=np.int64)
        for lo, hi in chunks(self.n_documents):
            counts += np.bincount(self._piece_lengths(lo, hi)[1], minlength=self.T + 1)
        self.n_pieces = int(counts.sum())
        assert self.n_pieces <= int(LOW) and self.T < 1 << 24, "piece numbers and lengths share a 64-bit key"
        (self._pack_rows if pack else self._pad_rows)(counts, bits)
        self.fill = self.row_targets(0, self.n_rows) / max(self.n_rows * self.T, 1)
        self._number_pieces()

    def _piece_lengths(self, lo, hi):
        """(pieces of each document, pairs of each piece) of the documents [lo, hi) of the selection."""
        if self.documents is None:
            pairs = np.diff(self.offsets[lo : hi + 1]) - 1
        else:
            chosen = np.asarray(self.documents[lo:hi], dtype=np.int64)
            pairs = self.offsets[chosen + 1] - self.offsets[chosen] - 1
        if not self.split:
            pairs = np.minimum(pairs, self.limit)
        pieces = -(-np.maximum(pairs, 0) // self.limit)
        lengths = np.full(pieces.sum(), self.limit, dtype=np.int64)
        some = pieces > 0
        last = np.cumsum(pieces)[some] - 1  # the last piece of a document holds the rest
        lengths[last] = (pairs - (pieces - 1) * self.limit)[some]
        return pieces, lengths

    def _pack_rows(self, counts, bits):
        runs, room = best_fit(counts, self.T)
        self.n_rows = sum(rows for of_room in room for _, rows in of_room)
        place = permutation(bits, self.n_rows)  # of each row within the epoch
        self._targets = np.empty(self.n_rows, dtype=np.min_scalar_type(self.T))
        for r, of_room in enumerate(room):
            for first, rows in of_room:
                self._targets[place[first : first + rows]] = self.T - r

        keys = self._pieces_by_length(bits)
        at = 0
        for first, rows, each in runs:
            for lo, hi in chunks(rows):
                part = keys[at : at + (hi - lo) * each]
                part &= LOW
                part |= np.repeat(place[first + lo : first + hi].astype(np.uint64) << HALF, each)
                at += len(part)
        assert at == self.n_pieces
        del place
        keys.sort()  # now by row
        self._row_start = np.empty(self.n_rows + 1, dtype=np.uint32)
        for lo, hi in chunks(self.n_rows + 1):
            self._row_start[lo:hi] = np.searchsorted(keys, np.arange(lo, hi, dtype=np.uint64) << HALF)
        keys &= LOW
        self._order = keys.astype(np.uint32)

    def _pieces_by_length(self, bits):
        """Keys with the piece number in the low half, sorted by falling length, in random order among equal lengths."""
        keys = np.empty(self.n_pieces, dtype=np.uint64)
        width = np.uint64(self.T.bit_length())
        at = 0
        for lo, hi in chunks(self.n_documents):
            lengths = self._piece_lengths(lo, hi)[1]
            part = keys[at : at + len(lengths)]
            part[:] = 0 if bits is None else (bits.random_raw(len(part)) >> width) & ~LOW
            part |= (self.T - lengths).astype(np.uint64) << (np.uint64(64) - width)
            part |= np.arange(at, at + len(part), dtype=np.uint64)
            at += len(part)
        keys.sort()
        return keys

    def _pad_rows(self, counts, bits):
        self.n_rows = self.n_pieces
        self._order = permutation(bits, self.n_pieces)
        self._row_start = np.arange(self.n_rows + 1, dtype=np.uint32)
        lengths = np.empty(self.n_pieces, dtype=np.min_scalar_type(self.T))
        at = 0
        for lo, hi in chunks(self.n_documents):
            part = self._piece_lengths(lo, hi)[1]
            lengths[at : at + len(part)] = part
            at += len(part)
        self._targets = lengths[self._order]

    def _number_pieces(self):
        """_first_piece[i]: number of the first piece of the i-th chosen document."""
        self._first_piece = np.zeros(self.n_documents + 1, dtype=np.uint32)
        at = 0
        for lo, hi in chunks(self.n_documents):
            ends = at + np.cumsum(self._piece_lengths(lo, hi)[0])
            self._first_piece[lo + 1 : hi + 1] = ends
            at = int(ends[-1])

    def row_targets(self, lo, hi):
        """Targets in the rows [lo, hi)."""
        return int(self._targets[lo:hi].sum(dtype=np.int64))

    def row_documents(self, lo, hi):
        """Documents (pieces) in the rows [lo, hi)."""
        return int(self._row_start[hi]) - int(self._row_start[lo])

    def totals(self, lo, hi):
        """The Totals of the rows [lo, hi)."""
        return Totals(self.row_targets(lo, hi), self.row_documents(lo, hi))

    def recipe(self, rows):
        """The Recipe of the given rows (a range or an int array)."""
        count, document, start, pairs = self.pieces(rows)
        return Recipe(count, np.asarray(self.offsets[document]) + start, pairs, self.T, not self.pack)

    def documents_of(self, lo, hi):
        """The numbers of the documents in the rows [lo, hi), each once."""
        return list(dict.fromkeys(self.pieces(range(lo, hi))[1].tolist()))

    def pieces(self, rows):
        """The pieces of the given rows (int array [R]), row by row.

        Returns int64 arrays (count [R], document [P], start [P], pairs [P]): pieces of each row; the number of a
        piece's document in the store, its first token within the document, and its pairs.
        """
        rows = np.asarray(rows, dtype=np.int64)
        first = self._row_start[rows].astype(np.int64)
        count = self._row_start[rows + 1].astype(np.int64) - first
        at = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(count.sum())
        piece = self._order[at]
        document = np.searchsorted(self._first_piece, piece, side="right") - 1
        start = (piece.astype(np.int64) - self._first_piece[document]) * self.limit
        if self.documents is not None:
            document = np.asarray(self.documents[document], dtype=np.int64)
        pairs = np.minimum(self.offsets[document + 1] - self.offsets[document] - 1 - start, self.limit)
        return count, document, start, pairs

    def pieces_of_row(self, row):
        """[(document, first token within it, pairs), ...] of one row."""
        _, *columns = self.pieces([row])
        return list(zip(*(column.tolist() for column in columns), strict=True))
