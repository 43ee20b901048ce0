"""The data sources of a run: their shares, which may change over the run, and how often each may be repeated.

On the command line a source is `path:share`; `path:0.7..0.2` gives the shares at the start and end of the run, and
`path:0.3:x4` the maximum number of passes. A file (`--mixture`) can say more, see docs/data.md.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.errors import DataError
from common.settings import absolute, read_plain

# Upper bound: no sum or product overflows.
MAX_SHARE = 1e9
# maximum passes over a source: laying out each takes a millisecond or more at the start
MAX_REPEATS = 1000
# Relative tolerance of the sum of shares between moments: shares are written in a few digits, as thirds in 0.333.
SUM_ERROR = 1e-6
NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
# path:share or path:share..share, either followed by :x and a number. `>` for `..` needs quotes in a shell.
WITH_SHARE = re.compile(rf"(.+):({NUMBER})(?:(?:\.\.|>)({NUMBER}))?(?::x({NUMBER}))?", re.DOTALL)
# Parts of each segment of a curve within which its area is taken as linear: wrong by 2e-6 of the segment at most.
PARTS = 256
# A progress that no run reaches: the moment of rows that never come.
NEVER = 1e6


class Point(NamedTuple):
    """A share at a moment of the run. progress: 0 at the start of the run, 1 at its end."""

    progress: float
    share: float


@dataclass(frozen=True)
class Source:
    """Paths that make one token store.

    shares: of the trained tokens, in any scale, linear between points; two points of one progress are a jump. Constant
    before the first and after the last. None: no share. repeat: maximum passes over it in the run, or in each epoch.
    """

    paths: list[str]
    shares: tuple[Point, ...] | None = None
    repeat: float = 1.0

    @property
    def name(self) -> str:
        """In messages"""
        return self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} and {len(self.paths) - 1} more"

    @property
    def shares_change(self) -> bool:
        """True if the share is not constant over the run."""
        return self.shares is not None and len({point.share for point in self.shares}) > 1


def source_of_argument(argument: str) -> Source:
    """The source of `a.jsonl`, `a.jsonl:0.7`, `a.jsonl:0.7..0.2` or `a.jsonl:0.7:x4`; no share if none is given, or if
    a file has this exact name. Errors: DataError."""
    match = None if os.path.exists(argument) else WITH_SHARE.fullmatch(argument)
    if match is None:
        return Source([argument])
    path, *shares, repeat = match.groups()
    points = [Point(float(i), float(share)) for i, share in enumerate(shares) if share]
    return checked_source([path], points, float(repeat or 1), f"--data_path {argument}")


def checked_source(paths: list[str], points: Sequence[Point], repeat: float, where: str) -> Source:
    """Errors: DataError if the points are not a valid share, or the number of passes is out of range."""
    progress = [point.progress for point in points]
    # A comparison with a NaN is false.
    in_range = all(0 <= point.progress <= 1 and 0 <= point.share <= MAX_SHARE for point in points)
    if not in_range or progress != sorted(progress):
        raise DataError(
            f"{where}: a share is a number from 0 to {MAX_SHARE:g}, and the progress of its points rises from 0 to 1"
        )
    # A jump at the very end has no area either.
    if not points or not Curve(points).area(1.0):
        raise DataError(f"{where}: the share is 0 from start to end: leave the source out")
    if not 1 <= repeat <= MAX_REPEATS:
        raise DataError(f"{where}: repeat is {repeat:g}; 1 to {MAX_REPEATS:,} passes are possible")
    return Source(paths, tuple(points), repeat)


def group_sources(data_path: Sequence[str | Source]) -> list[Source]:
    """The sources of --data_path, one per token store: without shares all paths make one store, so that 300 files of a
    shell glob are one corpus; with shares each path has its own.

    Errors: DataError if only some paths have a share, and if the shares do not fit each other.
    """
    sources = [path if isinstance(path, Source) else source_of_argument(path) for path in data_path]
    without_share = [source.paths[0] for source in sources if source.shares is None]
    if len(without_share) == len(sources):
        return [Source(without_share)]
    if without_share:
        raise DataError(f"--data_path: give every source a share, or none; {without_share[0]} has none")
    check_sums(sources, "--data_path")
    return sources


def check_sums(sources: Sequence[Source], where: str) -> None:
    """Errors: DataError if changing shares do not have the same sum at each moment.

    Constant shares may be in any scale. If the sum changed, shares that are linear in the numbers would not be linear
    in what is trained on, and most often it is a typo.
    """
    if not any(source.shares_change for source in sources):
        return
    # [points, 2] of each source: progress and share
    curves = [np.array(source.shares) for source in sources]
    first = sum(curve[0, 1] for curve in curves)
    for progress in np.unique(np.concatenate(curves)[:, 0]):
        # A jump has two sums, one on each side.
        for beside in (progress - 1e-9, progress + 1e-9):
            total = sum(np.interp(beside, curve[:, 0], curve[:, 1]) for curve in curves)
            if abs(total - first) > SUM_ERROR * max(first, total):
                raise DataError(
                    f"{where}: the shares sum to {first:g} at the start and to {total:g} at {progress:g} of the run; shares that "
                    "change must have the same sum all the time"
                )


class Curve:
    """A share over the progress of a run, and its integral: the share taken so far.

    After the end of the run the share stays constant.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = points
        whole = [Point(0.0, points[0].share), *points, Point(1.0, points[-1].share)]
        parts = np.linspace(0.0, 1.0, PARTS + 1)

        def along(values: np.ndarray) -> np.ndarray:
            """[segments * (PARTS + 1)]: from each point to the next."""
            return (values[:-1, None] * (1 - parts) + values[1:, None] * parts).ravel()

        self.progress = along(np.array([point.progress for point in whole]))
        shares = along(np.array([point.share for point in whole]))
        # area up to each of these points
        self.taken = np.append(0.0, np.cumsum(np.diff(self.progress) * (shares[1:] + shares[:-1]) / 2))
        self.taken = np.append(self.taken, self.taken[-1] + (NEVER - 1) * points[-1].share)
        self.progress = np.append(self.progress, NEVER)

    def area(self, progress: Any) -> Any:
        """The area under the curve from 0 to each `progress`, a number or an array."""
        return np.interp(progress, self.progress, self.taken)

    def where(self, area: np.ndarray) -> np.ndarray:
        """float64: the progress at which each of the areas is reached."""
        return np.interp(area, self.taken, self.progress)

    def text(self) -> str:
        """For messages: `0.7 > 0.2`, with the points in between if there are any."""
        return " > ".join(f"{share:.4g} at {at:.4g}" if 0 < at < 1 else f"{share:.4g}" for at, share in self.points)


def read_mixture(path: Path, folder: str = "") -> list[Source]:
    """The sources of a --mixture file, whose numbers are read as text. Errors: UserError if it is not YAML, DataError
    if it is not a mixture. folder: as in `absolute`, for its paths."""
    content = read_plain(path, "--mixture")
    entries = content.get("sources") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(entries, list) or not entries:
        raise DataError(
            f"--mixture {path}: expected a list `sources:` and nothing else, each with path and share (docs/data.md)"
        )
    sources = []
    for number, entry in enumerate(entries, start=1):
        where = f"--mixture {path}: source {number}"
        try:
            entry = dict(entry)
            paths = entry.pop("path")
            paths = [paths] if isinstance(paths, str) else list(paths)
            share = entry.pop("share")
            repeat = float(entry.pop("repeat", 1))
            if not isinstance(share, list):
                share = [[0, share]]
            points = [Point(float(progress), float(height)) for progress, height in share]
            is_source = not entry and paths and all(isinstance(named, str) and named for named in paths)
        except (KeyError, TypeError, ValueError):
            is_source = False
        if not is_source:
            raise DataError(
                f"{where}: expected path (one or a list), share (a number, or points [progress of the run, share] such as [[0, 0.8], "
                "[1, 0.2]]) and perhaps repeat (a number), and nothing else"
            )
        sources.append(checked_source([absolute(named, folder) for named in paths], points, repeat, where))
    check_sums(sources, f"--mixture {path}")
    return sources
