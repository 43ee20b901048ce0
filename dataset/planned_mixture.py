"""Shares over a whole run: how long the run is, how often it passes over each source, and the rows in their order."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from common.errors import DataError
from dataset.mixed_plan import MixedPlan, Move, SourceRows, from_the_start
from dataset.packing import RowPlan
from dataset.shares import Curve, Point, Source, name_of
from dataset.sources import Circle, MostTargets
from dataset.store.interface import Documents, Ints

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

    sources: which ones, and how often, for a person. fits: of the rows behind the last move of its end, the part that the
    sources have enough for.
    """

    sources: str
    fits: float


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
    for a source without documents.
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
        if length.rows is None:
            # The last pass is known only now.
            self._wanted = self._targets_of_run()
            self.rows = [SourceRows(self._pass_of(i, wanted)) for i, wanted in enumerate(self._wanted)]
        moves = [] if length.rows is None else [from_the_start(length.rows)]
        self.plan = MixedPlan(store.offsets, self.rows, self.curves, moves)

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
            # Each plan of a run has random numbers of its own.
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
        said = []
        fits = 1.0
        for source, before, whole in zip(self.sources, self.told(row), self.told(), strict=True):
            if whole.passes <= max(source.repeat, before.passes):
                continue
            times = math.ceil(whole.passes)
            said.append(
                f"{name_of(source.paths)} is passed over {whole.passes:.2f} times where {source.repeat:g} may be (x{times})"
            )
            fits = min(fits, (source.repeat - before.passes) / (whole.passes - before.passes))
        return Shortage("; ".join(said), max(fits, 0.0)) if said else None

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
