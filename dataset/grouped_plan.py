"""The rows of an epoch of a corpus that is too large to be planned at once.

An EpochPlan holds about 14 bytes a document, on every rank: for a billion documents that would be 14 GB. So a large corpus is
divided into *groups* of documents. An epoch takes one group after the other, and each is planned when its turn comes. Rows are
numbered through the whole epoch, so a position is still one number. What must be known beforehand is how many rows and targets
each group has, and that takes no plan: `best_fit` asks for the number of pieces of each length, and nothing else.

Which documents make a group. Files are often sorted: by source, by topic, by date. If a group were neighbours, a run would
train one topic for hours. So the corpus is cut into *stretches* of neighbouring documents, and of every G stretches that follow
each other each of the G groups gets one, in random order. With G = 3:

    stretches   0 1 2 | 3 4 5 | 6 7
    group       1 0 2 | 2 0 1 | 0 1

Of a store of shards (dataset/store/sharded.py) each shard is a stretch. So a group needs few of the shards, and how many
pieces of each length they have stands in the store: none is opened to divide an epoch.

That makes each group a sample of the whole corpus. It follows from the seed and stays the same in all epochs. What changes with
the epoch is the order of the groups, and all that an EpochPlan draws within each.

A corpus that is small enough is one group, and its plan is an EpochPlan.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dataset.best_fit import best_fit, rows_of
from dataset.packing import Cut, EpochPlan, PiecesOfRows, RowPlan, Totals, merged, pairs_of, permutation
from dataset.store.interface import HasOffsets, Ints
from dataset.store.sharded import ShardedStore

# Pieces of a group, at most or little more: they decide on the memory that a plan takes.
GROUP_PIECES = 1 << 23
# A stretch has at most so many documents and tokens, or one document.
STRETCH_DOCUMENTS = 1 << 18
STRETCH_TOKENS = 1 << 28
# Plans that are kept. Batches are made ahead: they may come from the next group while totals are asked of this one.
KEPT_GROUPS = 2
# Keeps the random numbers of the groups apart from those of the plans: "grou" in ASCII.
GROUP_STREAM = 0x67726F75


class SizeOfGroup(NamedTuple):
    """What is known of a group without its plan. pairs: positions that hold a token."""

    rows: int
    pairs: int
    totals: Totals


class Stretch(NamedTuple):
    """The documents [lo, hi) of a selection. counts: of their pieces, by length. answers: their trained targets."""

    lo: int
    hi: int
    counts: Ints
    answers: int


class Groups:
    """The documents of a run, in as many groups as it takes to plan them one at a time.

    All arguments are those of EpochPlan. Where there are several groups, all lengths are read once when the first plan is made,
    unless the store has counted them.
    """

    def __init__(
        self,
        store: HasOffsets,
        max_seq_len: int,
        seed: int,
        pack: bool = True,
        long_documents: str = "split",
        documents: Ints | None = None,
        trained: Ints | None = None,
    ) -> None:
        self.store = store
        self.max_seq_len = max_seq_len
        self.seed = seed
        self.pack = pack
        self.long_documents = long_documents
        self.documents = documents
        self.trained = trained
        self.cut = Cut(max_seq_len, pack, long_documents)
        self.n_documents = len(store.offsets) - 1 if documents is None else len(documents)
        self.n_groups = self._how_many()
        # Of each group: the stretches [lo, hi) of the selection, and its size.
        self._stretches: list[list[tuple[int, int]]] = []
        # Of each group: the numbers of its stretches in the corpus.
        self._numbers_of_stretches: list[list[int]] = []
        self._sizes: list[SizeOfGroup] = []

    def _how_many(self) -> int:
        """Follows from numbers that are known without reading any length."""
        # A document has one piece, and one more for each row that it fills.
        pieces = self.n_documents
        if self.cut.split:
            tokens = len(self.store.tokens) if isinstance(self.store, ShardedStore) else int(self.store.offsets[-1])
            pieces += tokens // self.cut.limit
        wanted = -(-pieces // GROUP_PIECES)
        # Each group gets at least one stretch.
        most = -(-self.n_documents // STRETCH_DOCUMENTS)
        if isinstance(self.store, ShardedStore):
            most = len(self.store.shards)
        return max(1, min(wanted, most))

    def rule(self) -> list[int]:
        """What decides, beside the documents, the seed and the rows, which document comes when."""
        rule = [GROUP_PIECES, STRETCH_DOCUMENTS, STRETCH_TOKENS]
        if isinstance(self.store, ShardedStore):
            rule += [len(self.store.shards)]
        return rule

    def plan(self, epoch: int) -> RowPlan:
        """The rows of an epoch."""
        if self.n_groups == 1:
            if isinstance(self.store, ShardedStore):
                self.store.expect(range(len(self.store.shards)))
            return self._epoch_plan(epoch, self.documents, None)
        return GroupedPlan(self, epoch)

    def expect(self, now: int, soon: int | None) -> None:
        """The documents of a group are trained, and those of another one after them."""
        if isinstance(self.store, ShardedStore):
            self.store.expect(self._shards_of_group(now), [] if soon is None else self._shards_of_group(soon))

    def _shards_of_group(self, group: int) -> list[int]:
        """Their numbers: each is a stretch."""
        self.sizes()
        return self._numbers_of_stretches[group]

    def plan_of_group(self, group: int, epoch: int) -> EpochPlan:
        """The rows that a group has in an epoch."""
        plan = self._epoch_plan(epoch, self.documents_of_group(group), group)
        assert plan.n_rows == self.sizes()[group].rows, "the rows of an epoch are numbered by these sizes"
        return plan

    def _epoch_plan(self, epoch: int, documents: Ints | None, group: int | None) -> EpochPlan:
        return EpochPlan(
            self.store,
            self.max_seq_len,
            self.seed,
            epoch,
            self.pack,
            self.long_documents,
            documents,
            trained=self.trained,
            group=group,
        )

    def documents_of_group(self, group: int) -> Ints:
        """Their numbers in the store, ascending where those of the selection are."""
        self.sizes()
        # Half the memory where the numbers are small enough, as nearly always.
        dtype = np.uint32 if len(self.store.offsets) <= 1 << 32 else np.int64
        return np.concatenate([self._numbers(lo, hi).astype(dtype) for lo, hi in self._stretches[group]])

    def _numbers(self, lo: int, hi: int) -> Ints:
        """Of the documents [lo, hi) of the selection."""
        return np.arange(lo, hi) if self.documents is None else self.documents[lo:hi]

    def sizes(self) -> Sequence[SizeOfGroup]:
        """Of each group."""
        if not self._sizes:
            self._divide()
        return self._sizes

    def _divide(self) -> None:
        """Read the lengths of all documents, and deal the stretches out."""
        self._stretches = [[] for _ in range(self.n_groups)]
        self._numbers_of_stretches = [[] for _ in range(self.n_groups)]
        counts = np.zeros((self.n_groups, self.cut.T + 1), dtype=np.int64)
        answers = [0] * self.n_groups
        turns = self._turns()
        for number, stretch in enumerate(self._cut_into_stretches()):
            group = next(turns)
            self._numbers_of_stretches[group].append(number)
            self._stretches[group].append((stretch.lo, stretch.hi))
            counts[group] += stretch.counts
            answers[group] += stretch.answers
        for of_group, of_answers in zip(counts, answers, strict=True):
            pieces = int(of_group.sum())
            pairs_of_group = int(of_group @ np.arange(self.cut.T + 1))
            n_rows = rows_of(best_fit(of_group, self.cut.T)[1]) if self.pack else pieces
            targets = pairs_of_group if self.trained is None else of_answers
            self._sizes.append(SizeOfGroup(n_rows, pairs_of_group, Totals(targets, pieces)))

    def _turns(self) -> Iterator[int]:
        """The group of each stretch."""
        bits = np.random.PCG64([self.seed, GROUP_STREAM])
        while True:
            yield from permutation(bits, self.n_groups).tolist()

    def _cut_into_stretches(self) -> Iterator[Stretch]:
        """All documents of the selection."""
        if isinstance(self.store, ShardedStore):
            yield from self._shards(self.store)
            return
        for first in range(0, self.n_documents, STRETCH_DOCUMENTS):
            end = min(first + STRETCH_DOCUMENTS, self.n_documents)
            pairs = pairs_of(self.store.offsets, self.documents, first, end)
            tokens_until = np.append(0, np.cumsum(pairs + 1))
            lo = 0
            while lo < len(pairs):
                most = tokens_until[lo] + STRETCH_TOKENS
                hi = max(int(np.searchsorted(tokens_until, most, side="right")) - 1, lo + 1)
                yield self._stretch(first + lo, first + hi, pairs[lo:hi])
                lo = hi

    def _shards(self, store: ShardedStore) -> Iterator[Stretch]:
        """What is selected of each shard."""
        if self.documents is None and self.trained is None:
            for number, (lo, hi) in enumerate(pairwise(store.bounds.tolist())):
                tokens, documents = store.lengths_of_shard(number)
                yield Stretch(lo, hi, self.cut.counts(tokens - 1, documents), 0)
            return
        bounds = store.bounds if self.documents is None else np.searchsorted(self.documents, store.bounds)
        for lo, hi in pairwise(bounds.tolist()):
            yield self._stretch(lo, hi, pairs_of(store.offsets, self.documents, lo, hi))

    def _stretch(self, lo: int, hi: int, pairs: Ints) -> Stretch:
        """pairs: of each of the documents [lo, hi) of the selection."""
        answers = 0
        if self.trained is not None:
            answers = int(self.trained[self._numbers(lo, hi)[pairs > 0]].sum(dtype=np.int64))
        return Stretch(lo, hi, self.cut.counts(pairs), answers)


class GroupedPlan(RowPlan):
    """The rows of an epoch, group after group. Holds the plans of KEPT_GROUPS groups, made when they are asked for."""

    def __init__(self, groups: Groups, epoch: int) -> None:
        self.groups = groups
        self.epoch = epoch
        self.offsets = groups.store.offsets
        self.T = groups.cut.T
        self.pack = groups.pack
        # The group that comes first, the one that comes second, and so on.
        self._order = permutation(np.random.PCG64([groups.seed, epoch, GROUP_STREAM]), groups.n_groups).tolist()
        sizes = groups.sizes()
        self._sizes = [sizes[group] for group in self._order]
        # int64 [groups + 1]: rows before each group of this order, and in all.
        self._rows_before = np.cumsum([0] + [size.rows for size in self._sizes])
        self.n_rows = int(self._rows_before[-1])
        self.fill = sum(size.pairs for size in sizes) / max(self.n_rows * self.T, 1)
        # By place in the order, the one that was used last at the end.
        self._plans: dict[int, EpochPlan] = {}

    def _plan(self, place: int) -> EpochPlan:
        """Of the group at a place of the order."""
        plan = self._plans.pop(place, None)
        if plan is None:
            # Let go of one before the next one is made.
            while len(self._plans) >= KEPT_GROUPS:
                del self._plans[next(iter(self._plans))]
            self.groups.expect(self._order[place], None)
            plan = self.groups.plan_of_group(self._order[place], self.epoch)
            if place + 1 < len(self._order):
                self.groups.expect(self._order[place], self._order[place + 1])
        self._plans[place] = plan
        return plan

    def _parts(self, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
        """(place, first, end): the rows [first, end) of the group at a place, for all rows [lo, hi) of the epoch."""
        for place, size in enumerate(self._sizes):
            before = int(self._rows_before[place])
            first = max(lo - before, 0)
            end = min(hi - before, size.rows)
            if first < end:
                yield place, first, end

    def totals(self, lo: int, hi: int) -> Totals:
        targets = 0
        documents = 0
        for place, first, end in self._parts(lo, hi):
            size = self._sizes[place]
            # Those of whole groups are known. So the totals of an epoch take no plan.
            is_whole = end - first == size.rows
            totals = size.totals if is_whole else self._plan(place).totals(first, end)
            targets += totals.targets
            documents += totals.documents
        return Totals(targets, documents)

    def row_targets(self, lo: int, hi: int) -> int:
        return self.totals(lo, hi).targets

    def row_documents(self, lo: int, hi: int) -> int:
        return self.totals(lo, hi).documents

    def targets_of_rows(self) -> Ints:
        return np.concatenate([self._plan(place).targets_of_rows() for place in range(len(self._order))])

    def pieces(self, rows: Sequence[int] | Ints) -> PiecesOfRows:
        rows = np.asarray(rows, dtype=np.int64)
        place_of = np.searchsorted(self._rows_before, rows, side="right") - 1
        parts = []
        for place in np.unique(place_of).tolist():
            inside = np.flatnonzero(place_of == place)
            parts.append((inside, self._plan(place).pieces(rows[inside] - self._rows_before[place])))
        return merged(len(rows), parts)
