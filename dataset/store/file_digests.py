"""SHA-256 of the data files, remembered in `hashes.json` as long as a file does not change.

`hashes.json` is {"files": [[path, size, times and inode, SHA-256], ...], "sha256": of these}. A wrong digest in it would
give the data another identity, so one that is damaged in any way is ignored, and the files are read again.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import Timeout

from common.errors import DataError
from common.files import atomic_file, file_digest
from common.locks import file_lock
from common.notices import announce
from dataset.reading.file_kinds import identity_suffix
from dataset.reading.remote import DataFile, RemoteFile
from dataset.store.format import digest_of_json, read_small_json

# Beyond the coarsest time stamps that a file system gives (2 s).
SETTLED_S = 3.0
# Reading that much again takes longer than SETTLED_S.
WAIT_FROM_BYTES = 256 << 20
# What the entries of a million files take.
MOST_HASHES_BYTES = 256 << 20
# A shard writes its digests of small files together.
NOTE_EVERY_S = 3.0


# Path, size, time of the last write, time of the last change of any kind (both in ns), inode.
Stats = tuple[str, int, int, int, int]


def stats_of(files: Sequence[DataFile]) -> list[Stats]:
    """What changes when a file does, as far as the file system tells."""
    stats = []
    for file in files:
        if isinstance(file, RemoteFile):
            # One version for as long as it is read, see remote.py: the last number stands for it.
            stats.append((str(file), file.size, 0, 0, int(file.digest[:12], 16)))
            continue
        stat = file.stat()
        stats.append((str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return stats


def settled_stats(files: Sequence[DataFile], places: list[Path]) -> list[Stats]:
    """`stats_of`, after a short wait where large files were written just now.

    A digest is remembered for a file whose times lie SETTLED_S before it was read: whoever writes to it later gets
    other times. A file that is younger would be read again at the next start. That costs nothing for small ones; for
    large ones it costs more than to wait until they are old enough.
    """
    stats = stats_of(files)
    known = _known_digests(places)
    new = [stat for stat in stats if stat not in known]
    if sum(size for _, size, *_ in new) < WAIT_FROM_BYTES:
        return stats
    age = time.time() - max(_last_change(stat) for stat in new)
    if 0 <= age < SETTLED_S:
        time.sleep(SETTLED_S - age + 0.01)
        return stats_of(files)
    return stats


def _last_change(stat: Stats) -> float:
    """Seconds since 1970 of the last write, as far as it cannot be set by hand: POSIX's change time."""
    _, _, modified, changed, _ = stat
    # Windows' st_ctime is the time of creation.
    return (modified if os.name == "nt" else changed) / 1e9


def content_stats(stats: list[Stats]) -> list[tuple[str, int, int]]:
    """Those of `stats_of` that a chmod or a new link leaves alone."""
    return [(path, size, modified) for path, size, modified, _, _ in stats]


def _known_digests(places: list[Path]) -> dict[Stats, str]:
    """{stat of a file: its SHA-256} from the hashes.json of each place; whatever is no such entry is ignored."""
    known: dict[Stats, str] = {}
    for place in places:
        for entry in _read_hashes(place):
            path, size, modified, changed, inode, digest = entry
            known[(path, size, modified, changed, inode)] = digest
    return known


def _read_hashes(place: Path) -> list[list[Any]]:
    """The entries of a hashes.json: [path, size, times and inode of a file, its SHA-256]; none where it is damaged."""
    content = read_small_json(place / "hashes.json", MOST_HASHES_BYTES)
    if not isinstance(content, dict):
        return []
    entries = content.get("files")
    if not isinstance(entries, list) or content.get("sha256") != digest_of_json(entries):
        return []
    return [entry for entry in entries if _is_hash_entry(entry)]


def _is_hash_entry(entry: object) -> bool:
    if not (isinstance(entry, list) and len(entry) == 6):
        return False
    path, *numbers, digest = entry
    if not all(type(number) is int for number in numbers):
        return False
    return isinstance(path, str) and isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) is not None


def hash_files(
    files: Sequence[DataFile], stats: list[Stats], places: list[Path], shard: tuple[int, int] | None = None
) -> tuple[list[tuple[str, str]], bool]:
    """(suffix, SHA-256 of the content) of each file, remembered or read, and whether any was read.

    shard=(k, n): other processes may be reading the same files for their parts. This one begins with every n-th file,
    notes each digest in the first place at once, and looks for the notes of the others before it reads one of theirs.
    """
    known = _known_digests(places)
    for file, stat in zip(files, stats, strict=True):
        if isinstance(file, RemoteFile):
            known[stat] = file.digest
    unread = [i for i, stat in enumerate(stats) if stat not in known]
    if shard is None:
        for i in unread:
            known[stats[i]] = sha256_of_file(files[i])
    else:
        _hash_in_turns(files, stats, places, unread, known, shard)
    data = [(identity_suffix(file), known[stat]) for file, stat in zip(files, stats, strict=True)]
    return data, bool(unread)


def _hash_in_turns(
    files: Sequence[DataFile],
    stats: list[Stats],
    places: list[Path],
    unread: list[int],
    known: dict[Stats, str],
    shard: tuple[int, int],
) -> None:
    """Adds the digests of the `unread` files to `known`; see `hash_files`."""
    k, n = shard
    own = [i for i in unread if i % n == k - 1]
    theirs = [i for i in unread if i % n != k - 1]
    notes = _SharedNotes(places)
    busy = []
    for i in own + theirs:
        try:
            known[stats[i]] = _take_turns(files[i], stats[i], notes, wait=False)
        except Timeout:
            busy.append(i)
    for i in busy:
        known[stats[i]] = _take_turns(files[i], stats[i], notes, wait=True)
    notes.write()


class _SharedNotes:
    """What processes that make shards of one corpus tell each other in hashes.json."""

    def __init__(self, places: list[Path]) -> None:
        self.places = places
        self.known: dict[Stats, str] = {}
        # What hashes.json was when it was read last.
        self.read_at: list[tuple[int, ...]] = []
        self.unwritten: list[tuple[Stats, tuple[str, str]]] = []
        self.first_hashed_at = 0.0
        self.written_at = time.monotonic()

    def digest_of(self, stat: Stats) -> str | None:
        """What another process has noted by now."""
        now = [_version(place / "hashes.json") for place in self.places]
        if now != self.read_at:
            self.known = _known_digests(self.places)
            self.read_at = now
        return self.known.get(stat)

    def add(self, stat: Stats, suffix: str, digest: str, hashed_at: float) -> None:
        """Note the digest of a file that was read from `hashed_at` on; for small files not at once."""
        if not self.unwritten:
            self.first_hashed_at = hashed_at
        self.unwritten.append((stat, (suffix, digest)))
        if stat[1] >= WAIT_FROM_BYTES or time.monotonic() - self.written_at > NOTE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Let the others know what is noted."""
        stats = [stat for stat, _ in self.unwritten]
        data = [entry for _, entry in self.unwritten]
        if data:
            remember_hashes(stats, data, self.places[0], self.first_hashed_at)
        self.unwritten = []
        self.written_at = time.monotonic()


def _version(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _take_turns(file: DataFile, stat: Stats, notes: _SharedNotes, wait: bool) -> str:
    """The digest that another process has noted, or else that of the file, noted for the others.

    Of a large file one process at a time makes the digest. The others wait and take it over, which is faster than if
    all of them read it from one disk. Errors: Timeout where another process is at it and `wait` is false.
    """
    if stat[1] < WAIT_FROM_BYTES:
        return _noted_or_hashed(file, stat, notes)
    name = hashlib.sha256(stat[0].encode("utf-8", "surrogateescape")).hexdigest()[:16]
    lock = file_lock(notes.places[0] / f".digest-{name}.lock")
    if wait:
        announce(f"waiting for another process that reads {file}")
    with lock.acquire(timeout=-1 if wait else 0):
        return _noted_or_hashed(file, stat, notes)


def _noted_or_hashed(file: DataFile, stat: Stats, notes: _SharedNotes) -> str:
    """See `_take_turns`."""
    noted = notes.digest_of(stat)
    if noted is not None:
        return noted
    hashed_at = time.time()
    digest = sha256_of_file(file)
    notes.add(stat, identity_suffix(file), digest, hashed_at)
    return digest


def remember_hashes(stats: list[Stats], data: list[tuple[str, str]], place: Path, hashed_at: float) -> None:
    """Adds to hashes.json, if it can. Not files touched just before `hashed_at`, when the first of them began to be read:
    one more write could keep the time stamp."""
    paths = {stat[0] for stat in stats}
    new = []
    for stat, (_, digest) in zip(stats, data, strict=True):
        if _last_change(stat) < hashed_at - SETTLED_S:
            new.append([*stat, digest])
    # Processes that make shards note their digests at the same time; what one of them loses is read again.
    with contextlib.suppress(OSError), file_lock(place / ".hashes.lock").acquire(timeout=10):
        old = [entry for entry in _read_hashes(place) if entry[0] not in paths]
        entries = old + new
        content = json.dumps({"files": entries, "sha256": digest_of_json(entries)})
        with atomic_file(place / "hashes.json") as file:
            file.write(content.encode())


def sha256_of_file(file: DataFile) -> str:
    """Errors: DataError, where a library would raise an OSError."""
    assert isinstance(file, Path), "what lies elsewhere is known by its version"
    try:
        return file_digest(file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from None
