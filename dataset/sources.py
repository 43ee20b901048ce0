"""Several token stores as one, the share that each gets of an epoch, and the documents that are kept for validation."""

import hashlib
from typing import NamedTuple

import numpy as np

from dataset.packing import chunks, permutation

MIXTURE_STREAM = 0x6D6978  # keeps the random numbers of the mixture apart from those of the plans


class _Joined:
    """Read-only 1-d arrays end to end as one, without a copy. Takes slices, int arrays and ints as numpy does."""

    def __init__(self, parts, shifts=None):
        self.parts, self.shifts = parts, shifts or [0] * len(parts)
        self.bounds = np.cumsum([0] + [len(part) for part in parts])

    def __len__(self):
        return int(self.bounds[-1])

    def __getitem__(self, index):
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        shape = np.shape(index)
        index = np.atleast_1d(np.asarray(index, dtype=np.int64))
        index = np.where(index < 0, index + len(self), index)
        out = np.empty(index.shape, dtype=np.result_type(*(part.dtype for part in self.parts)))
        part_of = np.searchsorted(self.bounds, index, side="right") - 1
        for i in np.unique(part_of):
            here = part_of == i
            out[here] = self.parts[i][index[here] - self.bounds[i]] + np.asarray(self.shifts[i], dtype=out.dtype)
        return out.reshape(shape)[()]


class ConcatStore:
    """Token stores one after the other under the interface of one; documents and tokens are numbered through."""

    def __init__(self, stores):
        self.stores = stores
        self.bounds = np.cumsum([0] + [len(store.offsets) - 1 for store in stores])  # documents before each store
        base = np.cumsum([0] + [int(store.offsets[-1]) for store in stores])
        self.tokens = _Joined([store.tokens for store in stores])
        self.offsets = _Joined([store.offsets[:-1] for store in stores[:-1]] + [stores[-1].offsets], base[:-1].tolist())
        self.text_bytes = _Joined([store.text_bytes for store in stores])
        self.doc_hash = _Joined([store.doc_hash for store in stores])
        self.fingerprint = hashlib.sha256(" ".join(store.fingerprint for store in stores).encode()).hexdigest()

    def __len__(self):
        return int(self.bounds[-1])

    def __reduce__(self):  # a store knows how it gets to a worker process without its arrays
        return ConcatStore, (self.stores,)


def split_by_hash(store, fraction):
    """(training, validation): the document numbers of each side, uint32, ascending.

    A document is held out iff its hash lies in the lowest `fraction` of all hashes: whatever the order of the file
    and whatever is added to it, the same documents stay out, and copies of one text stay together.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the validation fraction must be at least 0 and below 1, not {fraction}")
    threshold = np.uint64(int(fraction * 2**64))
    sides = ([], [])
    for lo, hi in chunks(len(store)):
        held_out = np.asarray(store.doc_hash[lo:hi]) < threshold
        for side, mask in zip(sides, (~held_out, held_out), strict=True):
            side.append((np.flatnonzero(mask) + lo).astype(np.uint32))
    return tuple(np.concatenate([np.empty(0, np.uint32), *side]) for side in sides)


def text_bytes(store, documents):
    """UTF-8 bytes of the texts of the given documents."""
    parts = (store.text_bytes[documents[lo:hi]] for lo, hi in chunks(len(documents)))
    return sum(int(part.sum(dtype=np.int64)) for part in parts)


class Share(NamedTuple):
    """What one source gives to an epoch."""

    asked: float  # of the trained tokens (targets) of the epoch
    drawn: float
    documents: int
    targets: int
    used: float  # targets drawn / targets that the source has


class Mixture:
    """Draws each epoch's documents from several sources so that their trained tokens stand as the weights do.

    A document of n tokens has n - 1 targets: its first token, BOS, is never predicted. So a source of short documents
    has fewer targets than its tokens suggest, and targets are what a share counts.
    An epoch is the largest set in which no document comes twice: N = min over the sources of targets / weight; the
    source that sets N is used up, the others give weight · N targets. Each source goes round a fixed random order of
    its documents, and an epoch goes on where the last one stopped, so unseen documents come next and all are seen
    equally often.

    store: ConcatStore. weights: one positive number per source, in any scale. documents: ascending numbers to draw
    from (training side of a split), default all. max_targets: a document counts for at most so many (truncated
    documents).
    """

    def __init__(self, store, weights, seed, documents=None, max_targets=None):
        if len(weights) != len(store.stores) or not all(0 < weight < np.inf for weight in weights):
            raise ValueError(
                f"each of the {len(store.stores)} data sources needs a weight above 0, not {list(weights)}"
            )
        self.store, self.seed, self.max_targets = store, seed, max_targets
        self.documents = np.arange(len(store), dtype=np.uint32) if documents is None else documents
        self.cuts = np.searchsorted(self.documents, store.bounds)  # where each source begins in `documents`
        self.asked = np.asarray(weights, dtype=np.float64) / sum(weights)
        self.targets = [self._sum(self._of_source(i)) for i in range(len(weights))]
        for i, targets in enumerate(self.targets):
            if not targets:
                raise ValueError(f"data source {i + 1} has a weight but no document to draw")
        size = min(targets / share for targets, share in zip(self.targets, self.asked, strict=True))
        self.quotas = [
            min(targets, round(size * share)) for targets, share in zip(self.targets, self.asked, strict=True)
        ]

    def _of_source(self, i):
        return self.documents[self.cuts[i] : self.cuts[i + 1]]

    def _targets(self, documents):
        """Targets of each of the given documents."""
        at = np.asarray(documents, dtype=np.int64)
        lengths = np.asarray(self.store.offsets[at + 1]) - np.asarray(self.store.offsets[at])
        targets = np.maximum(lengths - 1, 0)
        return targets if self.max_targets is None else np.minimum(targets, self.max_targets)

    def _sum(self, documents):
        return sum(int(self._targets(documents[lo:hi]).sum()) for lo, hi in chunks(len(documents)))

    def epoch_documents(self, epoch):
        """The numbers of the documents of an epoch, uint32, ascending."""
        drawn = []
        for i, (all_targets, quota) in enumerate(zip(self.targets, self.quotas, strict=True)):
            order = self._of_source(i)
            order = order[permutation(np.random.PCG64([self.seed, MIXTURE_STREAM, i]), len(order))]
            chosen, at = np.empty(len(order), dtype=bool), -epoch * quota
            for lo, hi in chunks(len(order)):
                targets = self._targets(order[lo:hi])
                ends = at + np.cumsum(targets)
                # A document belongs to the epoch in which its first target is reached, going round and round.
                chosen[lo:hi] = (ends - targets) % all_targets < quota
                at = int(ends[-1])
            drawn.append(np.sort(order[chosen]))
        return np.concatenate(drawn)

    def report(self, documents):
        """[Share] of each source in the documents of an epoch."""
        cuts = np.searchsorted(documents, self.store.bounds)
        targets = [self._sum(documents[lo:hi]) for lo, hi in zip(cuts[:-1], cuts[1:], strict=True)]
        return [
            Share(float(asked), n / max(sum(targets), 1), int(hi - lo), n, n / has)
            for asked, n, has, lo, hi in zip(self.asked, targets, self.targets, cuts[:-1], cuts[1:], strict=True)
        ]
