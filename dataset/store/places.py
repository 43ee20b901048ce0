"""Where token stores lie, and who may work on one."""

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import Timeout

from common.errors import DataError
from common.files import remove
from common.locks import file_lock
from common.notices import announce
from dataset.store.writer import read_progress

# An interrupted build that nobody has gone on with for so long is removed.
ABANDONED_S = 7 * 24 * 3600.0
# A process that makes shards may not have taken its lock yet in an empty folder that is no older.
JUST_MADE_S = 60.0

# The name of a store ends in 16 digits of its key, that of a part in which part it is too.
STORE_NAME = re.compile(r".*-[0-9a-f]{16}(\.part-[0-9]+-of-[0-9]+)?", re.DOTALL)


def first_writable(places: list[Path]) -> Path:
    """The first of some folders that files can be made in. Errors: DataError where there is none."""
    for place in places:
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                pass
            if place != places[0]:
                announce(f"{places[0]} cannot be written: the token store goes to {place}")
            return place
    raise DataError(f"{places[0]} cannot be written; --cache_dir names a folder for the token store")


@contextlib.contextmanager
def lock(place: Path, name: str, tell: bool = True) -> Iterator[None]:
    """One process at a time works on the name, the others say that they wait. Clears up after killed builds.

    tell: false for a process that waits for another one of its own run.
    """
    of_name = file_lock(place / f".{name}.lock")
    try:
        held = of_name.acquire(timeout=1)
    except Timeout:
        if tell:
            announce(f"waiting for another process that makes {place / name}")
        held = of_name.acquire()
    with held:
        _clear_up(place, name)
        yield


def _clear_up(place: Path, name: str) -> None:
    """Remove what killed builds of other names have left, and nobody will go on with."""
    for temp in place.glob(".tmp-*"):
        owner = temp.name.removeprefix(".tmp-")
        # With its own the writer decides whether to go on. The lock of a store of data called `tmp` begins like this too.
        if owner == name or not temp.is_dir():
            continue
        # The place may be one that other programs use too.
        if not STORE_NAME.fullmatch(owner):
            continue
        # Who works on it holds its lock.
        with contextlib.suppress(Timeout), file_lock(place / f".{owner}.lock").acquire(timeout=0):
            if _is_abandoned(temp):
                remove(temp)


def clock_of(folder: Path) -> float:
    """The time now by the clock of the file server that the folder lies on, in seconds: ours may differ from it."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _is_abandoned(temp: Path) -> bool:
    """Whether nobody will go on with this interrupted build: it kept nothing, or has been lying there for a week."""
    # The shards of a large corpus: processes that hold other locks may be at work there.
    if any(temp.glob(".shard-*.lock")):
        changed = temp.stat().st_mtime
        for path in temp.iterdir():
            with contextlib.suppress(FileNotFoundError):
                changed = max(changed, path.stat().st_mtime)
        return time.time() - changed > ABANDONED_S
    if read_progress(temp) is None:
        is_empty = not any(temp.iterdir())
        return not is_empty or clock_of(temp.parent) - temp.stat().st_mtime > JUST_MADE_S
    return time.time() - (temp / "progress.json").stat().st_mtime > ABANDONED_S
