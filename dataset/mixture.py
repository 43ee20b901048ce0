"""Several sources in given shares: which documents each of them gives, how often, and the order of all rows.

Each source has rows of its own, and the rows of all sources are merged so that at every moment each has given what its share
asks for, to about a row. A row is known by its number in the plan, as without shares: so ranks, batch sizes and a resume need
nothing else.

How much is planned as one. Where every share stays as it is and no source may come several times, an epoch is a plan: the
largest in which no document comes twice and the shares hold. It uses the source up that is scarcest beside its share; each
other one goes round a fixed random order of its documents, and an epoch goes on where the last one stopped. A run has as many
epochs as its epochs, updates or budget ask for. Where a share changes, or a source may come several times, the whole run is
one plan. Such a run may go on behind the end that it was planned for: where the clock of a budget finds more time, or where
fixed shares are given more updates. Then the last shares go on, in further parts of as many rows.

How the order is made. A share over the progress of the run tells how many tokens a source has given at each moment: the area
under its curve, times the tokens that the run trains while its progress goes from 0 to 1, its *speed*. Turned round: the
middle token of a row belongs to a moment. All rows are sorted by their moments.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from common.errors import DataError
from dataset.packing import PiecesOfRows, RowPlan, permutation
from dataset.shares import MOST_REPEATS, Curve, Point, Source, name_of
from dataset.store.format import Documents, Ints

# Keeps the random numbers of the mixture apart from those of the plans: "mix" in ASCII.
MIXTURE_STREAM = 0x6D6978
# Plans of passes that a source keeps. While a batch is made ahead in the next pass, the totals of an update may be asked in
# this one.
KEPT_PLANS = 2
# How far beyond the end of a run its rows are laid out first
MARGIN = 0.02
# How often the speed of a run is corrected by the rows that it gives: to about a row.
CORRECTIONS = 4

# The plan of some documents: (their numbers, what it draws its random numbers by).
MakePlan = Callable[[Ints, int], RowPlan]


class SourceRows:
    """All rows of one source, pass after pass. make_plan(n) is the plan of pass n; None: there is no such pass."""

    def __init__(self, make_plan: Callable[[int], RowPlan | None]) -> None:
        self.plan = lru_cache(KEPT_PLANS)(make_plan)
        first = self.plan(0)
        assert first is not None
        self.T = first.T
        self.pack = first.pack
        targets = first.row_targets(0, first.n_rows)
        # targets of a row
        self.mean = targets / max(first.n_rows, 1)
        # In conversations the answers alone are trained, so a row holds more tokens than targets.
        self.pairs_of_target = first.n_pairs / max(targets, 1)
        # of each row of the passes that are laid out: its targets, and how many of the source have come by its middle, float64
        self.targets: Ints = np.empty(0, np.uint8)
        self.middles = np.empty(0)
        # rows before each of these passes, and in all
        self.rows_before = [0]
        # targets of all these rows
        self.laid_out = 0

    def lay_out(self, targets: float) -> None:
        """Go on until the rows have so many targets, and one row more, or all passes are laid out."""
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


class MixedPlan(RowPlan):
    """The merged rows of several sources.

    offsets: of the store of all sources. source_of, number: of each row its source, and its number among the rows of that.
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
            own = source_of == i
            self.targets[own] = source.targets[number[own]]
            pairs += source.pairs_of_target * int(self.targets[own].sum(dtype=np.int64))
        self.n_pairs = round(pairs)
        self.fill = pairs / max(self.n_rows * self.T, 1)

    def pieces(self, rows: Sequence[int] | Ints) -> PiecesOfRows:
        rows = np.asarray(rows, dtype=np.int64)
        source_of = self._source[rows]
        count = np.zeros(len(rows), dtype=np.int64)
        # of each piece the place of its row among those asked for, and then what the plan of its pass says of it
        nothing = np.empty(0, dtype=np.int64)
        columns = [(nothing, nothing, nothing, nothing)]
        for i in np.unique(source_of).tolist():
            source = self.sources[i]
            own = np.flatnonzero(source_of == i)
            numbers = self._number[rows[own]].astype(np.int64)
            pass_of = np.searchsorted(source.rows_before, numbers, side="right") - 1
            for in_pass in np.unique(pass_of).tolist():
                is_in_pass = pass_of == in_pass
                plan = source.plan(in_pass)
                assert plan is not None
                of_row, *of_piece = plan.pieces(numbers[is_in_pass] - source.rows_before[in_pass])
                places = own[is_in_pass]
                count[places] = of_row
                columns.append((np.repeat(places, of_row), *of_piece))
        place, document, start, pairs = (np.concatenate(column) for column in zip(*columns, strict=True))
        # Stable: the pieces of a row stay as they came.
        order = np.argsort(place, kind="stable")
        return count, document[order], start[order], pairs[order]

    def source_targets(self, rows: int) -> list[int]:
        counts = np.bincount(self._source[:rows], weights=self.targets[:rows], minlength=len(self.sources))
        return [round(count) for count in counts.tolist()]


class Mixture:
    """Plans the rows of sources with shares.

    A share counts trained tokens (targets): a document of n tokens has n - 1, its first one, BOS, is never predicted.

    sources: all with shares. documents: ascending numbers in `store`. bounds: how many documents of it there are before each
    source, and in all. make_plan: see MakePlan. targets: int [documents of the store], what each counts for. A run is planned to
    end after `n_rows` rows, which may ask for more than the sources have (see `shortage`); 0: after `epochs`.
    Errors: DataError for a source without documents, and for a run of too many passes.
    """

    def __init__(
        self,
        store: Documents,
        sources: Sequence[Source],
        documents: Ints,
        bounds: Sequence[int],
        make_plan: MakePlan,
        targets: Ints,
        seed: int,
        epochs: int = 1,
        n_rows: int = 0,
    ) -> None:
        assert len(sources) == len(bounds) - 1 < 1 << 16, "the number of a source has 16 bits"
        self.store = store
        self.sources = sources
        cuts = np.searchsorted(documents, bounds).tolist()
        # of each source
        self.documents = [documents[first:end] for first, end in pairwise(cuts)]
        self.make_plan = make_plan
        self.seed = seed
        self.epochs = 0 if n_rows else epochs
        self.n_rows = n_rows
        self.targets_of = targets
        total = sum(float(Curve(source.shares or ()).area(1.0)) for source in sources)
        # the shares, which sum to 1
        self.curves = [Curve([Point(at, share / total) for at, share in source.shares or ()]) for source in sources]
        # of the trained tokens of a plan
        self.shares = [float(curve.area(1.0)) for curve in self.curves]
        # of a whole pass over each source
        self.targets = [self._sum_of(chosen) for chosen in self.documents]
        for source, there in zip(sources, self.targets, strict=True):
            if not there:
                raise DataError(
                    f"{name_of(source.paths)} has a share but no document to draw: all are empty, held out, or copies of earlier ones"
                )
        self.changes = any(source.changes for source in sources)
        # The whole run is one plan; else each epoch is.
        self.is_of_run = self.changes or any(source.repeat != 1 for source in sources)
        if not self.is_of_run:
            return
        if n_rows:
            self.rows = [SourceRows(self._passes(i, math.inf)) for i in range(len(sources))]
            of_run = n_rows / sum(share / source.mean for share, source in zip(self.shares, self.rows, strict=True))
            wanted = [share * of_run for share in self.shares]
        else:
            # The longest run in which no source comes more often than it may.
            quotas = self._quotas([source.repeat * epochs for source in sources])
            self.rows = [SourceRows(self._passes(i, quota)) for i, quota in enumerate(quotas)]
            wanted = [float(quota) for quota in quotas]
        for source, there, tokens in zip(sources, self.targets, wanted, strict=True):
            if tokens / there > MOST_REPEATS:
                raise DataError(
                    f"--data_path: the run passes over {name_of(source.paths)} about {tokens / there:,.0f} times, and where shares "
                    f"change over the run at most {MOST_REPEATS:,} passes are planned: train less, or name more text"
                )
        if n_rows:
            self.speed = self._speed()

    # ------------------------------------------------------------------------------------------- the documents

    def _sum_of(self, documents: Ints) -> int:
        """Their targets together."""
        return int(self.targets_of[documents].sum(dtype=np.int64))

    def _quotas(self, passes: Sequence[float]) -> list[int]:
        """Targets of each source in the largest plan that has the shares. passes: over each source at most."""
        most = [there * times for there, times in zip(self.targets, passes, strict=True)]
        size = min(of_source / share for of_source, share in zip(most, self.shares, strict=True))
        # In floating point that of the scarcest source can come out a little above what it has.
        return [max(1, min(int(there), round(size * share))) for there, share in zip(most, self.shares, strict=True)]

    def _passes(self, i: int, wanted: float) -> Callable[[int], RowPlan | None]:
        """The plans of the passes over a source, until they have `wanted` targets."""

        def make(number: int) -> RowPlan | None:
            left = wanted - number * self.targets[i]
            if left <= 0:
                return None
            chosen = self.documents[i] if left >= self.targets[i] else self._arc(i, 0, round(left))
            return self.make_plan(chosen, self._stream(i, number))

        return make

    def _stream(self, i: int, number: int) -> int:
        """Each pass over each source has random numbers of its own, and so has each epoch of it."""
        return number * len(self.sources) + i

    def _arc(self, i: int, begin: int, length: int) -> Ints:
        """Documents of a source, which stand around a circle in a random order, each as long as it has targets: the numbers
        of those whose first target lies in an arc of the circle, ascending."""
        # The circle is the same in every epoch, so its random numbers come from the seed and the source alone.
        bits = np.random.PCG64([self.seed, MIXTURE_STREAM, i])
        order = self.documents[i][permutation(bits, len(self.documents[i]))]
        targets = self.targets_of[order]
        # Turned back, so that the arc begins at 0. The remainder of a negative number is positive here, as it is in Python.
        firsts = np.cumsum(targets, dtype=np.int64) - targets - begin
        return np.sort(order[firsts % self.targets[i] < length])

    # ------------------------------------------------------------------------------------------- the order

    def plan(self, epoch: int) -> MixedPlan:
        """The rows of an epoch. Where the run is one plan, epoch 0 has all of them, and further ones what comes behind its end."""
        if self.is_of_run:
            return self._rows_of_run(epoch) if self.n_rows else self._merged(self.rows)
        rows = []
        for i, quota in enumerate(self._quotas([1.0] * len(self.sources))):
            of_source = self.make_plan(self._arc(i, epoch * quota, quota), self._stream(i, epoch))
            rows.append(SourceRows({0: of_source}.get))
        return self._merged(rows)

    def _merged(self, rows: Sequence[SourceRows]) -> MixedPlan:
        """All rows of all sources. A source takes the whole plan for what it has, which whole documents make a little more or
        less than its share."""
        moments = []
        for source, curve, share in zip(rows, self.curves, self.shares, strict=True):
            source.lay_out(math.inf)
            moments.append(curve.where(source.middles / max(source.laid_out, 1) * share))
        return MixedPlan(self.store.offsets, rows, *in_order(moments))

    def _speed(self) -> float:
        """Tokens that a run of n_rows rows trains while its progress goes from 0 to 1."""
        # The mean row of a source is that of its first pass; then what the rows themselves say corrects the speed.
        found = sum(share / source.mean for share, source in zip(self.shares, self.rows, strict=True))
        speed = 1.0
        for _ in range(CORRECTIONS):
            # Where few rows come from many sources, none may come to its middle: then half of them count, and the speed is doubled.
            speed *= self.n_rows / (found or self.n_rows / 2)
            found = 0
            for source, share in zip(self.rows, self.shares, strict=True):
                source.lay_out(share * speed)
                found += int(np.searchsorted(source.middles, share * speed))
        return speed

    def _rows_of_run(self, part: int) -> MixedPlan:
        """Part 0: the n_rows rows that the run is planned for. Further ones: as many rows each, behind them."""
        end = (part + 1) * self.n_rows
        horizon = (part + 1) * (1 + MARGIN)
        while True:
            moments = []
            for source, curve in zip(self.rows, self.curves, strict=True):
                source.lay_out(float(curve.area(horizon)) * self.speed)
                moments.append(curve.where(source.middles / self.speed))
            # At least `end` rows have to come before any row that is not laid out.
            if sum(int((of_source <= horizon).sum()) for of_source in moments) >= end:
                break
            horizon *= 2
        source_of, number = in_order(moments)
        rows = slice(end - self.n_rows, end)
        return MixedPlan(self.store.offsets, self.rows, source_of[rows], number[rows])

    # ------------------------------------------------------------------------------------- what a person is told

    def shortage(self, plan: RowPlan) -> str:
        """What the run, to its planned end, takes more of than it may, for a person; "": nothing. plan: epoch 0."""
        said = []
        for source, there, targets in zip(self.sources, self.targets, plan.source_targets(plan.n_rows), strict=True):
            passes = targets / there
            if passes > source.repeat:
                said.append(
                    f"{name_of(source.paths)} is passed over {passes:,.2f} times where {source.repeat:g} may be "
                    f"(x{math.ceil(passes)})"
                )
        return "; ".join(said)

    def trained_before(self, epoch: int) -> list[int]:
        """Targets of each source in all epochs before one."""
        if self.is_of_run:
            # Only a run that goes on behind its planned end has more than one.
            targets = [0] * len(self.sources)
            for part in range(epoch):
                plan = self.plan(part)
                in_part = plan.source_targets(plan.n_rows)
                targets = [before + more for before, more in zip(targets, in_part, strict=True)]
            return targets
        # The arcs of the epochs follow each other, so together they are one, round and round.
        targets = []
        for i, quota in enumerate(self._quotas([1.0] * len(self.sources))):
            rounds, rest = divmod(epoch * quota, self.targets[i])
            targets.append(rounds * self.targets[i] + self._sum_of(self._arc(i, 0, rest)))
        return targets

    def layout(self) -> dict[str, object]:
        """What a resume must not change."""
        shares = []
        for curve in self.curves:
            shares.append([list(point) for point in curve.points])
        layout: dict[str, object] = {"shares": shares, "repeats": [source.repeat for source in self.sources]}
        if self.is_of_run:
            layout["epochs"] = self.epochs
        return layout


def in_order(moments: Sequence[np.ndarray]) -> tuple[Ints, Ints]:
    """(source, uint16; number among the rows of that source, uint32) of rows in the order of their moments.

    moments: of each source's rows.
    """
    rows_of_source = [len(of_source) for of_source in moments]
    source = np.repeat(np.arange(len(moments), dtype=np.uint16), rows_of_source)
    number = np.concatenate([np.arange(rows, dtype=np.uint32) for rows in rows_of_source])
    # Stable: rows of one moment come in the order of the sources. Rounded, since the last bits of a moment may be other ones on
    # another kind of processor, and sources of equal shares have many moments in common.
    order = np.argsort(np.round(np.concatenate(moments), 12), kind="stable")
    return source[order], number[order]
