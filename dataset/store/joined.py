"""Arrays of several stores as one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dataset.store.interface import Column, Ints


class Joined:
    """Read-only 1-d arrays end to end as one, without a copy. Takes slices, int arrays and ints as numpy does.

    sizes: of the parts. part(i): one of them, asked for when some of its numbers are wanted. shifts: what is added to the
    numbers of each part, default 0.

    Stores are mapped files of many gigabytes, so they cannot be copied into one array. Each number of an index is looked
    up in its own part instead; an index touches few parts, so a loop over them is cheap.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dtype: np.dtype[Any],
        part: Callable[[int], Column],
        shifts: Sequence[int] | None = None,
    ) -> None:
        self.part = part
        self.shifts = shifts or [0] * len(sizes)
        self.bounds = np.cumsum([0, *sizes])
        self.dtype = dtype

    @classmethod
    def of(cls, parts: Sequence[Column], shifts: Sequence[int] | None = None) -> "Joined":
        """Of parts that are there."""
        dtype = np.result_type(*(part.dtype for part in parts))
        return cls([len(part) for part in parts], dtype, parts.__getitem__, shifts)

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Ints:
        return np.asarray(self[:], dtype=dtype)

    def __getitem__(self, index: slice | int | Ints) -> Any:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step == 1:
                return self._stretch(begin, end)
            index = np.arange(begin, end, step)
        shape = np.shape(index)
        at = np.atleast_1d(np.asarray(index, dtype=np.int64))
        # As in numpy, -1 is the last one.
        at = np.where(at < 0, at + len(self), at)
        out = np.empty(at.shape, dtype=self.dtype)
        for i, here in self._places_by_part(at):
            out[here] = self._shifted(i, self.part(i)[at[here] - self.bounds[i]])
        # [()] makes a number of what has no dimension, as numpy does for a single index.
        return out.reshape(shape)[()]

    def _places_by_part(self, at: Ints) -> Iterator[tuple[int, Any]]:
        """(number of a part, which of the numbers `at` are in it)."""
        if not at.size:
            return
        first, last = self._part_of([at.min(), at.max()]).tolist()
        if first == last:
            # Often, since neighbours are looked up together.
            yield first, slice(None)
            return
        part_of = self._part_of(at)
        for i in np.unique(part_of).tolist():
            yield i, part_of == i

    def _stretch(self, begin: int, end: int) -> Ints:
        """The numbers [begin, end)."""
        pieces = [np.empty(0, dtype=self.dtype)]
        while begin < end:
            i = int(self._part_of(begin))
            before = int(self.bounds[i])
            until = min(end, int(self.bounds[i + 1]))
            pieces.append(self._shifted(i, self.part(i)[begin - before : until - before]))
            begin = until
        # A stretch within one part is not copied.
        return pieces[1] if len(pieces) == 2 else np.concatenate(pieces)

    def _part_of(self, at: "int | Ints | list[int]") -> Any:
        """The number of the part that each number is in."""
        return np.searchsorted(self.bounds, at, side="right") - 1

    def _shifted(self, i: int, numbers: Ints) -> Ints:
        shift = self.shifts[i]
        return np.asarray(numbers, dtype=self.dtype) + np.asarray(shift, dtype=self.dtype) if shift else numbers
