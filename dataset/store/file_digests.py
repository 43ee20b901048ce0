"""SHA-256 of the data files, remembered in `hashes.json` as long as a file does not change.

`hashes.json` is {"files": [[path, size, times and inode, SHA-256], ...], "sha256": of these}. A wrong digest in it would
give the data another identity, so one that is damaged in any way is ignored, and the files are read again.
"""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.files import atomic_file, file_digest
from common.locks import file_lock
from dataset.reading.file_kinds import identity_suffix
from dataset.store.format import digest_of_json, read_small_json

# Beyond the coarsest time stamps that a file system gives (2 s).
SETTLED_S = 3.0
# Reading that much again takes longer than SETTLED_S.
WAIT_FROM_BYTES = 256 << 20
# What the entries of a million files take.
MOST_HASHES_BYTES = 256 << 20


# Path, size, time of the last write, time of the last change of any kind (both in ns), inode.
Stats = tuple[str, int, int, int, int]


def stats_of(files: Sequence[Path]) -> list[Stats]:
    """What changes when a file does, as far as the file system tells."""
    stats = []
    for file in files:
        stat = file.stat()
        stats.append((str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return stats


def settled_stats(files: Sequence[Path], places: list[Path]) -> list[Stats]:
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
    """{stat of a file: its SHA-256} from the hashes.json of each place."""
    known: dict[Stats, str] = {}
    for place in places:
        for entry in _read_hashes(place):
            path, size, modified, changed, inode, digest = entry
            known[(path, size, modified, changed, inode)] = digest
    return known


def _read_hashes(place: Path) -> list[list[Any]]:
    """The entries of a hashes.json: [path, size, times and inode of a file, its SHA-256]; none where it is damaged."""
    content = read_small_json(place / "hashes.json", MOST_HASHES_BYTES)
    if not isinstance(content, dict) or content.get("sha256") != digest_of_json(content.get("files")):
        return []
    entries: list[list[Any]] = content["files"]
    return entries


def hash_files(files: Sequence[Path], stats: list[Stats], places: list[Path]) -> tuple[list[tuple[str, str]], bool]:
    """(suffix, SHA-256 of the content) of each file, remembered or read, and whether any was read."""
    known = _known_digests(places)
    unread = [i for i, stat in enumerate(stats) if stat not in known]
    for i in unread:
        known[stats[i]] = sha256_of_file(files[i])
    data = [(identity_suffix(file), known[stat]) for file, stat in zip(files, stats, strict=True)]
    return data, bool(unread)


def remember_hashes(stats: list[Stats], data: list[tuple[str, str]], place: Path, hashed_at: float) -> None:
    """Adds to hashes.json, if it can. Not files touched just before `hashed_at`, when the first of them began to be read:
    one more write could keep the time stamp."""
    paths = {stat[0] for stat in stats}
    new = []
    for stat, (_, digest) in zip(stats, data, strict=True):
        if _last_change(stat) < hashed_at - SETTLED_S:
            new.append([*stat, digest])
    with contextlib.suppress(OSError), file_lock(place / ".hashes.lock").acquire(timeout=10):
        old = [entry for entry in _read_hashes(place) if entry[0] not in paths]
        entries = old + new
        content = json.dumps({"files": entries, "sha256": digest_of_json(entries)})
        with atomic_file(place / "hashes.json") as file:
            file.write(content.encode())


def sha256_of_file(file: Path) -> str:
    """Errors: DataError, where a library would raise an OSError."""
    try:
        return file_digest(file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from None
