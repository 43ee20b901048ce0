"""The limits on memory and processors that Linux sets for a group of processes: containers, systemd units, jobs of a
cluster.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SYSTEM_ROOT = Path("/")


class Names(NamedTuple):
    """What the files on memory are called in a version of cgroups. cache: of memory.stat, what the system gives up when asked."""

    limit: str
    used: str
    cache: str


V1 = Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = Names("memory.max", "memory.current", "inactive_file")


def memory_limit(root: Path = SYSTEM_ROOT) -> int | None:
    """Bytes that this process's groups may use in all; None: no limit. root: of /proc and /sys."""
    limits = [limit for limit, _, _ in _groups(root)]
    return min(limits, default=None)


def memory_left(root: Path = SYSTEM_ROOT) -> int | None:
    """Bytes that this process's groups may still take; None: no limit. root: of /proc and /sys."""
    left = []
    for limit, folder, names in _groups(root):
        used = _number(folder / names.used) or 0
        # Pages of files that nobody has in use count as used, and make room as soon as somebody asks for memory.
        left.append(max(limit - used + _statistic(folder / "memory.stat", names.cache), 0))
    return min(left, default=None)


def processor_limit(root: Path = SYSTEM_ROOT) -> float | None:
    """Processors that this process's groups may use at a time, as 1.5; None: no limit. root: of /proc and /sys."""
    limits = []
    for folder, version in _folders(root, "cpu"):
        if version == 2:
            # As `150000 100000`, microseconds of each period, or `max 100000`.
            quota, period = (*_words(folder / "cpu.max"), "", "")[:2]
        else:
            quota = "".join(_words(folder / "cpu.cfs_quota_us"))
            period = "".join(_words(folder / "cpu.cfs_period_us"))
        # Version 1 says -1 where there is no limit.
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _groups(root: Path) -> Iterator[tuple[int, Path, Names]]:
    """(limit, folder, names of its files) of each group that has a limit on memory."""
    for folder, version in _folders(root, "memory"):
        names = V2 if version == 2 else V1
        limit = _number(folder / names.limit)
        if limit is not None:
            yield limit, folder, names


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """(folder, version) of the process's own group and of those around it, as far as a controller has such."""
    for top, path, version in _places(root, controller):
        # Within a container the path may be the host's, which is not there; then the top is the container's own group.
        folders = {top}
        for depth in range(len(path.parts)):
            folders.add(top.joinpath(*path.parts[: depth + 1]))
        for folder in sorted(folders):
            yield folder, version


def _places(root: Path, controller: str) -> Iterator[tuple[Path, Path, int]]:
    """(folder of the controller, path of this process's group below it, version) of the versions that are in use."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        # Number of the hierarchy, its controllers, path; version 2 has the number 0 and no controllers.
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        below = Path(path.lstrip("/"))
        if ".." in below.parts:
            below = Path()
        if controller in controllers.split(","):
            yield mounted / controller, below, 1
        elif line.startswith("0::"):
            yield mounted, below, 2


def _words(path: Path) -> list[str]:
    """Of a file; none where it cannot be read."""
    try:
        return path.read_text().split()
    except (OSError, UnicodeDecodeError):
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none, as in `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    """The number behind a name in a file of lines `name number`; 0 where it is not there."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    for line in lines:
        key, _, number = line.partition(" ")
        if key == name and number.strip().isdigit():
            return int(number)
    return 0
