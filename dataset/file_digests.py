"""SHA-256 of the data files, remembered in `hashes.json` as long as a file does not change."""

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from pathlib import Path

from filelock import FileLock

from dataset.faults import DataError
from dataset.file_kinds import identity_suffix

SETTLED_S = 3.0  # beyond the coarsest time stamps that a file system gives (2 s)
WAIT_FROM_BYTES = 256 << 20  # reading that much again takes longer than SETTLED_S


def stats_of(files: list[Path]) -> list[tuple]:
    """What changes when a file does, as far as the file system tells."""
    stats = [(str(file.resolve()), file.stat()) for file in files]
    return [(path, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for path, s in stats]


def settled_stats(files: list[Path], places: list[Path]) -> list[tuple]:
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


def _last_change(stat: tuple) -> float:
    """Seconds since 1970 of the last write, as far as it cannot be set by hand: POSIX's change time."""
    _, _, modified, changed, _ = stat
    return (modified if os.name == "nt" else changed) / 1e9  # Windows' st_ctime is the time of creation


def content_stats(stats: list[tuple]) -> list[tuple]:
    """Those of `stats_of` that a chmod or a new link leaves alone."""
    return [(path, size, modified) for path, size, modified, _, _ in stats]


def _known_digests(places: list[Path]) -> dict[tuple, str]:
    """{stat of a file: its SHA-256} from the hashes.json of each place; whatever is no such entry is ignored."""
    known = {}
    for place in places:
        for entry in _read_hashes(place):
            *stat, digest = entry
            known[tuple(stat)] = digest
    return known


def _read_hashes(place: Path) -> list[list]:
    """The entries of a hashes.json: [path, size, times and inode of a file, its SHA-256]. Broken ones are left out."""
    try:
        entries = json.loads((place / "hashes.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(entries, list):
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
    files: list[Path], stats: list[tuple], places: list[Path], shard: tuple[int, int] | None = None
) -> tuple[list[tuple[str, str]], bool]:
    """(suffix, SHA-256 of the content) of each file, remembered or read, and whether any was read.

    shard=(k, n): other processes may be reading the same files for their parts. This one begins with every n-th file,
    notes each digest in the first place at once, and looks for the notes of the others before it reads one of theirs.
    """
    known = _known_digests(places)
    unread = [i for i, stat in enumerate(stats) if stat not in known]
    if shard is None:
        for i in unread:
            known[stats[i]] = sha256_of_file(files[i])
    else:
        _hash_in_turns(files, stats, places, unread, known, shard)
    data = [(identity_suffix(file), known[stat]) for file, stat in zip(files, stats, strict=True)]
    return data, bool(unread)


def _hash_in_turns(
    files: list[Path],
    stats: list[tuple],
    places: list[Path],
    unread: list[int],
    known: dict[tuple, str],
    shard: tuple[int, int],
) -> None:
    """Adds the digests of the `unread` files to `known`; see `hash_files`."""
    k, n = shard
    own = [i for i in unread if i % n == k - 1]
    theirs = [i for i in unread if i % n != k - 1]
    for i in own + theirs:
        noted = _known_digests(places)
        if stats[i] in noted:
            known[stats[i]] = noted[stats[i]]
            continue
        hashed_at = time.time()
        known[stats[i]] = sha256_of_file(files[i])
        remember_hashes([stats[i]], [(identity_suffix(files[i]), known[stats[i]])], places[0], hashed_at)


def remember_hashes(stats: list[tuple], data: list[tuple[str, str]], place: Path, hashed_at: float) -> None:
    """Adds to hashes.json, if it can. Not files touched just before: one more write could keep the time stamp."""
    paths = {stat[0] for stat in stats}
    new = []
    for stat, (_, digest) in zip(stats, data, strict=True):
        if _last_change(stat) < hashed_at - SETTLED_S:
            new.append([*stat, digest])
    # Processes that make shards note their digests at the same time; what one of them loses is read again.
    with contextlib.suppress(OSError), FileLock(place / ".hashes.lock").acquire(timeout=10):
        old = [entry for entry in _read_hashes(place) if entry[0] not in paths]
        handle, temp = tempfile.mkstemp(dir=place, prefix=".hashes.")
        with open(handle, "w") as file:
            json.dump(old + new, file)
        os.replace(temp, place / "hashes.json")


def sha256_of_file(file: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open(file, "rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()
