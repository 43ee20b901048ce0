"""Best-fit decreasing: which pieces of documents share a row.

The rule, as in https://arxiv.org/abs/2404.10830: take the pieces from the longest to the shortest, and put each into the
fullest row that still has room for it; where none has, begin a new row. Done piece by piece it takes a search for each.

But a piece is only a length here, and a row only its free room. All pieces of one length are placed at once, and rows with
the same room are kept together as *runs* of consecutive row numbers. So the time depends on the number of different
lengths, some hundreds, and not on the number of documents, some millions. The tests compare with the rule done piece by
piece.

Shapes. T: positions of a row.
"""

from typing import NamedTuple

import numpy as np

from dataset.store.format import Ints


class Run(NamedTuple):
    """Each of the rows first_row ... first_row + rows - 1 takes the next `each` pieces."""

    first_row: int
    rows: int
    each: int


# (first row, number of rows)
Rows = tuple[int, int]


def best_fit(counts: Ints, T: int) -> tuple[list[Run], list[list[Rows]]]:
    """counts [T+1]: pieces of each length -> (runs, room).

    `runs` are in the order in which the pieces, sorted by falling length, are taken; room[r] lists the rows that end
    with r positions free.
    """
    packer = _Packer(T)
    for length in range(T, 0, -1):
        packer.place(length, int(counts[length]))
    return packer.runs, packer.room


def rows_of(room: list[list[Rows]]) -> int:
    """How many rows there are in all. room: as of `best_fit`."""
    total = 0
    for of_room in room:
        total += sum(rows for _, rows in of_room)
    return total


class _Packer:
    """The rows so far. room[r]: those with r positions free; occupied[r]: whether there may be any."""

    def __init__(self, T: int) -> None:
        self.T = T
        self.runs: list[Run] = []
        self.room: list[list[Rows]] = [[] for _ in range(T + 1)]
        self.occupied = np.zeros(T + 1, dtype=bool)
        self.n_rows = 0

    def place(self, length: int, count: int) -> None:
        """Put `count` pieces of one length into the fullest rows that have room, and what is left into new rows."""
        # A row that takes pieces here ends with less room than `length`, unless the pieces run out, which ends the loop. So
        # no row comes back into this list, and it can be made once.
        fullest_first = np.flatnonzero(self.occupied[length:]) + length
        for free in [*fullest_first.tolist(), self.T]:
            if not count:
                return
            if free == self.T:
                # No open row has room. An empty row has all of it, so new rows are the last in the list.
                needed = -(-count // (free // length))
                self.room[free].append((self.n_rows, needed))
                self.n_rows += needed
            count = self._fill_rows(free, length, count)

    def _fill_rows(self, free: int, length: int, count: int) -> int:
        """Put pieces into rows with `free` positions free, until either runs out. Returns the pieces that are left."""
        # A row that takes a piece is now the fullest one with room, so the next piece of this length goes there too: rows
        # are filled one after the other, each with as many pieces as fit.
        fit = free // length
        while self.room[free] and count:
            first, rows = self.room[free].pop()
            whole = min(rows, count // fit)
            self._take(first, whole, fit, free, length)
            count -= whole * fit
            first += whole
            rows -= whole
            if rows and count:
                # Too few pieces are left to fill the next row: it takes them all.
                self._take(first, 1, count, free, length)
                count = 0
                first += 1
                rows -= 1
            if rows:
                self.room[free].append((first, rows))
        self.occupied[free] = bool(self.room[free])
        return count

    def _take(self, first: int, rows: int, each: int, free: int, length: int) -> None:
        """Note that some rows with `free` positions free take `each` pieces of one length."""
        if not rows:
            return
        self.runs.append(Run(first, rows, each))
        left = free - each * length
        self.room[left].append((first, rows))
        self.occupied[left] = True
