"""Atomic files and folders, digests, links, removal, locks, the cache folder."""

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from common.wording import one_line

# Size limit of configs and settings, which have a few thousand bytes; a data file named by mistake has more.
MAX_BYTES = 1 << 20
# A temporary that nobody has written to for so long was left by a killed process.
LEFT_BEHIND_AFTER_S = 3600
# Ending of a folder between the two renames that replace it
REPLACED = ".replaced.tmp"


def temporary_beside(path: Path) -> Path:
    """A new name for what will be renamed to `path`; removes what killed processes have left there under such names."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        # Another process may remove it at the same moment.
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - LEFT_BEHIND_AFTER_S:
                remove(left)
    # In the same folder, since a rename between two disks is a copy; with a random part, since two processes may write the
    # same file, perhaps on two machines.
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")


@contextlib.contextmanager
def errors_of(path: Path, temporary: Path) -> Iterator[None]:
    """Errors: OSError that names `path` where it would name `temporary`, or nothing, as the error of a full disk does."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and not str(error.filename).startswith(str(temporary)):
            raise
        # numpy's tofile raises one without errno.
        reason = error.strerror or f"not all of it could be written, is the disk full? ({error})"
        raise OSError(error.errno or errno.EIO, reason, str(path)) from error


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open `path` for binary writing so that it appears complete or not at all; the temporary is removed on failure.

    Errors: OSError that names `path`.
    """
    path = Path(path)
    temporary = temporary_beside(path)
    try:
        with errors_of(path, temporary):
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                # Otherwise a power cut after the rename could leave an empty file.
                os.fsync(file.fileno())
            rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The rename is durable only once the folder is on disk.
    sync_folder(path.parent)


def rename(source: Path, target: Path) -> None:
    """os.replace, but on Windows it waits for programs that have one of the files open for a moment: virus scanners, OneDrive."""
    for wait_s in (0.05, 0.2, 1.0):
        try:
            os.replace(source, target)
            return
        except PermissionError as error:
            # ERROR_ACCESS_DENIED, ERROR_SHARING_VIOLATION
            if getattr(error, "winerror", None) not in (5, 32):
                raise
        time.sleep(wait_s)
    os.replace(source, target)


def try_to_write(path: Path, sized: bool = False, in_folder: bool = False) -> None:
    """Write a byte to a temporary for `path`, rename and delete it, which not all mounted buckets can do.

    sized: also give it a size first. in_folder: rename a folder that holds it instead, which some buckets refuse.
    Errors: OSError that names `path`.
    """
    temporary, renamed = temporary_beside(path), temporary_beside(path)
    try:
        with errors_of(path, temporary):
            if in_folder:
                temporary.mkdir()
            with open(temporary / "file" if in_folder else temporary, "wb") as file:
                if sized:
                    file.truncate(1)
                file.write(b"\0")
                file.flush()
                os.fsync(file.fileno())
            rename(temporary, renamed)
    finally:
        remove_if_possible(temporary)
        remove_if_possible(renamed)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut (not possible on Windows)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network drives and folders shared with a host (SMB, VirtualBox, WSL) sync only files.
            if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def atomic_folder(folder: Path, temporary: Path, last: str = "") -> Iterator[Path]:
    """Fill the folder `temporary`, which replaces `folder` when it is complete; it is removed on failure.

    last: its files replace those in `folder` one by one, this one at the end, and others stay.
    Errors: OSError that names `folder`.
    """
    # left by a killed run
    remove(temporary)
    try:
        with errors_of(folder, temporary):
            yield temporary
        if last:
            for path in sorted(temporary.iterdir(), key=lambda path: path.name == last):
                rename(path, folder / path.name)
        else:
            replace(temporary, folder)
    except Exception as error:
        # These libraries have the system's error number only in their text.
        match = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, OSError) or not (match or isinstance(error, SafetensorError)):
            raise
        # The fourth argument counts on Windows, which has numbers of its own.
        number = [int(match[1])] if match else []
        raise OSError(*(number or [errno.EIO]), one_line(error), str(folder), *number) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class HashingWriter:
    """A file for torch.save that also computes the SHA-256 of what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        written = self.file.write(data)
        self.digest.update(data)
        return written

    def flush(self) -> None:
        self.file.flush()


def file_digest(path: str | Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_json(content: object) -> str:
    """The SHA-256 of a JSON value, independent of key order and white space."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_regular_file(path: str | Path) -> None:
    """Raises OSError for an existing path that is no regular file: a folder, or a pipe, which could block forever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_small(path: str | Path) -> bytes:
    """Returns the content of a small, untrusted file.

    Errors: OSError for anything but a regular file of at most MAX_BYTES.
    """
    check_regular_file(path)
    with open(path, "rb") as file:
        # One byte over the limit suffices: the file may be huge.
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(
            errno.EFBIG,
            f"larger than {MAX_BYTES:,} bytes, the limit for settings and configs; is it a data file?",
            str(path),
        )
    return content


def read_object(path: str | Path) -> dict[str, object]:
    """Returns the JSON object in a small, untrusted file, such as the .json beside a weight.

    Errors: ValueError, one line that names the file.
    """
    try:
        content = json.loads(read_small(path))
        reason = f"not a JSON object but a {type(content).__name__}"
    except (OSError, ValueError, RecursionError) as error:
        content = None
        reason = str(error.strerror) if isinstance(error, OSError) else f"not JSON ({str(error)[:80]})"
    if not isinstance(content, dict):
        raise ValueError(f"{path}: {reason}")
    return content


def relative_to_cwd(path: Path) -> Path:
    """The path as one would type it in the current folder."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except ValueError:
        return path


def is_hard_link(path: Path, original: Path) -> bool:
    """Returns whether `path` is a hard link to the file `original`, or a folder of links to all files in that folder."""
    if original.is_dir():
        return path.is_dir() and all(is_hard_link(path / entry.name, entry) for entry in original.iterdir())
    return path.exists() and path.samefile(original)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Keep a file or folder as `target`: our files are replaced by renaming, so a hard link keeps the old content."""
    if os.path.isdir(source):
        shutil.copytree(source, target, copy_function=link_or_copy)
        return
    try:
        os.link(source, target)
    except OSError:
        # a file system without hard links
        shutil.copy2(source, target)


def replace(source: Path, target: Path) -> None:
    """Move a file or folder to `target`, replacing what is there."""
    try:
        # A rename replaces a file, but not a folder that is not empty: until the new one is there, the old one is kept whole.
        if target.is_dir():
            old = target.with_name(target.name + REPLACED)
            remove(old)
            rename(target, old)
        rename(source, target)
    finally:
        restore(target)


def restore(target: Path) -> None:
    """Put a replaced folder back if no new one has taken its name, as after a kill; else delete it."""
    old = target.with_name(target.name + REPLACED)
    if target.exists():
        remove_if_possible(old)
    elif old.exists():
        rename(old, target)


def remove(path: Path) -> None:
    """Delete a file or link, or a folder and what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_if_possible(path: Path) -> None:
    """Delete a file or folder, best effort: another process may be writing there."""
    with contextlib.suppress(OSError):
        remove(path)


def file_lock(path: Path, keep_file: bool = False) -> Any:
    """Returns a FileLock, not acquired yet; any thread may release it. keep_file: its file is not deleted then.

    acquire raises OSError on a file system without locks (Lustre without `-o flock`). filelock's fallback is off: it takes
    the mere existence of the file as the lock, which a killed process would hold forever.
    """
    # Imported lazily: it takes 0.1 s, and the flags of every trainer import a user of this function.
    from filelock import FileLock

    return FileLock(path, thread_local=False, fallback_to_soft=False, preserve_lock_file=keep_file)


def user_cache() -> Path:
    """The user's cache folder; the system's for temporary files if the user has no home, as in some containers."""
    folder = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(tempfile.gettempdir() if folder.startswith("~") else folder) / "minimind"
