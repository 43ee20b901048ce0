"""The rows of a whole run whose shares are planned from its begin to its end.

Each source has rows of its own, pass after pass, and the rows of all sources are merged so that at every moment each has
given what its share asks for, to about a row. A row is known by its number in the run, as that of an epoch is: so ranks,
batch sizes and a resume need nothing else.

How the order is made. A share over the progress of the run tells how many tokens a source has given at each moment: the area
under its curve, times the tokens that the run trains while its progress goes on by one. Turned round: the middle token of a
row belongs to a moment. All rows are sorted by their moments.

Where the run ends. A run of so many passes ends where the scarcest source, beside its share, is used up: its tokens are known,
and all documents that are drawn come whole. A run of so many updates has a number of rows, and the first so many are taken.
The clock of a budget may move that end while the run goes on. Then the rows that are trained stay, and those that are left are
merged anew (`Move`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from common.arrays import Array
from dataset.packing import PiecesOfRows, RowPlan, merged
from dataset.shares import Curve
from dataset.store.interface import Column, Ints

# Plans of passes that a source keeps. While a batch is made ahead in the next pass, the totals of an update may be asked in
# this one.
KEPT_PLANS = 2
# How far beyond the end of a run its rows are laid out first: how many tokens its rows hold is an estimate.
MARGIN = 0.02
# By which the tokens of a run are found that has so many rows: from the estimate, to less than one.
HALVINGS = 48


@dataclass(frozen=True)
class Move:
    """From row `row` on the run is planned to end before row `end`: what is left of the schedule goes over the rows between. A
    run begins with one of row 0; each further one says that the end has moved.

    fall_row: where the learning rate begins to fall, and `fall_progress` the progress that belongs there, so that what is
    planned for the fall stays with it. Equal to `row` where it falls already, to `end` where that does not matter.

    Example: a run of 1,000 rows, whose rate falls over the last 200 of them. At row 300 the clock finds time for 1,400.

        Move(row=0, fall_row=1000, fall_progress=1.0, end=1000)     rows 0 to 300: progress 0 to 0.3
        Move(row=300, fall_row=1200, fall_progress=0.8, end=1400)   rows 300 to 1,200: 0.3 to 0.8; 1,200 to 1,400: 0.8 to 1
    """

    row: int
    fall_row: int
    fall_progress: float
    end: int


class SourceRows:
    """All rows of one source, pass after pass.

    make_plan(n) is the plan of pass n; None: there is no such pass.
    """

    def __init__(self, make_plan: Callable[[int], RowPlan | None]) -> None:
        self.make_plan = make_plan
        self._plans: dict[int, RowPlan] = {}
        # Of the rows that are laid out: their targets, and how many rows and targets there are before each pass.
        self._targets: list[Ints] = []
        self._rows_before = [0]
        self._middles: Array = np.empty(0)
        self.laid_out = 0
        self.has_all = False

    @cached_property
    def pairs_of_target(self) -> float:
        """Positions that hold a token for each that is trained, in the first pass: of conversations the answers alone are."""
        first = self.plan(0)
        return first.n_pairs / max(first.row_targets(0, first.n_rows), 1)

    def plan(self, number: int) -> RowPlan:
        """Of a pass that is laid out."""
        if number not in self._plans:
            plan = self.make_plan(number)
            assert plan is not None
            while len(self._plans) >= KEPT_PLANS:
                # The one that was made first.
                del self._plans[next(iter(self._plans))]
            self._plans[number] = plan
        return self._plans[number]

    def lay_out(self, targets: float) -> None:
        """Go on until the rows have so many targets, and one row more, or all passes are laid out."""
        while not self.has_all and self.laid_out <= targets + self._row_targets:
            number = len(self._targets)
            plan = self.make_plan(number)
            if plan is None or not plan.n_rows:
                self.has_all = True
                return
            # Usually it is wanted soon, and the later ones come in their turn.
            if number < KEPT_PLANS:
                self._plans[number] = plan
            self._targets.append(plan.targets_of_rows())
            self._rows_before.append(self._rows_before[-1] + plan.n_rows)
            self.laid_out += plan.row_targets(0, plan.n_rows)

    @property
    def _row_targets(self) -> int:
        """Of a full row, once one is known."""
        return int(self._targets[0].max()) if self._targets else 0

    @property
    def mean_targets(self) -> float:
        """Of a row, in the first pass."""
        return float(self._targets[0].mean())

    @property
    def n_rows(self) -> int:
        """That are laid out."""
        return self._rows_before[-1]

    def targets(self) -> Ints:
        """Of each row that is laid out."""
        return np.concatenate(self._targets) if self._targets else np.empty(0, dtype=np.int64)

    def middles(self) -> Array:
        """float64: how many targets of the source have come by the middle of each row that is laid out."""
        if len(self._middles) != self.n_rows:
            targets = self.targets()
            self._middles = np.cumsum(targets, dtype=np.int64) - targets / 2
        return self._middles

    def forget_middles(self) -> None:
        """They take eight bytes a row, and are wanted for the order alone."""
        self._middles = np.empty(0)

    def by_pass(self, rows: Ints) -> list[tuple[RowPlan, Ints, Ints]]:
        """[(plan of a pass, which of `rows` lie in it, their numbers there)]"""
        pass_of = np.searchsorted(self._rows_before, rows, side="right") - 1
        found: list[tuple[RowPlan, Ints, Ints]] = []
        for number in np.unique(pass_of).tolist():
            inside = np.flatnonzero(pass_of == number)
            found.append((self.plan(number), inside, rows[inside] - self._rows_before[number]))
        return found


class Timeline:
    """How far the schedule is after so many tokens of each source.

    A timeline has stretches. progress: where each begins. speeds: the tokens of all sources that the run trains in it while its
    progress goes on by one. The last stretch has no end.

    Example: the share of source a is 0.7..0.2, and from the middle of the run on progress takes twice as many tokens. The tokens
    of a stretch are its area under the share times its speed.

        stretch   begins at   speed   area of a before it   tokens of a before it
        0         0           1000    0                     0
        1         0.5         2000    0.2875                287.5
        end       1                   0.45                  612.5 = 287.5 + (0.45 - 0.2875) * 2000
    """

    def __init__(self, curves: Sequence[Curve], progress: Sequence[float], speeds: Sequence[float]) -> None:
        self.curves = curves
        self.progress = list(progress)
        self.speeds = list(speeds)
        # [sources][stretches]: the area and the tokens of a source where each stretch begins.
        self.areas = []
        self.tokens = []
        for curve in curves:
            areas = np.array([curve.area(begin) for begin in self.progress])
            self.areas.append(areas)
            self.tokens.append(np.append(0.0, np.cumsum(np.diff(areas) * self.speeds[:-1])))

    def targets_until(self, source: int, progress: float) -> float:
        """What a source has given by then."""
        at = int(np.searchsorted(self.progress, progress, side="right")) - 1
        area = self.curves[source].area(progress) - self.areas[source][at]
        return float(self.tokens[source][at] + area * self.speeds[at])

    def moments(self, source: int, targets: Array) -> Array:
        """float64: the progress at which a source has given each of these numbers of targets."""
        at = np.clip(np.searchsorted(self.tokens[source], targets, side="right") - 1, 0, None)
        area = self.areas[source][at] + (targets - self.tokens[source][at]) / np.asarray(self.speeds)[at]
        return self.curves[source].where(area)

    def turned(self, progress: float, speed: float) -> "Timeline":
        """The same until `progress`, and another speed from there on."""
        kept = sum(begin < progress for begin in self.progress)
        return Timeline(self.curves, [*self.progress[:kept], progress], [*self.speeds[:kept], speed])


class MixedPlan(RowPlan):
    """The merged rows of several sources, see above.

    offsets: of the store of all sources. sources: their rows; curves: their shares of the trained tokens, which sum to 1.
    moves: the end of the run, and how it has moved; none: the run has all rows of all sources, which all have an end.
    """

    def __init__(
        self,
        offsets: Column,
        sources: Sequence[SourceRows],
        curves: Sequence[Curve],
        moves: Sequence[Move] = (),
    ) -> None:
        self.offsets = offsets
        self.sources = sources
        self.curves = curves
        self.moves = tuple(moves)
        assert len(sources) == len(curves) < 1 << 16, "the number of a source has 16 bits"
        for source in sources:
            source.lay_out(0)
        first = sources[0].plan(0)
        self.T = first.T
        self.pack = first.pack
        # Of each row of the run: its source, and its number among the rows of that source.
        self._source: Ints = np.empty(0, dtype=np.uint16)
        self._number: Ints = np.empty(0, dtype=np.uint32)
        if moves:
            self._merge_until_end()
        else:
            self._merge_all()
        self.n_rows = len(self._source)
        self._targets = np.empty(self.n_rows, dtype=np.min_scalar_type(self.T))
        pairs = 0.0
        for i, source in enumerate(sources):
            own = self._source == i
            self._targets[own] = source.targets()[self._number[own]]
            pairs += source.pairs_of_target * int(self._targets[own].sum(dtype=np.int64))
        self.fill = pairs / max(self.n_rows * self.T, 1)
        for source in sources:
            source.forget_middles()

    # ------------------------------------------------------------------------------------------- the order

    def _merge_all(self) -> None:
        """All rows of all sources. A source takes the whole run for what it has, which whole documents make a little more
        or less than its share."""
        moments = []
        for source, curve in zip(self.sources, self.curves, strict=True):
            source.lay_out(np.inf)
            given = source.middles() / max(source.laid_out, 1)
            moments.append(curve.where(given * curve.area(1.0)))
        self._append(moments, [0] * len(moments), sum(map(len, moments)))

    def _merge_until_end(self) -> None:
        """As many rows as the last move says."""
        assert self.moves[0].row == 0, "the first one is that of the start"
        nothing = [0.0] * len(self.sources)
        timeline = Timeline(self.curves, [0.0], [self._speed(nothing, 0.0, 1.0, self.moves[0].end)])
        for number, move in enumerate(self.moves):
            if number:
                timeline = self._with_move(timeline, move)
            # The next move keeps the rows before it.
            is_last = number == len(self.moves) - 1
            self._take(timeline, move.end if is_last else self.moves[number + 1].row)

    def _speed(self, tokens: Sequence[float], begin: float, end: float, rows: int) -> float:
        """The speed of a stretch from progress `begin` to `end`, with which the run has so many rows, counted from its start, at
        the end of that stretch. tokens: of each source, that it has given when the progress is `begin`.

        A speed gives each source the tokens area * speed in the stretch, and a row has come when its middle token has. So the
        number of rows rises with the speed, a row at a time, and the least speed with enough rows is found by halving: `low`
        has too few rows, `high` has enough. There is always such a speed, since the passes over a source have no end here.
        """
        areas = [curve.area(end) - curve.area(begin) for curve in self.curves]

        def rows_at_end(speed: float) -> int:
            found = 0
            for source, before, area in zip(self.sources, tokens, areas, strict=True):
                source.lay_out(before + area * speed)
                found += int(np.searchsorted(source.middles(), before + area * speed, side="right"))
            return found

        # An estimate first: to lay out more passes than are wanted takes time. A row of padded short documents holds fewer
        # tokens than one of long ones.
        rows_for_one = 0.0
        for source, area in zip(self.sources, areas, strict=True):
            rows_for_one += area / source.mean_targets
        low = 0.0
        high = (1 + MARGIN) * max(rows - rows_at_end(0.0), 1) / rows_for_one
        while rows_at_end(high) < rows:
            low = high
            high *= 1 + MARGIN
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if rows_at_end(middle) < rows:
                low = middle
            else:
                high = middle
        return high

    def _with_move(self, timeline: Timeline, move: Move) -> Timeline:
        """The timeline with another end: as it was up to the row of a move, then a stretch up to where the rate falls, if that
        is still to come, and one up to the end."""
        now = self._moment_of_next(timeline)
        if now >= 1:
            # The schedule is at its end, and its last shares go on.
            return timeline
        fall = max(move.fall_progress, now)
        tokens = [timeline.targets_until(i, now) for i in range(len(self.sources))]
        if not (move.row < move.fall_row < move.end and now < fall < 1):
            return timeline.turned(now, self._speed(tokens, now, 1.0, move.end))
        constant = timeline.turned(now, self._speed(tokens, now, fall, move.fall_row))
        tokens = [constant.targets_until(i, fall) for i in range(len(self.sources))]
        return constant.turned(fall, self._speed(tokens, fall, 1.0, move.end))

    def _taken(self) -> list[int]:
        """Rows of each source in the order so far."""
        return np.bincount(self._source, minlength=len(self.sources)).tolist()

    def _moment_of_next(self, timeline: Timeline) -> float:
        """The progress that belongs to the row which would come next."""
        moments = []
        for i, taken in enumerate(self._taken()):
            source = self.sources[i]
            if taken == source.n_rows:
                source.lay_out(source.laid_out)
            middle = source.middles()[taken : taken + 1]
            moments.append(float(timeline.moments(i, middle)[0]))
        return min(moments)

    def _take(self, timeline: Timeline, n_rows: int) -> None:
        """Append the next rows in the order of their moments, until there are n_rows in all."""
        taken = self._taken()
        wanted = n_rows - len(self._source)
        margin = MARGIN
        while True:
            moments = []
            inside = 0
            for i, source in enumerate(self.sources):
                source.lay_out(timeline.targets_until(i, 1 + margin))
                moments.append(timeline.moments(i, source.middles()[taken[i] :]))
                inside += int((moments[-1] <= 1 + margin).sum())
            # A source has rows behind the margin that are not laid out. All before it are.
            if inside >= wanted:
                break
            margin *= 2
        self._append(moments, taken, wanted)

    def _append(self, moments: Sequence[Array], taken: Sequence[int], n_rows: int) -> None:
        """Append the n_rows first ones by their moments. taken: the number of the row that each source's first moment is of."""
        sources = []
        numbers = []
        for i, of_source in enumerate(moments):
            sources.append(np.full(len(of_source), i, dtype=np.uint16))
            numbers.append(np.arange(taken[i], taken[i] + len(of_source), dtype=np.uint32))
        # Stable: rows of one moment come in the order of the sources.
        order = np.argsort(np.concatenate(moments), kind="stable")[:n_rows]
        self._source = np.concatenate([self._source, np.concatenate(sources)[order]])
        self._number = np.concatenate([self._number, np.concatenate(numbers)[order]])

    # ------------------------------------------------------------------------------------------- the rows

    def row_targets(self, lo: int, hi: int) -> int:
        return int(self._targets[lo:hi].sum(dtype=np.int64))

    def row_documents(self, lo: int, hi: int) -> int:
        count, *_ = self.pieces(range(lo, hi))
        return int(count.sum())

    def targets_of_rows(self) -> Ints:
        return self._targets

    def pieces(self, rows: Sequence[int] | Ints) -> PiecesOfRows:
        parts = [(places, plan.pieces(in_pass)) for plan, places, in_pass in self._by_plan(rows)]
        return merged(len(rows), parts)

    def _by_plan(self, rows: Sequence[int] | Ints) -> Iterator[tuple[RowPlan, Ints, Ints]]:
        """(plan of a pass over a source, which of `rows` lie in it, their numbers there)"""
        rows = np.asarray(rows, dtype=np.int64)
        source_of = self._source[rows]
        numbers = self._number[rows].astype(np.int64)
        for i in np.unique(source_of).tolist():
            own = np.flatnonzero(source_of == i)
            for plan, inside, in_pass in self.sources[i].by_pass(numbers[own]):
                yield plan, own[inside], in_pass

    # ------------------------------------------------------------------------------------- what a person is told

    def source_targets(self, lo: int, hi: int) -> list[int]:
        """Targets of each source in the rows [lo, hi)."""
        counts = np.bincount(self._source[lo:hi], weights=self._targets[lo:hi], minlength=len(self.sources))
        return [round(count) for count in counts.tolist()]


def from_the_start(n_rows: int) -> Move:
    """Of a run of so many rows."""
    return Move(row=0, fall_row=n_rows, fall_progress=1.0, end=n_rows)
