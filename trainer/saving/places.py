"""The place of a run's files: whether they can be written there, found out at the start and not after hours of work, and the
lock that keeps other runs from writing them.

Beside the files of `out/pretrain_512` lie `out/.pretrain_512.lock`, which stays, is empty and means nothing by itself,
and, while a run holds the lock, `out/.pretrain_512.running`, which says who it is. The operating system releases the lock when
its process ends, however.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from common.errors import UserError
from common.files import atomic_file, file_lock
from common.wording import announce
from trainer.machine.ranks import Ranks, end_all, first_said, on_main

# The endings of the files in which a run keeps what it records
RECORDS = ("metrics.jsonl", "settings.yaml", "report.html", "loss.png")
# How long a machine may take to see a file that another one has written to a network file system
SEEN_WITHIN_S = 5.0
# Ranks of a launcher that was just killed need a moment to release a lock.
WAIT_S = 3.0
# A server of network files keeps the lock of a machine that is lost: NFS for a lease of 90 s by default.
WAIT_FOR_A_MACHINE_S = 150.0


def check_writable(stem: Path) -> None:
    """Errors: UserError where no file can be written at or beside `stem`, the path of a run's files without their endings,
    or among its checkpoints. Nothing is left behind."""
    # The longest of the names that the run will use, of a file that a restart after a kill clears away. It comes
    # first: where a name is too long, `exists` fails with less to say.
    _try_to_write(stem.with_name(f"{stem.name}.metrics.jsonl.{os.getpid():07d}.tmp"))
    for ending in (*RECORDS, "pth", "json"):
        path = stem.with_name(f"{stem.name}.{ending}")
        # A pipe would be waited for without end.
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no regular file, and a file of this run is to go there: move it away")
    resume_folder = stem.with_name(f"{stem.name}_resume")
    if resume_folder.exists():
        _try_to_write(resume_folder / f"update_{os.getpid()}.tmp")


def check_seen_by_all(stem: Path, ranks: Ranks) -> None:
    """Errors: UserError where a rank does not see what rank 0 writes beside `stem`. All ranks must call it.

    A rank that resumes would find no checkpoint there, or another one.
    """
    if ranks.world_size == 1:
        return

    def write() -> Path:
        # A restart after a kill clears it away.
        path = stem.with_name(f".{stem.name}.{secrets.token_hex(8)}.tmp")
        path.touch()
        return path

    path = on_main(ranks, write)
    own = stem.with_name(path.name)
    give_up = time.monotonic() + SEEN_WITHIN_S
    while not own.exists() and time.monotonic() < give_up:
        time.sleep(0.05)
    unseen = (
        "" if own.exists() else f"rank {ranks.rank} on {socket.gethostname()!r} does not see what rank 0 writes there"
    )
    said = first_said(ranks, unseen)
    if ranks.is_main:
        path.unlink(missing_ok=True)
    end_all(ranks, said and f"{stem.parent}: {said}: all ranks need one --out_dir, which all machines share")


def _try_to_write(path: Path) -> None:
    """Write a byte to a file at `path` and delete it. Errors: UserError."""
    try:
        with open(path, "wb") as file:
            file.write(b"\0")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            length = len(os.fsencode(path.name))
            raise UserError(
                f"{path.parent} takes no file name of {length} bytes, such as {path.name[:40]}...: a shorter "
                "--save_weight or --out_dir is wanted"
            ) from error
        raise UserError(
            f"{path.parent}: nothing can be written there ({error.strerror}): mend that, or name another --out_dir"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def check_space(folder: Path, engine: Any) -> None:
    """Errors: UserError where the disk has less room than a checkpoint of the engine's model takes."""
    # Weights, and the two moments of AdamW
    needed = 3 * sum(p.numel() * p.element_size() for p in engine.model.parameters())
    disk = shutil.disk_usage(folder)
    # Some network file systems tell no size at all.
    if disk.total and disk.free < needed:
        raise UserError(
            f"{folder}: a checkpoint takes {needed / 1e6:,.1f} MB, and {disk.free / 1e6:,.1f} MB are free there: free "
            "some space, or name another --out_dir"
        )


# ------------------------------------------------------------------------------------------------ the lock

# the locks that this process holds, each with the file that says who holds it
_held: list[tuple[FileLock, Path]] = []


def hold(stem: Path) -> None:
    """Take the lock of the files `{stem}*` until `release_all` or the end of this process.

    Errors: UserError that names the process that has it. Where the file system has no locks, a line says so.
    """
    stem = stem.absolute()
    lock = file_lock(stem.with_name(f".{stem.name}.lock"), of_thread=False, file_stays=True)
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
                f"{WAIT_FOR_A_MACHINE_S:g} seconds at most"
            )
            lock.acquire(timeout=WAIT_FOR_A_MACHINE_S)
    except Timeout:
        raise UserError(
            f"{stem}: {_holder(running)[1]} is writing these files: wait for it, stop it, or name another --out_dir"
        ) from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, PermissionError):
            raise
        announce(f"note: {stem.parent} takes no lock ({error}): see to it that no second run writes there")
        return
    _held.append((lock, running))
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    # A full disk: the lock itself holds all the same.
    with contextlib.suppress(OSError), atomic_file(running) as file:
        file.write(json.dumps(owner).encode())


def release_all() -> None:
    """Give back what `hold` took."""
    while _held:
        lock, running = _held.pop()
        with contextlib.suppress(OSError):
            running.unlink(missing_ok=True)
        lock.release()


def _holder(running: Path) -> tuple[str | None, str]:
    """(host, words) of the process that holds the lock, as its file tells; the host is None where it does not."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        owner = json.loads(running.read_text())
        return str(owner["host"]), f"process {owner['pid']} on {owner['host']!r} (since {owner['started']})"
    return None, "another process"
