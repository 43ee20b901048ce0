"""Files and folders that were fetched from elsewhere, on a disk that has room for some of them.

A cache is a folder that processes share without a word. Three rules keep it whole, whatever is killed when:

1. An entry is filled under another name and gets its own by one rename. So what has the name of an entry is complete.
2. One process at a time fetches an entry; it holds a lock that ends with the process. What a killed one has left has the
   name of a temporary whose lock nobody holds: the next one that needs room removes it.
3. Before anything is fetched there is room for all of it. What is under way counts with its whole size, which its name
   tells. The entries that were used least lately go first.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from common.errors import DataError
from common.files import remove, sync_folder

if TYPE_CHECKING:
    from filelock import BaseFileLock

Opened = TypeVar("Opened")
# Writes an entry, a file or a folder, at the path that it is given.
Fill = Callable[[Path], None]

# So many lock files stand for all entries: two entries that share one are fetched one after the other.
LOCKS = 64


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

    def use(self, name: str, n_bytes: int, fill: Fill, opened: Callable[[Path], Opened]) -> Opened:
        """opened(path of the entry), fetched now if it is not there.

        name: of a file, unique for the content. n_bytes: as many as `fill` writes. What `opened` returns must not need the
        path any more: the entry may go at any time. Errors: DataError where the cache is too small, and those of `fill`.
        """
        while True:
            path = self.folder / name
            try:
                os.utime(path)
            except FileNotFoundError:
                self._fetch(name, n_bytes, fill, wait=True)
            # Between these lines another process may have needed the room.
            with contextlib.suppress(FileNotFoundError):
                return opened(path)

    def prefetch(self, name: str, n_bytes: int, fill: Fill) -> None:
        """Fetch the entry unless it is there or under way."""
        if not (self.folder / name).exists():
            self._fetch(name, n_bytes, fill, wait=False)

    def _fetch(self, name: str, n_bytes: int, fill: Fill, wait: bool) -> None:
        """Make the entry. wait: for another process that fetches it; otherwise it is left to that one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Its owner is known by the lock, and its size by the name: see the rules above.
        temporary = self.folder / f".tmp-{n_bytes}-{name}"
        with contextlib.suppress(TimeoutError), self._lock_of(name).acquire(timeout=-1 if wait else 0):
            if (self.folder / name).exists():
                return
            with _lock(self.folder / ".room.lock"):
                self._make_room(name, n_bytes)
                # From here on it counts.
                temporary.mkdir()
            try:
                fill(temporary / name)
                os.rename(temporary / name, self.folder / name)
                sync_folder(self.folder)
            finally:
                remove(temporary)

    def _lock_of(self, name: str) -> "BaseFileLock":
        return _lock(self.folder / f".{_lock_number(name)}.lock")

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
        try:
            with self._lock_of(name).acquire(timeout=0):
                return True
        except TimeoutError:
            return False

    def _entries(self) -> Iterator[Entry]:
        """What is complete."""
        for entry in os.scandir(self.folder):
            if entry.name.startswith("."):
                continue
            path = Path(entry.path)
            stat = entry.stat()
            n_bytes = stat.st_size
            if entry.is_dir():
                n_bytes = sum(file.stat().st_size for file in path.iterdir())
            yield Entry(path, n_bytes, stat.st_mtime_ns)


def _lock(path: Path) -> "BaseFileLock":
    # Loaded where it is needed: the flags of every trainer import this module, and its loading takes a tenth of a second.
    from filelock import FileLock

    return FileLock(path)


def _lock_number(name: str) -> int:
    return hashlib.sha256(name.encode()).digest()[0] % LOCKS


def _remove_whole(path: Path) -> None:
    """Nobody must see half of a folder: it loses its name first."""
    gone = path.with_name(f".gone-{path.name}")
    remove(gone)
    # Windows keeps the name of what a process has open. It stays, and goes another time.
    with contextlib.suppress(PermissionError):
        os.rename(path, gone)
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
