"""Several sources in given shares: which documents each of them gives, how often, and the order of all rows.

Each source has rows of its own, and the rows of all sources are merged so that at every moment each has given what its share
asks for, to about a row. A row is known by its number in the plan, as without shares: so ranks, batch sizes and a resume need
nothing else.

How much is planned as one. Where every share stays as it is and no source may come several times, an epoch is a plan: the
largest in which no document comes twice and the shares hold. It uses the source up that is scarcest beside its share; each
other one goes round a fixed random order of its documents, and an epoch goes on where the last one stopped. A run has as many
epochs as its epochs, updates or budget ask for. Where a share changes, or a source may come several times, the whole run is
one plan.

How the order is made. A share over the progress of the run tells how many tokens a source has given at each moment: the area
under its curve, times the tokens that the run trains while its progress goes on by one, its *speed*. Turned round: the middle
token of a row belongs to a moment. All rows are sorted by their moments. The clock of a budget may move the end of a run while
it goes on. Then the rows that are trained stay, and what is left of the schedule gets another speed (`Move`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from common.errors import DataError
from common.wording import counted
from dataset.packing import (
    MostTargets,
    PiecesOfRows,
    RowPlan,
    chunks,
    merged,
    permutation,
    sum_of_targets,
    target_counts,
)
from dataset.shares import MOST_REPEATS, Source, name_of, normal_curves
from dataset.store.format import Column, Documents, Ints

# Keeps the random numbers of the mixture apart from those of the plans: "mix" in ASCII.
MIXTURE_STREAM = 0x6D6978
# Plans of passes that a source keeps. While a batch is made ahead in the next pass, the totals of an update may be asked in
# this one.
KEPT_PLANS = 2
# How far beyond the end of a run its rows are laid out first
MARGIN = 0.02
# How often the speed of a stretch is corrected by the rows that it gives: to about a row.
CORRECTIONS = 4
# A progress that no run reaches, and that the moments of rows which never come have.
NEVER = 1e6
# Where a number of updates is told that would fit: room for what is only known once the rows are laid out.
ROOM = 0.998

# The plan of some documents: (their numbers, what it draws its random numbers by).
MakePlan = Callable[[Ints, int], RowPlan]
# (progress at which a part of the run begins, tokens of all sources that it trains in it while its progress goes on by one)
Stretch = tuple[float, float]


class RunLength(NamedTuple):
    """When a run ends: after so many passes, or after so many updates of so many rows, unless they are 0."""

    epochs: int = 1
    updates: int = 0
    rows_of_update: int = 0

    @property
    def rows(self) -> int | None:
        """None: what the passes have."""
        return self.updates * self.rows_of_update or None


ONE_PASS = RunLength()


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


class Given(NamedTuple):
    """What is trained of a source. passes: over all of its targets."""

    targets: int
    passes: float


class Shortage(NamedTuple):
    """A run that passes over some sources more often than they allow.

    sources: which ones, and how often, for a person. fits: of the rows behind the last move of its end, the part that the
    sources have enough for.
    """

    sources: str
    fits: float

    def told(self, updates: int, done: int) -> str:
        """For a run of so many updates, of which some are done, with what to do about it."""
        fits = done + int((updates - done) * self.fits * ROOM)
        advice = "allow more passes, as in PATH:SHARE:x2 (repeat: 2 in a --mixture file)"
        if fits > done:
            advice += f", or train at most {counted(fits, 'update')}"
        return f"--data_path: too little text for {counted(updates, 'update')}: {self.sources}; {advice}"


class SourceRows:
    """All rows of one source, pass after pass. make_plan(n) is the plan of pass n; None: there is no such pass."""

    def __init__(self, make_plan: Callable[[int], RowPlan | None]) -> None:
        self.plan = lru_cache(KEPT_PLANS)(make_plan)
        # targets of each row, for each pass that is laid out
        self._targets: list[Ints] = []
        # rows before each of these passes, and in all
        self._rows_before = [0]
        # targets of all these rows
        self.laid_out = 0
        self.has_all = False
        first = self.plan(0)
        assert first is not None
        self.T = first.T
        self.pack = first.pack
        targets = first.row_targets(0, first.n_rows)
        # targets of a row
        self.mean = targets / max(first.n_rows, 1)
        # Of conversations the answers alone are trained, so a row holds more tokens than targets.
        self.pairs_of_target = first.n_pairs / max(targets, 1)

    def lay_out(self, targets: float) -> None:
        """Go on until the rows have so many targets, and one row more, or all passes are laid out."""
        while not self.has_all and self.laid_out <= targets + (self._targets[0].max() if self._targets else 0):
            plan = self.plan(len(self._targets))
            if plan is None or not plan.n_rows:
                self.has_all = True
                return
            self._targets.append(plan.targets)
            self._rows_before.append(self._rows_before[-1] + plan.n_rows)
            self.laid_out += plan.row_targets(0, plan.n_rows)

    def targets(self) -> Ints:
        """Of each row that is laid out."""
        return np.concatenate(self._targets) if self._targets else np.empty(0, dtype=np.int64)

    def middles(self) -> np.ndarray:
        """float64: how many targets of the source have come by the middle of each row that is laid out."""
        targets = self.targets()
        return np.cumsum(targets, dtype=np.int64) - targets / 2

    def by_pass(self, rows: Ints) -> Iterator[tuple[RowPlan, Ints, Ints]]:
        """(plan of a pass, which of `rows` lie in it, their numbers there)"""
        pass_of = np.searchsorted(self._rows_before, rows, side="right") - 1
        for number in np.unique(pass_of).tolist():
            inside = np.flatnonzero(pass_of == number)
            plan = self.plan(number)
            assert plan is not None
            yield plan, inside, rows[inside] - self._rows_before[number]


class MixedPlan(RowPlan):
    """The merged rows of several sources.

    offsets: of the store of all sources. source_of, number: of each row its source, and its number among the rows of that.
    """

    def __init__(self, offsets: Column, sources: Sequence[SourceRows], source_of: Ints, number: Ints) -> None:
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
            self.targets[own] = source.targets()[number[own]]
            pairs += source.pairs_of_target * int(self.targets[own].sum(dtype=np.int64))
        self.n_pairs = round(pairs)
        self.fill = pairs / max(self.n_rows * self.T, 1)

    def pieces(self, rows: Sequence[int] | Ints) -> PiecesOfRows:
        rows = np.asarray(rows, dtype=np.int64)
        source_of = self._source[rows]
        numbers = self._number[rows].astype(np.int64)
        parts = []
        for i in np.unique(source_of).tolist():
            own = np.flatnonzero(source_of == i)
            for plan, inside, in_pass in self.sources[i].by_pass(numbers[own]):
                parts.append((own[inside], plan.pieces(in_pass)))
        return merged(len(rows), parts)

    def source_targets(self, lo: int, hi: int) -> list[int]:
        """Targets of each source in the rows [lo, hi)."""
        counts = np.bincount(self._source[lo:hi], weights=self.targets[lo:hi], minlength=len(self.sources))
        return [round(count) for count in counts.tolist()]


class Mixture:
    """Plans the rows of sources with shares.

    A share counts trained tokens (targets): a document of n tokens has n - 1, its first one, BOS, is never predicted.

    sources: all with shares. documents: ascending numbers in `store`. bounds: how many documents of it there are before each
    source, and in all. make_plan: see MakePlan. most_targets: a document counts for at most so many. A run of some updates may
    ask for more than the sources have: see `shortage`.
    Errors: DataError for a source without documents, and for a run of too many passes.
    """

    def __init__(
        self,
        store: Documents,
        sources: Sequence[Source],
        documents: Ints,
        bounds: Sequence[int],
        make_plan: MakePlan,
        seed: int,
        length: RunLength,
        most_targets: MostTargets = None,
    ) -> None:
        assert len(sources) == len(bounds) - 1 < 1 << 16, "the number of a source has 16 bits"
        self.store = store
        self.sources = sources
        cuts = np.searchsorted(documents, bounds).tolist()
        # of each source
        self.documents = [documents[first:end] for first, end in zip(cuts[:-1], cuts[1:], strict=True)]
        self.make_plan = make_plan
        self.seed = seed
        self.length = length
        self.most_targets = most_targets
        self.curves = normal_curves(sources)
        # of the trained tokens of a plan
        self.shares = [float(curve.area(1.0)) for curve in self.curves]
        # of a whole pass over each source
        self.targets = [sum_of_targets(store, chosen, most_targets) for chosen in self.documents]
        for source, there in zip(sources, self.targets, strict=True):
            if not there:
                raise DataError(f"{name_of(source.paths)} has a share but no document to draw")
        # Whether the whole run is one plan; else each epoch is.
        self.is_of_run = any(source.changes or source.repeat != 1 for source in sources)
        # The end of a run of some updates, and how it has moved.
        self.moves: tuple[Move, ...] = ()
        self._plan: MixedPlan | None = None
        if not self.is_of_run:
            return
        if length.rows is not None:
            self.rows = [SourceRows(self._passes(i, math.inf)) for i in range(len(sources))]
            tokens = length.rows / sum(
                share / source.mean for share, source in zip(self.shares, self.rows, strict=True)
            )
            self._refuse_what_is_too_long([share * tokens for share in self.shares])
            self.replan([Move(row=0, fall_row=length.rows, fall_progress=1.0, end=length.rows)])
        else:
            # The longest run in which no source comes more often than it may.
            wanted = self._quotas([source.repeat * length.epochs for source in sources])
            self._refuse_what_is_too_long(wanted)
            self.rows = [SourceRows(self._passes(i, of_source)) for i, of_source in enumerate(wanted)]
            self._plan = self._merged(self.rows)

    # ------------------------------------------------------------------------------------------- the documents

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
        is_drawn = np.empty(len(order), dtype=bool)
        # Turned back, so that the arc begins at 0.
        at = -begin
        for lo, hi in chunks(len(order)):
            targets = target_counts(self.store, order[lo:hi], self.most_targets)
            ends = at + np.cumsum(targets)
            # The remainder of a negative number is positive here, as it is in Python.
            is_drawn[lo:hi] = (ends - targets) % self.targets[i] < length
            at = int(ends[-1])
        return np.sort(order[is_drawn])

    # ------------------------------------------------------------------------------------------- the order

    def plan(self, epoch: int) -> MixedPlan:
        """The rows of an epoch; those of the run where that is one plan."""
        if self._plan is not None:
            return self._plan
        rows = []
        for i, quota in enumerate(self._quotas([1.0] * len(self.sources))):
            chosen = self._arc(i, epoch * quota, quota)
            plan = self.make_plan(chosen, self._stream(i, epoch))
            rows.append(SourceRows({0: plan}.get))
        return self._merged(rows)

    def _merged(self, rows: Sequence[SourceRows]) -> MixedPlan:
        """All rows of all sources. A source takes the whole plan for what it has, which whole documents make a little more or
        less than its share."""
        moments = []
        for source, curve, share in zip(rows, self.curves, self.shares, strict=True):
            source.lay_out(math.inf)
            given = source.middles() / max(source.laid_out, 1)
            moments.append(curve.where(given * share))
        return MixedPlan(self.store.offsets, rows, *in_order(moments))

    def replan(self, moves: Sequence[Move]) -> None:
        """Plan a run of some updates with the moves of its end."""
        if tuple(moves) == self.moves:
            return
        assert moves[0].row == 0, "the first one is that of the start"
        self.moves = tuple(moves)
        stretches: list[Stretch] = [(0.0, self._speed([0.0] * len(self.rows), 0.0, 1.0, moves[0].end)[0])]
        source_of, number = in_order([])
        taken = [0] * len(self.rows)
        for k, move in enumerate(moves):
            if k:
                # The progress that belongs to the row which comes next
                now = min(float(of_source[0]) for of_source in self._coming(stretches, taken, 1) if len(of_source))
                stretches = self._moved(stretches, now, move)
            # The next move keeps the rows before it.
            end = moves[k + 1].row if k + 1 < len(moves) else move.end
            wanted = end - len(source_of)
            next_source, next_number = in_order(self._coming(stretches, taken, wanted), taken, wanted)
            source_of = np.concatenate([source_of, next_source])
            number = np.concatenate([number, next_number])
            taken = np.bincount(source_of, minlength=len(self.rows)).tolist()
        self._plan = MixedPlan(self.store.offsets, self.rows, source_of, number)

    def _speed(self, given: Sequence[float], begin: float, end: float, rows: int) -> tuple[float, list[float]]:
        """(the speed with which the run has about so many rows from progress `begin` to `end`, the tokens that each source has
        given at `end`). given: the same at `begin`."""
        areas = [float(curve.area(end) - curve.area(begin)) for curve in self.curves]
        # The mean row of a source is that of its first pass; then what the rows themselves say corrects the speed.
        found = sum(area / source.mean for area, source in zip(areas, self.rows, strict=True))
        speed = 1.0
        for _ in range(CORRECTIONS):
            speed *= max(rows, 1) / max(found, 1e-9)
            at_end = [before + area * speed for before, area in zip(given, areas, strict=True)]
            found = 0
            for source, before, behind in zip(self.rows, given, at_end, strict=True):
                source.lay_out(behind)
                lo, hi = np.searchsorted(source.middles(), [before, behind])
                found += int(hi - lo)
        return speed, at_end

    def _moved(self, stretches: list[Stretch], now: float, move: Move) -> list[Stretch]:
        """The stretches with another end: as they were up to progress `now`, then one up to where the rate falls, if that is
        still to come, and one up to the end."""
        if now >= 1:
            # The schedule is at its end, and its last shares go on.
            return stretches
        kept = [stretch for stretch in stretches if stretch[0] < now]
        progress, given = self._course(kept)
        at_now = [float(np.interp(now, progress, tokens)) for tokens in given]
        fall = move.fall_progress
        if not (move.row < move.fall_row < move.end and now < fall < 1):
            return [*kept, (now, self._speed(at_now, now, 1.0, move.end - move.row)[0])]
        constant, at_fall = self._speed(at_now, now, fall, move.fall_row - move.row)
        return [*kept, (now, constant), (fall, self._speed(at_fall, fall, 1.0, move.end - move.fall_row)[0])]

    def _course(self, stretches: Sequence[Stretch]) -> tuple[np.ndarray, list[np.ndarray]]:
        """(progress, tokens that each source has given by then): float64, rising, with straight lines between."""
        begins = [begin for begin, _ in stretches]
        speeds = np.array([speed for _, speed in stretches])
        progress = np.unique(np.concatenate([*(curve.progress for curve in self.curves), begins, [NEVER]]))
        speed = speeds[np.searchsorted(begins, progress[:-1], side="right") - 1]
        return progress, [np.append(0.0, np.cumsum(np.diff(curve.area(progress)) * speed)) for curve in self.curves]

    def _coming(self, stretches: Sequence[Stretch], taken: Sequence[int], n_rows: int) -> list[np.ndarray]:
        """float64: the moments of each source's rows behind those that are taken. At least n_rows of all of them come before
        any row that is not laid out."""
        progress, given = self._course(stretches)
        horizon = 1 + MARGIN
        while True:
            moments = []
            for source, first, tokens in zip(self.rows, taken, given, strict=True):
                source.lay_out(float(np.interp(horizon, progress, tokens)))
                moments.append(np.interp(source.middles()[first:], tokens, progress))
            if sum(int((of_source <= horizon).sum()) for of_source in moments) >= n_rows:
                return moments
            horizon *= 2

    # ------------------------------------------------------------------------------------- what a person is told

    def _refuse_what_is_too_long(self, wanted: Sequence[float]) -> None:
        """Errors: DataError for more passes than are laid out. wanted: about so many targets of each source."""
        for source, there, targets in zip(self.sources, self.targets, wanted, strict=True):
            if targets / there > MOST_REPEATS:
                raise DataError(
                    f"--data_path: the run passes over {name_of(source.paths)} about {targets / there:,.0f} times, and where shares "
                    f"change over the run at most {MOST_REPEATS:,} passes are planned: train less, or name more text"
                )

    def shortage(self) -> Shortage | None:
        """Where the run, to its end as it is planned now, takes more of a source than it may; None: nowhere.

        What lies before the last move is trained, so only what is left counts. It grows with the rows that are left.
        """
        plan = self.plan(0)
        said = []
        fits = 1.0
        trained = self.given(plan, self.moves[-1].row if self.moves else 0)
        for source, before, whole in zip(self.sources, trained, self.given(plan, plan.n_rows), strict=True):
            if whole.passes <= max(source.repeat, before.passes):
                continue
            times = math.ceil(whole.passes)
            said.append(
                f"{name_of(source.paths)} is passed over {whole.passes:,.2f} times where {source.repeat:g} may be (x{times})"
            )
            fits = min(fits, (source.repeat - before.passes) / (whole.passes - before.passes))
        return Shortage("; ".join(said), max(fits, 0.0)) if said else None

    def given(self, plan: MixedPlan, rows: int) -> list[Given]:
        """Of each source in the first rows of a plan."""
        targets = plan.source_targets(0, rows)
        return [Given(of_source, of_source / there) for of_source, there in zip(targets, self.targets, strict=True)]

    def given_before(self, epoch: int) -> list[Given]:
        """Of each source in all epochs before one."""
        if self.is_of_run:
            # The run is one epoch.
            plan = self.plan(0)
            return self.given(plan, plan.n_rows if epoch else 0)
        # The arcs of the epochs follow each other, so together they are one, round and round.
        given = []
        for i, quota in enumerate(self._quotas([1.0] * len(self.sources))):
            rounds, rest = divmod(epoch * quota, self.targets[i])
            targets = rounds * self.targets[i] + sum_of_targets(self.store, self._arc(i, 0, rest), self.most_targets)
            given.append(Given(targets, targets / self.targets[i]))
        return given

    def layout(self) -> dict[str, object]:
        """What a resume must not change."""
        shares = []
        for curve in self.curves:
            shares.append([list(point) for point in curve.points])
        layout: dict[str, object] = {"shares": shares, "repeats": [source.repeat for source in self.sources]}
        if self.is_of_run:
            # A run that ends after some updates may be given more of them, see `Move`.
            layout["epochs"] = self.length.epochs if self.length.rows is None else 0
        return layout


def in_order(
    moments: Sequence[np.ndarray], taken: Sequence[int] | None = None, n_rows: int | None = None
) -> tuple[Ints, Ints]:
    """(source, uint16; number among the rows of that source, uint32) of rows in the order of their moments.

    moments: of each source's rows from its row number taken[i] on. n_rows: as many as come first; None: all.
    """
    sources = [np.empty(0, dtype=np.uint16)]
    numbers = [np.empty(0, dtype=np.uint32)]
    for i, of_source in enumerate(moments):
        first = taken[i] if taken is not None else 0
        sources.append(np.full(len(of_source), i, dtype=np.uint16))
        numbers.append(np.arange(first, first + len(of_source), dtype=np.uint32))
    # Stable: rows of one moment come in the order of the sources. Rounded, since the last bits of a moment may be other ones on
    # another kind of processor, and sources of equal shares have many moments in common.
    order = np.argsort(np.round(np.concatenate([np.empty(0), *moments]), 12), kind="stable")[:n_rows]
    return np.concatenate(sources)[order], np.concatenate(numbers)[order]
