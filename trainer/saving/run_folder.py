"""The folder of a run's files: checked at the start, not after hours of work, and locked against other runs.

Beside the files of `out/pretrain_512` are `out/.pretrain_512.lock`, which is empty, stays, and means nothing by itself,
and, while a run holds the lock, `out/.pretrain_512.running`, which names the holder. The operating system releases the lock
when the process ends, in any way.
"""

import contextlib
import errno
import json
import os
import shutil
import socket
import time
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from common.errors import UserError
from common.files import atomic_file, check_regular_file, file_lock, try_to_write
from common.wording import announce

# suffixes of a run's record files
RECORDS = ("metrics.jsonl", "settings.yaml", "report.html", "loss.png")
# Ranks of a launcher that was just killed need a moment to release a lock.
WAIT_S = 3.0
# A network file server keeps the lock of a lost machine for a while: NFS for a lease of 90 s by default.
WAIT_FOR_LOST_MACHINE_S = 150.0


def check_writable(stem: Path, sized: bool = False) -> None:
    """Create the folder of a run's files, and check that it is writable. stem: path of the files without suffix.

    sized: some files get their size before they are written, which safetensors does.

    Errors: UserError if it cannot be created, or nothing can be written there or among the checkpoints, or renamed.
    """
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        # the longest name that the run uses, of a folder too: an earlier run is moved; a restart after a kill deletes them
        for in_folder in (False, True):
            try_to_write(stem.with_name(f"{stem.name}.metrics.jsonl"), sized, in_folder)
        for ending in (*RECORDS, "pth", "json"):
            check_regular_file(stem.with_name(f"{stem.name}.{ending}"))
        resume_folder = stem.with_name(f"{stem.name}_resume")
        if resume_folder.exists():
            try_to_write(resume_folder / "update_0")
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise UserError(f"{reason}: fix that, or name another --out_dir or --save_weight") from error


def check_space(folder: Path, model: torch.nn.Module) -> None:
    """Errors: UserError if the disk has less room than a checkpoint of the model takes."""
    # weights and the two moments of AdamW
    needed = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    disk = shutil.disk_usage(folder)
    # Some network file systems report no size.
    if disk.total and disk.free < needed:
        raise UserError(
            f"{folder}: a checkpoint takes {needed / 1e6:,.1f} MB, and {disk.free / 1e6:,.1f} MB are free there: free "
            "some space, or name another --out_dir"
        )


# locks that this process holds, each with the file that names the holder
_held: list[tuple[FileLock, Path]] = []


def take_lock(stem: Path) -> None:
    """Take the lock of the files `{stem}*` until `release_locks` or the end of this process.

    Errors: UserError that names the process that holds it. If the file system has no locks, a note is printed.
    """
    stem = stem.absolute()
    lock = file_lock(stem.with_name(f".{stem.name}.lock"), keep_file=True)
    running = stem.with_name(f".{stem.name}.running")
    try:
        try:
            lock.acquire(timeout=WAIT_S)
        except Timeout:
            host, who = _holder(running)
            if host in (None, socket.gethostname()):
                raise
            announce(
                f"{stem}: {who} is writing these files, or its machine was lost and its lock is not free yet: waiting for "
                f"{WAIT_FOR_LOST_MACHINE_S:g} seconds at most"
            )
            lock.acquire(timeout=WAIT_FOR_LOST_MACHINE_S)
    except Timeout:
        raise UserError(
            f"{stem}: {_holder(running)[1]} is writing these files: wait for it, stop it, or name another --out_dir"
        ) from None
    except (OSError, NotImplementedError) as error:
        # EPERM: a mounted bucket, where a file that exists cannot be opened for writing
        if isinstance(error, PermissionError) and error.errno != errno.EPERM:
            raise
        announce(f"note: {stem.parent} has no file locks ({error}): make sure that no second run writes there")
        return
    _held.append((lock, running))
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    # Best effort, as on a full disk: the lock holds without it.
    with contextlib.suppress(OSError), atomic_file(running) as file:
        file.write(json.dumps(owner).encode())


def release_locks() -> None:
    """Release the locks that `take_lock` took."""
    while _held:
        lock, running = _held.pop()
        with contextlib.suppress(OSError):
            running.unlink(missing_ok=True)
        lock.release()


def _holder(running: Path) -> tuple[str | None, str]:
    """(host, description) of the process that holds the lock, from its file; the host is None if unknown."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        owner = json.loads(running.read_text())
        return str(owner["host"]), f"process {owner['pid']} on {owner['host']!r} (since {owner['started']})"
    return None, "another process"
