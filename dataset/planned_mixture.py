"""Shares over a whole run: how long the run is, how often it passes over each source, and the rows in their order."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from common.errors import DataError
from common.wording import counted
from dataset.mixed_plan import MixedPlan, Move, SourceRows, from_the_start
from dataset.packing import RowPlan
from dataset.shares import MOST_REPEATS, Curve, Point, Source, name_of
from dataset.sources import Circle, MostTargets
from dataset.store.interface import Documents, Ints

# A plan of more rows is refused: it holds some 10 bytes a row, and takes up to 100 while it is made.
MOST_ROWS = 1 << 26
# So many times what the sources allow is refused before any row is laid out. Less may be right: the last updates of a resume may
# have many more rows than those that are trained, as on more GPUs.
FAR_TOO_MUCH = 32
# Where a number of updates is told that would fit: room for what is only known once the rows are laid out.
ROOM = 0.998
# And room for what an estimate may be off by.
ROOM_OF_ESTIMATE = 0.98

# The plan of some documents: (their numbers, what it draws its random numbers by).
MakePlan = Callable[[Ints, int], RowPlan]


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


class SourceTold(NamedTuple):
    """What a run takes of a source, for the lines and the record of a run."""

    targets: int
    passes: float


class Shortage(NamedTuple):
    """A run that passes over some sources more often than they allow.

    sources: which ones, and how often, for a person. passes: over the one that comes most often. fits: of the rows behind the
    last move of its end, the part that the sources have enough for.
    """

    sources: str
    passes: float
    fits: float

    def told(self, updates: int, done: int) -> str:
        """For a run of so many updates, of which some are done, with what to do about it."""
        fits = done + int((updates - done) * self.fits * ROOM)
        advice = []
        if self.passes <= MOST_REPEATS:
            advice.append("allow more passes, as in PATH:SHARE:x2 (repeat: 2 in a --mixture file)")
        if fits > done:
            advice.append(f"train at most {counted(fits, 'update')}")
        return (
            f"--data_path: too little text for {counted(updates, 'update')}: {self.sources}; "
            f"{', or '.join(advice) or 'name more text'}"
        )


def is_planned(sources: Sequence[Source]) -> bool:
    """Whether the shares are those of the whole run, and not of each epoch by itself."""
    return any(source.changes or source.repeat != 1 for source in sources)


class PlannedMixture:
    """The mixture of a run whose shares change, or whose sources may come several times.

    A run of some passes is the longest in which no source comes more often than its `repeat` times the passes: the source
    that is scarcest, beside its share, is used up. Each of its documents comes as often, and each document of another
    source comes so often or once more, as the last pass over that source has no room for all.

    sources: all with shares. documents: of each source, ascending numbers in `store`. make_plan: see MakePlan.
    max_targets: see Circle. A run of some updates may ask for more than the sources have: see `shortage`. Errors: DataError
    for a source without documents, and for a run that is too long to be laid out.
    """

    def __init__(
        self,
        store: Documents,
        sources: Sequence[Source],
        documents: Sequence[Ints],
        make_plan: MakePlan,
        seed: int,
        length: RunLength,
        max_targets: MostTargets = None,
    ) -> None:
        self.store = store
        self.sources = sources
        self.documents = documents
        self.make_plan = make_plan
        self.seed = seed
        self.length = length
        self.max_targets = max_targets
        self.curves = normal_curves(sources)
        self.rows = [SourceRows(self._pass_of(i)) for i in range(len(sources))]
        # Of the whole source.
        self.targets = []
        for source, rows in zip(sources, self.rows, strict=True):
            rows.lay_out(0)
            if not rows.n_rows:
                raise DataError(f"{name_of(source.paths)} has a share but no document to draw")
            first = rows.plan(0)
            self.targets.append(first.row_targets(0, first.n_rows))
        # Every row of the run is laid out below.
        self._refuse_what_is_too_long()
        if length.rows is None:
            # The last pass is known only now.
            self._wanted = self._targets_of_run()
            self.rows = [SourceRows(self._pass_of(i, wanted)) for i, wanted in enumerate(self._wanted)]
        moves = [] if length.rows is None else [from_the_start(length.rows)]
        self.plan = MixedPlan(store.offsets, self.rows, self.curves, moves)

    def _refuse_what_is_too_long(self) -> None:
        """Errors: DataError for a run that asks for far more than its sources allow, or has more rows or passes than are laid
        out. What is known of the first pass tells it, as the others have about as many rows."""
        length = self.length
        if length.rows is None:
            targets = [float(wanted) for wanted in self._targets_of_run()]
        else:
            # For each target of the run, of whichever source: the shares sum to 1.
            rows_of_target = 0.0
            for curve, rows in zip(self.curves, self.rows, strict=True):
                rows_of_target += curve.area(1.0) / rows.mean_targets
            targets = [length.rows / rows_of_target * curve.area(1.0) for curve in self.curves]
        n_rows = 0.0
        told = []
        for rows, there, wanted in zip(self.rows, self.targets, targets, strict=True):
            n_rows += wanted / rows.mean_targets
            told.append(SourceTold(round(wanted), wanted / there))
        if length.rows is not None:
            shortage = self._shortage([SourceTold(0, 0.0)] * len(told), told)
            if shortage is not None and FAR_TOO_MUCH * shortage.fits < 1:
                surely = shortage._replace(fits=ROOM_OF_ESTIMATE * shortage.fits)
                raise DataError(surely.told(length.updates, done=0))
        passes = [of_source.passes for of_source in told]
        often = max(passes)
        source = name_of(self.sources[passes.index(often)].paths)
        shorter = "train fewer epochs or allow fewer passes" if length.rows is None else "train fewer updates"
        if often > MOST_REPEATS:
            raise DataError(
                f"--data_path: the run passes over {source} about {often:,.0f} times, and where shares change over the run at most "
                f"{MOST_REPEATS:,} passes are planned: {shorter}, or name more text"
            )
        if n_rows > MOST_ROWS:
            raise DataError(
                f"--data_path: the run has about {n_rows:,.0f} rows, and where shares change over the run at most "
                f"{MOST_ROWS:,} are planned: {shorter}, or give a larger --max_seq_len"
            )

    def _targets_of_run(self) -> list[int]:
        """Of each source in a run of some passes."""
        sizes = []
        for i, source in enumerate(self.sources):
            most = source.repeat * self.length.epochs * self.targets[i]
            sizes.append(most / self.curves[i].area(1.0))
        size = min(sizes)
        return [max(1, round(size * curve.area(1.0))) for curve in self.curves]

    def _pass_of(self, i: int, wanted: int | None = None) -> Callable[[int], RowPlan | None]:
        """The plans of the passes over a source: whole ones without an end, or until they have `wanted` targets."""

        def make(number: int) -> RowPlan | None:
            # Each pass over each source has random numbers of its own. Of other sources the same pass has other numbers: that is
            # another mixture, which a resume refuses by its data or its shares.
            stream = number * len(self.sources) + i
            if wanted is None:
                return self.make_plan(self.documents[i], stream)
            left = wanted - number * self.targets[i]
            if left <= 0:
                return None
            if left >= self.targets[i]:
                return self.make_plan(self.documents[i], stream)
            circle = Circle(self.store, self.documents[i], self.seed, i, self.max_targets)
            return self.make_plan(circle.arc(0, left, self.targets[i]), stream)

        return make

    def shortage(self) -> Shortage | None:
        """Where the run, to its end as it is planned now, takes more of a source than it may; None: nowhere.

        What lies before the last move is trained, so only what is left counts. It grows with the rows that are left.
        """
        row = self.plan.moves[-1].row if self.plan.moves else 0
        return self._shortage(self.told(row), self.told())

    def _shortage(self, trained: Sequence[SourceTold], in_all: Sequence[SourceTold]) -> Shortage | None:
        """The same, by what is taken of each source before the last move and in the whole run."""
        said = []
        passes = 0.0
        fits = 1.0
        for source, before, whole in zip(self.sources, trained, in_all, strict=True):
            if whole.passes <= max(source.repeat, before.passes):
                continue
            times = math.ceil(whole.passes)
            said.append(
                f"{name_of(source.paths)} is passed over {whole.passes:,.2f} times where {source.repeat:g} may be (x{times})"
            )
            passes = max(passes, whole.passes)
            fits = min(fits, (source.repeat - before.passes) / (whole.passes - before.passes))
        return Shortage("; ".join(said), passes, max(fits, 0.0)) if said else None

    def replan(self, moves: Sequence[Move]) -> None:
        """Take over where the end of the run has moved, see Move."""
        if tuple(moves) != self.plan.moves:
            self.plan = MixedPlan(self.store.offsets, self.rows, self.curves, moves)

    def layout(self) -> dict[str, object]:
        """What a resume must not change."""
        shares = []
        for source in self.sources:
            shares.append([list(point) for point in source.shares or ()])
        # A run that ends after some updates may be given more of them, see `Move`.
        epochs = self.length.epochs if self.length.rows is None else 0
        return {"shares over the run": shares, "repeats": [source.repeat for source in self.sources], "epochs": epochs}

    def told(self, rows: int | None = None) -> list[SourceTold]:
        """Of each source in the first so many rows; None: in all."""
        rows = self.plan.n_rows if rows is None else rows
        targets = self.plan.source_targets(0, rows)
        told = []
        for of_source, there in zip(targets, self.targets, strict=True):
            told.append(SourceTold(of_source, of_source / there))
        return told


def normal_curves(sources: Sequence[Source]) -> list[Curve]:
    """The shares of the sources, which sum to 1."""
    curves = [Curve(source.shares or ()) for source in sources]
    total = sum(curve.area(1.0) for curve in curves)
    normal = []
    for source in sources:
        points = [Point(progress, share / total) for progress, share in source.shares or ()]
        normal.append(Curve(points))
    return normal


def documents_of_sources(documents: Ints, bounds: Sequence[int]) -> list[Ints]:
    """`documents` (ascending) by source. bounds: how many documents there are before each source, and in all."""
    cuts = np.searchsorted(documents, bounds).tolist()
    return [documents[first:end] for first, end in zip(cuts[:-1], cuts[1:], strict=True)]
