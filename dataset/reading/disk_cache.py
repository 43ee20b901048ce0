"""Files that were fetched from elsewhere, on a disk that has room for some of them.

A cache is a folder that processes share without a word. Three rules keep it whole, whatever is killed when:

1. An entry is filled under another name and gets its own by one rename. So what has the name of an entry is complete.
2. One process at a time fetches an entry; it holds a lock that ends with the process. What a killed one has left has the
   name of a temporary whose lock nobody holds: the next one that needs room removes it.
3. Before anything is fetched there is room for all of it. What is under way counts with its whole size, which its name
   tells. The entries that were used least lately go first.

A complete entry has the time of last write WRITTEN, which no later write leaves as it is; when it was used is its time of
last access. So whoever opens it sees without reading it that nobody wrote to it since. What has another size or time is
compared with its digest again, or fetched again where there is none.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from common.errors import DataError
from common.files import remove, sync_folder
from common.locks import file_lock

if TYPE_CHECKING:
    from filelock import FileLock

Opened = TypeVar("Opened")
# A moment that is long ago, in ns; whole and even seconds, since some file systems count in steps of two.
WRITTEN = 10**18

# So many lock files stand for all entries: two entries that share one are fetched one after the other.
LOCKS = 64


class Wanted(NamedTuple):
    """A file that is asked for.

    name: unique for the content. fill: writes so many bytes at the path that it is given. is_whole: whether the file at a path
    has the content; None: only its size is known.
    """

    name: str
    n_bytes: int
    fill: Callable[[Path], None]
    is_whole: Callable[[Path], bool] | None = None


class Entry(NamedTuple):
    """What lies in a cache. used: when it was last asked for, in ns."""

    path: Path
    n_bytes: int
    used: int


@dataclass(frozen=True)
class DiskCache:
    """At most `limit_bytes` of entries in `folder`. Processes that share a folder should agree on the limit."""

    folder: Path
    limit_bytes: int

    def use(self, wanted: Wanted, opened: Callable[[Path], Opened]) -> Opened:
        """opened(path of the entry), fetched now if it is not there.

        What `opened` returns must not need the path any more: the entry may go at any time. Errors: DataError where the cache is
        too small, and those of `fill`.
        """
        path = self.folder / wanted.name
        while True:
            if not self._is_there(wanted):
                self._fetch(wanted, wait=True)
            # Between these lines another process may have needed the room.
            with contextlib.suppress(FileNotFoundError):
                _mark_as_used(path)
                return opened(path)

    def has(self, wanted: Wanted) -> bool:
        """Whether there is such an entry; it is compared with what it should be when it is used."""
        return (self.folder / wanted.name).exists()

    def fetch(self, wanted: Wanted) -> None:
        """Wait until the entry is there. Errors: as of `use`."""
        self.use(wanted, lambda path: None)

    def prefetch(self, wanted: Wanted) -> None:
        """Fetch the entry unless it is there or under way."""
        if not self.has(wanted):
            self._fetch(wanted, wait=False)

    def _is_there(self, wanted: Wanted) -> bool:
        """Whether the entry is there and has the content that it was given."""
        path = self.folder / wanted.name
        try:
            stat = path.stat()
            if (stat.st_size, stat.st_mtime_ns) == (wanted.n_bytes, WRITTEN):
                return True
            if stat.st_size != wanted.n_bytes or wanted.is_whole is None or not wanted.is_whole(path):
                return False
            _mark_as_used(path)
            return True
        except FileNotFoundError:
            return False

    def _fetch(self, wanted: Wanted, wait: bool) -> None:
        """Make the entry. wait: for another process that fetches it; otherwise it is left to that one."""
        from filelock import Timeout

        self.folder.mkdir(parents=True, exist_ok=True)
        name, n_bytes, fill, _ = wanted
        try:
            held = self._lock_of(name).acquire(timeout=-1 if wait else 0)
        except Timeout:
            return
        # Its owner is known by the lock, and its size by the name: see the rules above.
        temporary = self.folder / f".tmp-{n_bytes}-{name}"
        with held:
            if self._is_there(wanted):
                return
            with file_lock(self.folder / ".room.lock"):
                # What is no longer what was fetched.
                _remove_whole(self.folder / name)
                self._make_room(name, n_bytes)
                # From here on it counts.
                temporary.mkdir()
            try:
                fill(temporary / name)
                _mark_as_used(temporary / name)
                os.replace(temporary / name, self.folder / name)
                sync_folder(self.folder)
            finally:
                remove(temporary)

    def _lock_of(self, name: str) -> "FileLock":
        return file_lock(self.folder / f".{_lock_number(name)}.lock")

    def _make_room(self, name: str, n_bytes: int) -> None:
        """Remove entries until there is room for one more. Errors: DataError where there never is."""
        for gone in self.folder.glob(".gone-*"):
            remove(gone)
        under_way = 0
        for temporary in self.folder.glob(".tmp-*"):
            _, size, other = temporary.name.split("-", 2)
            # This process has the lock of the entry that it fetches: nobody else is at work under it.
            if _lock_number(other) == _lock_number(name) or self._is_abandoned(other):
                remove(temporary)
            else:
                under_way += int(size)
        entries = sorted(self._entries(), key=lambda entry: entry.used)
        total = under_way + sum(entry.n_bytes for entry in entries)
        for entry in entries:
            if total + n_bytes <= self.limit_bytes:
                break
            _remove_whole(entry.path)
            total -= entry.n_bytes
        if total + n_bytes > self.limit_bytes:
            raise DataError(
                f"{self.folder}: {(total + n_bytes) / 1e9:.1f} GB are needed at once where --cache_gb allows "
                f"{self.limit_bytes / 1e9:.1f}; raise it"
            )

    def _is_abandoned(self, name: str) -> bool:
        """Whether nobody fetches this entry any more."""
        from filelock import Timeout

        try:
            with self._lock_of(name).acquire(timeout=0):
                return True
        except Timeout:
            return False

    def _entries(self) -> Iterator[Entry]:
        """What is complete."""
        for entry in os.scandir(self.folder):
            if entry.name.startswith("."):
                continue
            stat = entry.stat()
            yield Entry(Path(entry.path), stat.st_size, stat.st_atime_ns)


def _mark_as_used(path: Path) -> None:
    # What another user has fetched is used all the same.
    with contextlib.suppress(PermissionError):
        os.utime(path, ns=(time.time_ns(), WRITTEN))


def _lock_number(name: str) -> int:
    return hashlib.sha256(name.encode()).digest()[0] % LOCKS


def _remove_whole(path: Path) -> None:
    """Nobody must see half of it: it loses its name first."""
    gone = path.with_name(f".gone-{path.name}")
    # Windows keeps the name of what a process has open. It stays, and goes another time.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        os.replace(path, gone)
        remove(gone)
