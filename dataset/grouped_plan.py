"""The rows of an epoch of a corpus that is too large to be planned at once.

An EpochPlan holds about 14 bytes a document, on every rank: for a billion documents that would be 14 GB. So a large corpus is
divided into *groups* of documents. An epoch takes one group after the other, and each is planned when its turn comes. Rows are
numbered through the whole epoch, so a position is still one number. What must be known beforehand is how many rows and targets
each group has, and that takes no plan: `best_fit` asks for the number of pieces of each length, and nothing else.

Which documents make a group. Files are often sorted: by source, by topic, by date. If a group were neighbours, a run would
train one topic for hours. So the corpus is cut into *stretches* of neighbouring documents, and of every G stretches that follow
each other each of the G groups gets one: the one with the most pieces goes to the group with the fewest so far, and chance
decides among equals. With G = 3 and stretches of one size:

    stretches   0 1 2 | 3 4 5 | 6 7
    group       1 0 2 | 2 0 1 | 0 1

So no two groups differ by more than the largest stretch, and no group has more pieces than GROUP_PIECES and a stretch. Of rows
of more than 512 positions so many pieces may be more than a disk has room for, where shards are fetched. So there are also as
many groups as it takes to have GROUP_TOKENS tokens in each.

Of a store of shards (dataset/store/sharded.py) each shard is a stretch, if it is no larger than one may be. So a group needs
few of the shards, and how many pieces of each length they have stands in the store: none is opened to divide an epoch.
Shards that lie elsewhere are fetched when the first batch of their group is asked for, and those of the next group while one
is trained.

A corpus that is small enough is one group, and its plan is an EpochPlan.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from common.arithmetic import ceil_div
from common.errors import DataError
from dataset.best_fit import best_fit, rows_of
from dataset.packing import Cut, EpochPlan, PiecesOfRows, RowPlan, Totals, merged, number_type, pairs_of, permutation
from dataset.sources import ConcatStore
from dataset.store.interface import HasOffsets, Ints
from dataset.store.sharded import ShardedStore

# Pieces of a group, at most or a stretch more: they decide on the memory that a plan takes.
GROUP_PIECES = 1 << 23
# Tokens of a group, about: 9 GB in 16 bits each. GROUP_PIECES pieces of up to 512 tokens have no more.
GROUP_TOKENS = 1 << 32
# A stretch has at most so many pieces, or one document. Where it is no shard, it has at most so many documents too.
STRETCH_PIECES = 1 << 20
STRETCH_DOCUMENTS = 1 << 18
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


# Stores that may be read from elsewhere, shard by shard.
HasShards = ShardedStore | ConcatStore


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
        self.n_groups = max(1, ceil_div(self._most_pieces(self.n_documents, self._n_tokens()), GROUP_PIECES))
        # What is planned at once needs no division, and earlier versions divided none of it.
        if self.n_groups > 1:
            self.n_groups = max(self.n_groups, ceil_div(self._n_tokens(), GROUP_TOKENS))
        # Of each group: the stretches [lo, hi) of the selection, and its size.
        self._stretches: list[list[tuple[int, int]]] = []
        self._sizes: list[SizeOfGroup] = []

    def _n_tokens(self) -> int:
        """Of the whole store, without reading any length."""
        return len(self.store.tokens) if isinstance(self.store, HasShards) else int(self.store.offsets[-1])

    def _most_pieces(self, documents: int, tokens: int) -> int:
        """How many pieces they can have: one a document, and one more for each row that a document fills."""
        return documents + (tokens // self.cut.limit if self.cut.split else 0)

    def rule(self) -> list[int]:
        """What decides, beside the documents, the seed and the rows, which document comes when."""
        rule = [GROUP_PIECES, STRETCH_PIECES, STRETCH_DOCUMENTS]
        if isinstance(self.store, ShardedStore):
            rule += [len(self.store.shards)]
        # Of these documents or of some of them, tokens may decide how many groups there are.
        fewest = ceil_div(ceil_div(self._n_tokens(), self.cut.limit), GROUP_PIECES) if self.cut.split else 1
        if ceil_div(self._n_tokens(), GROUP_TOKENS) > fewest:
            rule += [GROUP_TOKENS]
        return rule

    def plan(self, epoch: int) -> RowPlan:
        """The rows of an epoch. Errors: DataError where there is no room for a group that has to be fetched."""
        refuse_without_room([self])
        if self.n_groups == 1:
            self.fetch(0)
            return self._epoch_plan(epoch, self.documents, None)
        return GroupedPlan(self, epoch)

    def bytes_at_once(self) -> int:
        """What the largest group takes of the cache of what is fetched; 0 where nothing is."""
        store = self.store
        if not isinstance(store, HasShards):
            return 0
        return max(store.fetched_bytes(self._shards_of_group(group)) for group in range(self.n_groups))

    def fetch(self, group: int, then: int | None = None) -> None:
        """Wait until the documents of a group are on this machine, and begin to fetch those of the next one. Errors: DataError."""
        if isinstance(self.store, HasShards):
            self.store.fetch(self._shards_of_group(group))
            if then is not None:
                self.store.expect(self._shards_of_group(group), self._shards_of_group(then))

    def _shards_of_group(self, group: int) -> list[int]:
        """Their numbers."""
        if self.n_groups == 1:
            return self._shards_of([(0, self.n_documents)])
        self.sizes()
        return self._shards_of(self._stretches[group])

    def _shards_of(self, stretches: Sequence[tuple[int, int]]) -> list[int]:
        """The numbers of the shards that some stretches of the selection are in."""
        assert isinstance(self.store, HasShards)
        shards: set[int] = set()
        for lo, hi in stretches:
            # A stretch has neighbours, but a shard may have no document of the selection.
            if lo < hi:
                ends = [lo, hi - 1] if self.documents is None else self.documents[[lo, hi - 1]]
                first, last = (np.searchsorted(self.store.shard_bounds, ends, side="right") - 1).tolist()
                shards.update(range(first, last + 1))
        return sorted(shards)

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
        # A group of which no stretch was left has none.
        parts = [np.empty(0, number_type(len(self.store.offsets)))]
        for lo, hi in self._stretches[group]:
            parts.append(self._numbers(lo, hi).astype(parts[0].dtype))
        return np.concatenate(parts)

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
        counts = np.zeros((self.n_groups, self.cut.T + 1), dtype=np.int64)
        answers = [0] * self.n_groups
        for group, stretch in self._dealt():
            self._stretches[group].append((stretch.lo, stretch.hi))
            counts[group] += stretch.counts
            answers[group] += stretch.answers
        for of_group, of_answers in zip(counts, answers, strict=True):
            pieces = int(of_group.sum())
            pairs_of_group = int(of_group @ np.arange(self.cut.T + 1))
            n_rows = rows_of(best_fit(of_group, self.cut.T)[1]) if self.pack else pieces
            targets = pairs_of_group if self.trained is None else of_answers
            self._sizes.append(SizeOfGroup(n_rows, pairs_of_group, Totals(targets, pieces)))

    def _dealt(self) -> Iterator[tuple[int, Stretch]]:
        """Each stretch and its group, in the order of the corpus."""
        bits = np.random.PCG64([self.seed, GROUP_STREAM])
        # Pieces of each group so far.
        pieces = np.zeros(self.n_groups, dtype=np.int64)
        stretches = self._cut_into_stretches()
        while turn := list(islice(stretches, self.n_groups)):
            sizes = np.array([int(stretch.counts.sum()) for stretch in turn])
            # Stable: groups and stretches of one size stay in random order.
            chance = permutation(bits, self.n_groups)
            groups = chance[np.argsort(pieces[chance], kind="stable")][: len(turn)]
            largest_first = np.argsort(-sizes, kind="stable")
            group_of = np.empty(len(turn), dtype=np.int64)
            group_of[largest_first] = groups
            pieces[group_of] += sizes
            yield from zip(group_of.tolist(), turn, strict=True)

    def _cut_into_stretches(self) -> Iterator[Stretch]:
        """All documents of the selection."""
        store = self.store
        if not isinstance(store, ShardedStore):
            yield from self._cut(0, self.n_documents)
            return
        bounds = store.shard_bounds if self.documents is None else np.searchsorted(self.documents, store.shard_bounds)
        for number, (lo, hi) in enumerate(pairwise(bounds.tolist())):
            shard = store.shards[number]
            if self._most_pieces(shard.documents, shard.tokens) > STRETCH_PIECES:
                # A shard is as long as the file that it was made of, if that could not be cut.
                yield from self._cut(lo, hi)
            elif self.documents is None and self.trained is None:
                tokens, documents = store.lengths_of_shard(number)
                yield Stretch(lo, hi, self.cut.counts(tokens - 1, documents), 0)
            else:
                yield self._stretch(lo, hi, pairs_of(store.offsets, self.documents, lo, hi))

    def _cut(self, begin: int, end: int) -> Iterator[Stretch]:
        """The documents [begin, end) of the selection in stretches of bounded size."""
        for first in range(begin, end, STRETCH_DOCUMENTS):
            pairs = pairs_of(self.store.offsets, self.documents, first, min(first + STRETCH_DOCUMENTS, end))
            pieces_until = np.append(0, np.cumsum(self.cut.pieces_of(pairs)))
            lo = 0
            while lo < len(pairs):
                most = pieces_until[lo] + STRETCH_PIECES
                hi = max(int(np.searchsorted(pieces_until, most, side="right")) - 1, lo + 1)
                yield self._stretch(first + lo, first + hi, pairs[lo:hi])
                lo = hi

    def _stretch(self, lo: int, hi: int, pairs: Ints) -> Stretch:
        """pairs: of each of the documents [lo, hi) of the selection."""
        answers = 0
        if self.trained is not None:
            answers = int(self.trained[self._numbers(lo, hi)[pairs > 0]].sum(dtype=np.int64))
        return Stretch(lo, hi, self.cut.counts(pairs), answers)


def refuse_without_room(parts: Sequence[Groups]) -> None:
    """parts: divided each by itself; one group of each is trained at a time. Errors: DataError where these take more than the
    cache of what is fetched may have."""
    needed = sum(groups.bytes_at_once() for groups in parts)
    for groups in parts:
        if isinstance(groups.store, HasShards) and needed > groups.store.limit_bytes:
            raise DataError(
                f"--data_path: {needed / 1e9:.3g} GB from elsewhere are trained in random order at a time, where --cache_gb has "
                f"room for {groups.store.limit_bytes / 1e9:.3g}; raise it"
            )


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
        # The place whose documents are on this machine.
        self._fetched = -1

    def fetch(self, rows: Sequence[int] | Ints) -> None:
        for place in np.unique(self._places_of(np.asarray(rows, dtype=np.int64))).tolist():
            if place != self._fetched:
                # A group may have no rows.
                later = [i for i in range(place + 1, len(self._order)) if self._sizes[i].rows]
                self.groups.fetch(self._order[place], self._order[later[0]] if later else None)
                self._fetched = place

    def _plan(self, place: int) -> EpochPlan:
        """Of the group at a place of the order."""
        plan = self._plans.pop(place, None)
        if plan is None:
            # Let go of one before the next one is made.
            while len(self._plans) >= KEPT_GROUPS:
                del self._plans[next(iter(self._plans))]
            plan = self.groups.plan_of_group(self._order[place], self.epoch)
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
        targets = [self._plan(place).targets_of_rows() for place, size in enumerate(self._sizes) if size.rows]
        return np.concatenate(targets) if targets else np.empty(0, np.int64)

    def pieces(self, rows: Sequence[int] | Ints) -> PiecesOfRows:
        rows = np.asarray(rows, dtype=np.int64)
        place_of = self._places_of(rows)
        parts = []
        for place in np.unique(place_of).tolist():
            inside = np.flatnonzero(place_of == place)
            parts.append((inside, self._plan(place).pieces(rows[inside] - self._rows_before[place])))
        return merged(len(rows), parts)

    def _places_of(self, rows: Ints) -> Ints:
        """Of each row the place of its group in the order."""
        return np.searchsorted(self._rows_before, rows, side="right") - 1
