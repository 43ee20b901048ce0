"""Mixes sources in given shares: the documents taken from each, the number of passes, and the order of all rows.

Each source is packed into rows separately, and the rows of all sources are merged so that each has given its share at
every moment, to within about a row. A row is identified by its number in the plan, as without shares, so ranks, batch
sizes and a resume need nothing else.

How much is planned as one. If all shares are constant and no source may be repeated, each epoch is a plan: the largest
in which no document comes twice and the shares hold. It uses up the source that is scarcest relative to its share; the
others cycle through a fixed random order of their documents, and an epoch continues where the last one stopped. If a
share changes, or a source may be repeated, the whole run is one plan. Past its planned end the last shares continue, in
further parts of as many rows.

How the order is made. The area under a share's curve over the progress of the run, times the *speed* (the tokens that
the run trains while its progress goes from 0 to 1), is the number of tokens that the source has given by then. The
inverse assigns a moment to the middle token of each row. All rows are sorted by their moments.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np

from common.errors import DataError
from dataset.arrays import Ints
from dataset.packing import PiecesOfRows, RowPlan, permutation
from dataset.shares import MAX_REPEATS, Curve, Point, Source
from dataset.store.token_store import Documents

# Separates the random numbers of the mixture from those of the plans: "mix" in ASCII.
MIXTURE_STREAM = 0x6D6978
# Cached plans per source: batches are prefetched from the next pass while the current one gives totals of updates.
KEPT_PLANS = 2
# fraction of a run, past its end, for which rows are laid out at first
MARGIN = 0.02
# rounds of correcting a run's speed by its rows: exact to about a row
CORRECTIONS = 4

# (document numbers, what seeds the random numbers) -> plan
MakePlan = Callable[[Ints, int], RowPlan]


class SourceRows:
    """All rows of one source, pass after pass. plan_of_pass(n): the plan of pass n, None after the last one."""

    def __init__(self, plan_of_pass: Callable[[int], RowPlan | None]) -> None:
        self.plan = lru_cache(KEPT_PLANS)(plan_of_pass)
        first = self.plan(0)
        assert first is not None
        self.T = first.T
        self.pack = first.pack
        targets = first.row_targets(0, first.n_rows)
        # mean targets of a row
        self.mean = targets / max(first.n_rows, 1)
        # In conversations only answers are trained, so a row holds more tokens than targets.
        self.pairs_per_target = first.n_pairs / max(targets, 1)
        # per row of the laid-out passes: its targets, and the source's targets up to its middle, float64
        self.targets: Ints = np.empty(0, np.uint8)
        self.middles = np.empty(0)
        # rows before each of these passes, and in total
        self.rows_before = [0]
        # targets of all these rows
        self.laid_out = 0

    def lay_out(self, targets: float) -> None:
        """Lay out passes until the rows have this many targets, and a row more, or no pass is left."""
        of_passes = [self.targets]
        while self.laid_out <= targets + self.T:
            plan = self.plan(len(self.rows_before) - 1)
            if plan is None or not plan.n_rows:
                break
            of_passes.append(plan.targets)
            self.rows_before.append(self.rows_before[-1] + plan.n_rows)
            self.laid_out += plan.row_targets(0, plan.n_rows)
        if len(of_passes) > 1:
            self.targets = np.concatenate(of_passes)
            self.middles = np.cumsum(self.targets, dtype=np.int64) - self.targets / 2

    def pieces_of(self, number: int) -> PiecesOfRows:
        """The pieces of a row, see `RowPlan.pieces`. number: among all rows of the source."""
        number_of_pass = bisect_right(self.rows_before, number) - 1
        plan = self.plan(number_of_pass)
        assert plan is not None
        return plan.pieces([number - self.rows_before[number_of_pass]])


class MixedPlan(RowPlan):
    """The merged rows of several sources.

    offsets: of the joint store. source_of, number: each row's source, and its number among the rows of that source.
    """

    def __init__(self, offsets: Ints, sources: Sequence[SourceRows], source_of: Ints, number: Ints) -> None:
        self.offsets = offsets
        self.sources = sources
        self._source = source_of
        self._number = number
        self.n_rows = len(source_of)
        self.T = sources[0].T
        self.pack = sources[0].pack
        self.targets = np.empty(self.n_rows, dtype=np.min_scalar_type(self.T))
        pairs = 0.0
        for i, source in enumerate(sources):
            of_source = source.targets[number[source_of == i]]
            self.targets[source_of == i] = of_source
            pairs += source.pairs_per_target * int(of_source.sum(dtype=np.int64))
        self.n_pairs = round(pairs)
        self.fill = pairs / max(self.n_rows * self.T, 1)

    def pieces(self, rows: Sequence[int] | Ints) -> PiecesOfRows:
        nothing = np.empty(0, dtype=np.int64)
        # of each row, as its source gives them
        columns = [(nothing, nothing, nothing, nothing)]
        for row in rows:
            columns.append(self.sources[self._source[row]].pieces_of(int(self._number[row])))
        count, document, start, pairs = (np.concatenate(column) for column in zip(*columns, strict=True))
        return count, document, start, pairs

    def source_targets(self, rows: int) -> list[int]:
        counts = np.bincount(self._source[:rows], weights=self.targets[:rows], minlength=len(self.sources))
        return [round(count) for count in counts.tolist()]


class Mixture:
    """Plans the rows of sources with shares.

    A share counts trained tokens (targets): a document of n tokens has n - 1, since BOS is never predicted.

    sources: all with shares. documents: ascending numbers in `store`. bounds: documents of the store before each
    source, and in total. make_plan: see MakePlan. targets: int [documents of the store], the trained tokens of each.
    n_rows: planned rows of the run, which may need more than the sources have (see `repeats_beyond_limit`); 0: `epochs` decides.
    Errors: DataError for a source without documents, and for a run of too many passes.
    """

    def __init__(
        self,
        store: Documents,
        sources: Sequence[Source],
        documents: Ints,
        bounds: Sequence[int] | Ints,
        make_plan: MakePlan,
        targets: Ints,
        seed: int,
        epochs: int,
        n_rows: int,
    ) -> None:
        assert len(sources) == len(bounds) - 1 < 1 << 16, "the number of a source has 16 bits"
        self.store = store
        self.sources = sources
        cuts = np.searchsorted(documents, bounds).tolist()
        # per source
        self.documents = [documents[first:end] for first, end in pairwise(cuts)]
        self.make_plan = make_plan
        self.seed = seed
        self.epochs = 0 if n_rows else epochs
        self.n_rows = n_rows
        self.document_targets = targets
        total = sum(float(Curve(source.shares or ()).area(1.0)) for source in sources)
        # the shares, normalised to sum to 1
        self.curves = [Curve([Point(at, share / total) for at, share in source.shares or ()]) for source in sources]
        # fraction of a plan's trained tokens per source
        self.shares = [float(curve.area(1.0)) for curve in self.curves]
        # targets of a full pass per source
        self.pass_targets = [int(targets[chosen].sum(dtype=np.int64)) for chosen in self.documents]
        for source, full in zip(sources, self.pass_targets, strict=True):
            if not full:
                raise DataError(
                    f"{source.name} has a share but no document to draw: all are empty, held out, or copies of earlier ones"
                )
        self.shares_change = any(source.shares_change for source in sources)
        # True: the whole run is one plan; False: each epoch is one.
        self.is_one_plan = self.shares_change or any(source.repeat != 1 for source in sources)
        if not self.is_one_plan:
            return
        if n_rows:
            self.rows = [SourceRows(partial(self._pass, i, math.inf)) for i in range(len(sources))]
            n_targets = n_rows / sum(share / source.mean for share, source in zip(self.shares, self.rows, strict=True))
            wanted = [share * n_targets for share in self.shares]
        else:
            # The longest run that repeats no source more than allowed.
            quotas = self._quotas([source.repeat * epochs for source in sources])
            self.rows = [SourceRows(partial(self._pass, i, quota)) for i, quota in enumerate(quotas)]
            wanted = [float(quota) for quota in quotas]
        for source, full, tokens in zip(sources, self.pass_targets, wanted, strict=True):
            if tokens / full > MAX_REPEATS:
                raise DataError(
                    f"the run takes about {tokens / full:,.0f} passes over {source.name}, and at most "
                    f"{MAX_REPEATS:,} are possible: train less, or add text"
                )
        if n_rows:
            self.speed = self._speed()

    def _quotas(self, passes: Sequence[float]) -> list[int]:
        """Targets of each source in the largest plan with the shares. passes: upper bound per source."""
        limits = [full * times for full, times in zip(self.pass_targets, passes, strict=True)]
        size = min(of_source / share for of_source, share in zip(limits, self.shares, strict=True))
        # Rounding can put the scarcest source slightly above what it has.
        return [max(1, min(int(limit), round(size * share))) for limit, share in zip(limits, self.shares, strict=True)]

    def _pass(self, i: int, wanted: float, number: int) -> RowPlan | None:
        """The plan of a pass over a source; None if the passes before it have the `wanted` targets."""
        left = wanted - number * self.pass_targets[i]
        if left <= 0:
            return None
        chosen = self.documents[i] if left >= self.pass_targets[i] else self._arc(i, 0, round(left))
        return self.make_plan(chosen, self._stream(i, number))

    def _stream(self, i: int, number: int) -> int:
        return number * len(self.sources) + i

    def _arc(self, i: int, begin: int, length: int) -> Ints:
        """The documents of a source are on a circle in random order, each as long as its targets. Returns the numbers
        of those whose first target is in an arc of the circle, ascending."""
        # The circle is the same in every epoch, so its random numbers depend on the seed and the source alone.
        bits = np.random.PCG64([self.seed, MIXTURE_STREAM, i])
        order = self.documents[i][permutation(bits, len(self.documents[i]))]
        targets = self.document_targets[order]
        # Rotated so that the arc starts at 0. numpy's remainder of a negative number is positive, as Python's.
        firsts = np.cumsum(targets, dtype=np.int64) - targets - begin
        return np.sort(order[firsts % self.pass_targets[i] < length])

    def plan(self, epoch: int) -> MixedPlan:
        """The rows of an epoch. If the run is one plan, epoch 0 has all of it, and later ones the rows past its planned end."""
        if self.is_one_plan:
            return self._rows_of_run(epoch) if self.n_rows else self._merged(self.rows)
        rows = []
        for i, quota in enumerate(self._quotas([1.0] * len(self.sources))):
            plan = self.make_plan(self._arc(i, epoch * quota, quota), self._stream(i, epoch))
            rows.append(SourceRows({0: plan}.get))
        return self._merged(rows)

    def _merged(self, rows: Sequence[SourceRows]) -> MixedPlan:
        """All rows of all sources. Each source is spread over the whole plan; whole documents make it a little more or
        less than its share."""
        moments = []
        for source, curve, share in zip(rows, self.curves, self.shares, strict=True):
            source.lay_out(math.inf)
            moments.append(curve.where(source.middles / max(source.laid_out, 1) * share))
        return MixedPlan(self.store.offsets, rows, *sorted_by_moment(moments))

    def _speed(self) -> float:
        """Tokens that a run of n_rows rows trains while its progress goes from 0 to 1."""
        # Estimated from the mean row of each source's first pass, then corrected by the actual rows.
        n_rows = sum(share / source.mean for share, source in zip(self.shares, self.rows, strict=True))
        speed = 1.0
        for _ in range(CORRECTIONS):
            # With few rows of many sources none may reach its middle: then half of them count, and the speed is doubled.
            speed *= self.n_rows / (n_rows or self.n_rows / 2)
            n_rows = 0
            for source, share in zip(self.rows, self.shares, strict=True):
                source.lay_out(share * speed)
                n_rows += int(np.searchsorted(source.middles, share * speed))
        return speed

    def _rows_of_run(self, part: int) -> MixedPlan:
        """Part 0: the n_rows planned rows. Later parts: as many rows each, after them."""
        end = (part + 1) * self.n_rows
        horizon = (part + 1) * (1 + MARGIN)
        while True:
            moments = []
            for source, curve in zip(self.rows, self.curves, strict=True):
                source.lay_out(float(curve.area(horizon)) * self.speed)
                moments.append(curve.where(source.middles / self.speed))
            # `end` rows must come before any row that is not laid out yet.
            if sum(int((of_source <= horizon).sum()) for of_source in moments) >= end:
                break
            horizon *= 2
        source_of, number = sorted_by_moment(moments)
        rows = slice(end - self.n_rows, end)
        return MixedPlan(self.store.offsets, self.rows, source_of[rows], number[rows])

    def repeats_beyond_limit(self, plan: RowPlan) -> str:
        """Describes sources that the planned run repeats more than allowed; "": none. plan: of epoch 0."""
        excesses = []
        of_run = plan.source_targets(plan.n_rows)
        for source, full, targets in zip(self.sources, self.pass_targets, of_run, strict=True):
            passes = targets / full
            if passes > source.repeat:
                needed = f"{source.name} needs {passes:,.2f} passes"
                excesses.append(f"{needed} and is allowed {source.repeat:g} (x{math.ceil(passes)} is enough)")
        return "; ".join(excesses)

    def trained_before(self, epoch: int) -> list[int]:
        """Targets of each source in all epochs before this one."""
        targets = np.zeros(len(self.sources), np.int64)
        if self.is_one_plan:
            # Only a run that continues past its planned end has more than one.
            for earlier in range(epoch):
                plan = self.plan(earlier)
                targets += plan.source_targets(plan.n_rows)
            return targets.tolist()
        # The arcs of consecutive epochs adjoin: together they are one arc, several times around.
        for i, quota in enumerate(self._quotas([1.0] * len(self.sources))):
            rounds, rest = divmod(epoch * quota, self.pass_targets[i])
            in_rest = self.document_targets[self._arc(i, 0, rest)].sum(dtype=np.int64)
            targets[i] = rounds * self.pass_targets[i] + in_rest
        return targets.tolist()

    def layout(self) -> dict[str, object]:
        """Settings that a resume must not change."""
        shares = [[list(point) for point in curve.points] for curve in self.curves]
        layout: dict[str, object] = {"shares": shares, "repeats": [source.repeat for source in self.sources]}
        if self.is_one_plan:
            layout["epochs"] = self.epochs
        return layout


def sorted_by_moment(moments: Sequence[np.ndarray]) -> tuple[Ints, Ints]:
    """(source, uint16; number among the rows of that source, uint32) of all rows, sorted by moment.

    moments: of each source's rows.
    """
    rows_of_source = [len(of_source) for of_source in moments]
    source = np.repeat(np.arange(len(moments), dtype=np.uint16), rows_of_source)
    number = np.concatenate([np.arange(rows, dtype=np.uint32) for rows in rows_of_source])
    # Stable: rows of one moment come in the order of the sources. Rounded, since the last bits of a moment may differ
    # between processors, and sources of equal shares have many moments in common.
    order = np.argsort(np.round(np.concatenate(moments), 12), kind="stable")
    return source[order], number[order]
