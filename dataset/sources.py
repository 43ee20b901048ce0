"""Several token stores as one, the share that each gets of an epoch, and the documents that are kept for validation."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dataset.packing import chunks, number_type, permutation
from dataset.store.format import TokenStore
from dataset.store.interface import Documents, HasOffsets, Ints
from dataset.store.joined import Joined

# Keeps the random numbers of the mixture apart from those of the plans: "mix" in ASCII.
MIXTURE_STREAM = 0x6D6978


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


def split_by_hash(store: Documents, fraction: float) -> tuple[Ints, Ints]:
    """(training, validation): the document numbers of each side, ascending, 4 bytes each (8 beyond 2^32 documents).

    A document is held out iff its hash lies in the lowest `fraction` of all hashes: whatever the order of the file
    and whatever is added to it, the same documents stay out, and copies of one text stay together.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the validation fraction must be at least 0 and below 1, not {fraction}")
    # Hashes are uniform over all 64-bit numbers, so the share below this number is `fraction`, but for chance.
    threshold = np.uint64(int(fraction * 2**64))
    # A first part that is empty, so that a side without documents is an array too.
    dtype = number_type(len(store))
    training = [np.empty(0, dtype)]
    validation = [np.empty(0, dtype)]
    for lo, hi in chunks(len(store)):
        held_out = np.asarray(store.doc_hash[lo:hi]) < threshold
        training.append((np.flatnonzero(~held_out) + lo).astype(dtype))
        validation.append((np.flatnonzero(held_out) + lo).astype(dtype))
    return np.concatenate(training), np.concatenate(validation)


def all_documents(store: Documents) -> Ints:
    """Their numbers."""
    return np.arange(len(store), dtype=number_type(len(store)))


def text_bytes(store: Documents, documents: Ints) -> int:
    """UTF-8 bytes of the texts of the given documents."""
    total = 0
    for lo, hi in chunks(len(documents)):
        total += int(store.text_bytes[documents[lo:hi]].sum(dtype=np.int64))
    return total


# How many targets of a document count at most: the same for all, or int [documents of the store]; None: all of them.
MostTargets = int | Ints | None


def target_counts(store: HasOffsets, documents: Ints, most: MostTargets = None) -> Ints:
    """int64: the targets of each of the given documents: one less than its tokens, and at most so many."""
    at = np.asarray(documents, dtype=np.int64)
    lengths = np.asarray(store.offsets[at + 1]) - np.asarray(store.offsets[at])
    targets = np.maximum(lengths - 1, 0)
    if most is None:
        return targets
    return np.minimum(targets, most[at] if isinstance(most, np.ndarray) else most)


def sum_of_targets(store: HasOffsets, documents: Ints, most: MostTargets = None) -> int:
    """The targets of all the given documents together."""
    total = 0
    for lo, hi in chunks(len(documents)):
        total += int(target_counts(store, documents[lo:hi], most).sum())
    return total


class Circle(NamedTuple):
    """The documents of a source in a random order, each as long as it has targets.

    source: its number among the sources. max_targets: a document counts for at most so many; None: for all.
    """

    store: HasOffsets
    documents: Ints
    seed: int
    source: int
    max_targets: MostTargets

    def arc(self, begin: int, length: int, around: int) -> Ints:
        """The numbers of the documents whose first target lies in an arc, ascending. around: all targets of the circle."""
        # The circle is the same in every epoch, so its random numbers come from the seed and the source alone.
        bits = np.random.PCG64([self.seed, MIXTURE_STREAM, self.source])
        order = self.documents[permutation(bits, len(self.documents))]
        is_drawn = np.empty(len(order), dtype=bool)
        # Turned back, so that the arc begins at 0.
        at = -begin
        for lo, hi in chunks(len(order)):
            targets = target_counts(self.store, order[lo:hi], self.max_targets)
            ends = at + np.cumsum(targets)
            begins = ends - targets
            # The remainder of a negative number is positive here, as it is in Python.
            is_drawn[lo:hi] = begins % around < length
            at = int(ends[-1])
        return np.sort(order[is_drawn])


class Share(NamedTuple):
    """What one source gives to an epoch."""

    # Of the trained tokens (targets) of the epoch.
    asked: float
    drawn: float
    documents: int
    targets: int
    # Targets drawn / targets that the source has.
    used: float


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

    def __init__(
        self,
        store: ConcatStore,
        weights: Sequence[float],
        seed: int,
        documents: Ints | None = None,
        max_targets: MostTargets = None,
    ) -> None:
        if len(weights) != len(store.stores) or not all(0 < weight < np.inf for weight in weights):
            raise ValueError(
                f"each of the {len(store.stores)} data sources needs a weight above 0, not {list(weights)}"
            )
        self.store = store
        self.seed = seed
        self.max_targets = max_targets
        self.documents = all_documents(store) if documents is None else documents
        # Where each source begins in `documents`, and one more for the end: the numbers are ascending, so those of a source
        # stand together.
        self.cuts = np.searchsorted(self.documents, store.bounds)
        self.asked = np.asarray(weights, dtype=np.float64) / sum(weights)
        self.targets = [self._sum(self._of_source(i)) for i in range(len(weights))]
        for i, targets in enumerate(self.targets):
            if not targets:
                raise ValueError(f"data source {i + 1} has a weight but no document to draw")
        # Targets of an epoch: what the source that is scarcest, beside its share, allows.
        size = min(targets / share for targets, share in zip(self.targets, self.asked, strict=True))
        self.quotas = []
        # In floating point size · share of the scarcest source can come out a little above what it has.
        for targets, share in zip(self.targets, self.asked, strict=True):
            self.quotas.append(min(targets, round(size * share)))

    def _of_source(self, i: int) -> Ints:
        """The numbers of all documents of a source."""
        return self.documents[self.cuts[i] : self.cuts[i + 1]]

    def _sum(self, documents: Ints) -> int:
        return sum_of_targets(self.store, documents, self.max_targets)

    def epoch_documents(self, epoch: int) -> Ints:
        """The numbers of the documents of an epoch, uint32, ascending."""
        return np.concatenate([self._drawn(i, epoch) for i in range(len(self.quotas))])

    def _drawn(self, i: int, epoch: int) -> Ints:
        """What one source gives to an epoch, ascending: epoch 0 the arc from 0 to the quota, epoch 1 the next one of that
        length, and so on, round and round.
        """
        quota = self.quotas[i]
        circle = Circle(self.store, self._of_source(i), self.seed, i, self.max_targets)
        return circle.arc(epoch * quota, quota, self.targets[i])

    def report(self, documents: Ints) -> list[Share]:
        """[Share] of each source in the documents of an epoch."""
        cuts = np.searchsorted(documents, self.store.bounds).tolist()
        targets = []
        for first, end in zip(cuts[:-1], cuts[1:], strict=True):
            targets.append(self._sum(documents[first:end]))
        shares = []
        for i, drawn in enumerate(targets):
            shares.append(
                Share(
                    asked=float(self.asked[i]),
                    drawn=drawn / max(sum(targets), 1),
                    documents=cuts[i + 1] - cuts[i],
                    targets=drawn,
                    used=drawn / self.targets[i],
                )
            )
        return shares
