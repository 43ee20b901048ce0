"""Several token stores as one."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dataset.store.format import TokenStore
from dataset.store.interface import Ints


class Joined:
    """Read-only 1-d arrays end to end as one, without a copy. Takes slices, int arrays and ints as numpy does.

    shifts: what is added to the numbers of each part, default 0. Stores are mapped files of many gigabytes, so they cannot be
    copied into one array. Each number of an index is looked up in its own part instead.
    """

    def __init__(self, parts: Sequence[Ints], shifts: Sequence[int] | None = None) -> None:
        self.parts = parts
        self.shifts = shifts or [0] * len(parts)
        self.bounds = np.cumsum([0] + [len(part) for part in parts])
        self.dtype = np.result_type(*(part.dtype for part in parts))

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Ints:
        return np.asarray(self[:], dtype=dtype)

    def __getitem__(self, index: slice | int | Ints) -> Any:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            pieces = []
            for part, shift, before in zip(self.parts, self.shifts, self.bounds.tolist(), strict=False):
                # A piece of the stretch that the slice is cut from; none of the others.
                piece = part[max(begin - before, 0) : max(end - before, 0)]
                if len(piece):
                    pieces.append(self._shifted(piece, shift))
            if not pieces:
                return np.empty(0, self.dtype)
            # A stretch within one part is not copied.
            return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces))[::step]
        at = np.asarray(index, dtype=np.int64)
        # As in numpy, -1 is the last one.
        at = np.where(at < 0, at + len(self), at)
        part_of = np.searchsorted(self.bounds, at, side="right") - 1
        out = np.empty(at.shape, dtype=self.dtype)
        for i in np.unique(part_of).tolist():
            here = part_of == i
            out[here] = self._shifted(self.parts[i][at[here] - self.bounds[i]], self.shifts[i])
        # [()] makes a number of what has no dimension, as numpy does for a single index.
        return out[()]

    def _shifted(self, numbers: Ints, shift: int) -> Ints:
        return np.asarray(numbers, dtype=self.dtype) + np.asarray(shift, dtype=self.dtype) if shift else numbers


class ConcatStore:
    """Token stores one after the other under the interface of one; documents and tokens are numbered through."""

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        self.stores = stores
        # documents before each store, and in all
        self.bounds = np.cumsum([0] + [len(store) for store in stores])
        tokens_before = np.cumsum([0] + [len(store.tokens) for store in stores])
        self.tokens = Joined([store.tokens for store in stores])
        # The last offset of a store is the first one of the next: only the last store gives all of its own.
        offsets = [*(store.offsets[:-1] for store in stores[:-1]), stores[-1].offsets]
        self.offsets = Joined(offsets, tokens_before[:-1].tolist())
        self.text_bytes = Joined([store.text_bytes for store in stores])
        self.doc_hash = Joined([store.doc_hash for store in stores])
        self.fingerprint = hashlib.sha256(" ".join(store.fingerprint for store in stores).encode()).hexdigest()

    def __len__(self) -> int:
        return int(self.bounds[-1])

    @property
    def total_text_bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return sum(store.total_text_bytes for store in self.stores)

    def __reduce__(self) -> tuple[type["ConcatStore"], tuple[Sequence[TokenStore]]]:
        # A store knows how it gets to a worker process without its arrays.
        return ConcatStore, (self.stores,)
