"""The limits on memory that Linux sets for a group of processes: containers, systemd units, jobs of a cluster."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class Names(NamedTuple):
    """What the files of a version of cgroups are called. cache: of memory.stat, what the system gives up when asked."""

    limit: str
    used: str
    cache: str


V1 = Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = Names("memory.max", "memory.current", "inactive_file")


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that this process's groups may use in all; None: no limit. root: of /proc and /sys."""
    limits = [limit for limit, _, _ in _groups(root)]
    return min(limits, default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes that this process's groups may still take; None: no limit. root: of /proc and /sys."""
    left = []
    for limit, folder, names in _groups(root):
        used = _number(folder / names.used) or 0
        # Pages of files that nobody has in use count as used, and make room as soon as somebody asks for memory.
        left.append(max(limit - used + _statistic(folder / "memory.stat", names.cache), 0))
    return min(left, default=None)


def _groups(root: Path) -> Iterator[tuple[int, Path, Names]]:
    """(limit, folder, names of its files) of each group that has a limit: the process's own and those around it."""
    for top, path, names in _places(root):
        # Within a container the path may be the host's, which is not there; then the top is the container's own group.
        folders = {top}
        for depth in range(len(path.parts)):
            folders.add(top.joinpath(*path.parts[: depth + 1]))
        for folder in sorted(folders):
            limit = _number(folder / names.limit)
            if limit is not None:
                yield limit, folder, names


def _places(root: Path) -> Iterator[tuple[Path, Path, Names]]:
    """(folder of the controller, path of this process's group below it, names) of the versions that are in use."""
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
        if "memory" in controllers.split(","):
            yield mounted / "memory", below, V1
        elif line.startswith("0::"):
            yield mounted, below, V2


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
