"""Files that appear complete or not at all, their digests, moving and removing them; folders that libraries take."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from common.errors import UserError

# Configs and settings have a few thousand bytes; a data file that was named by mistake has more.
MOST_BYTES = 1 << 20


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open `path` for binary writing so that it appears complete or not at all; the temporary is removed on failure.

    Errors: OSError that names `path` (a full disk does not name a file by itself).
    """
    path = Path(path)
    # In the same folder, since a rename between two disks is a copy. With the number of this process, so that two that
    # write the same file do not write into one another.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            # Otherwise a power cut after the rename could leave the name with nothing in it.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            # numpy's tofile raises one without a number.
            reason = error.strerror or f"not all of it could be written, is the disk full? ({error})"
            raise OSError(error.errno or errno.EIO, reason, str(path)) from error
        raise
    # The name is in the folder only when the folder itself is on the disk.
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut (not possible on Windows)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def atomic_folder(folder: Path, temporary: Path) -> Iterator[Path]:
    """Fill the folder `temporary` so that it takes the place of `folder` complete or not at all; it is removed on failure.

    Errors: OSError that names `folder` for what safetensors cannot write.
    """
    # left by a killed run
    remove(temporary)
    try:
        yield temporary
        replace(temporary, folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, SafetensorError):
            # The system's number stands in its text alone.
            number = errno.ENOSPC if "os error 28" in str(error) else errno.EIO
            raise OSError(number, " ".join(str(error).split()), str(folder)) from error
        raise


def forget_cached(path: Path) -> None:
    """Ask the system to drop its copy of a file that is on the disk already. macOS and Windows have no such call."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file, contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class HashingWriter:
    """A file that feeds what is written to SHA-256 as well; torch.save writes into it."""

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


def refuse_irregular(path: str | Path) -> None:
    """OSError for what is there and is no regular file: a folder, or a pipe, which would be waited for without end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_small(path: str | Path) -> bytes:
    """The content of a small file that may have been put there by anybody.

    Errors: OSError for what is no regular file, and for more than MOST_BYTES.
    """
    refuse_irregular(path)
    with open(path, "rb") as file:
        # One byte more than is allowed, and no more: it may be of any size.
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MOST_BYTES:,} bytes, which none of its kind is", str(path))
    return content


def read_object(path: str | Path) -> dict[str, object]:
    """The JSON object in a small file that may have been put there by anybody, such as the .json beside a weight.

    Errors: ValueError, one line that names the file.
    """
    try:
        content = json.loads(read_small(path))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({str(error)[:80]})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object but a {type(content).__name__}")
    return content


def is_link_of(path: Path, original: Path) -> bool:
    """Whether `path` is a hard link of the file `original`, or a folder of links of all files in the folder `original`."""
    if original.is_dir():
        return path.is_dir() and all(is_link_of(path / entry.name, entry) for entry in original.iterdir())
    return path.exists() and path.samefile(original)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Keep a file or folder as `target`: our files are replaced by renaming, so a link keeps the old content."""
    if os.path.isdir(source):
        shutil.copytree(source, target, copy_function=link_or_copy)
        return
    try:
        os.link(source, target)
    except OSError:
        # A file system without links.
        shutil.copy2(source, target)


def replace(source: Path, target: Path) -> None:
    """Move a file or folder to `target`, in the place of what is there."""
    # A rename takes the place of a file, but not of a folder with something in it.
    if target.is_dir():
        remove(target)
    os.replace(source, target)


def remove(path: Path) -> None:
    """Delete a file, or a folder and what is in it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_if_possible(path: Path) -> None:
    """Delete what can be deleted of a file or a folder: another process may be writing there."""
    with contextlib.suppress(OSError):
        remove(path)


def file_lock(path: Path, file_stays: bool = False) -> Any:
    """A FileLock that is not held yet. To take it raises OSError on a file system that has no locks (Lustre without `-o flock`).

    filelock would take the file's being there for a lock instead, and nobody would ever take back that of a killed process.
    file_stays: also when the lock is given back, which any thread may do.
    """
    # Loaded where it is needed: the flags of every trainer import who uses this, and its loading takes a tenth of a second.
    from filelock import FileLock

    return FileLock(path, thread_local=False, fallback_to_soft=False, preserve_lock_file=file_stays)


def utf8_folder(flag: str, path: str | Path) -> Path:
    """The folder, if its whole path is UTF-8: the libraries that read and write exports take no other. UserError."""
    try:
        str(Path(path).absolute()).encode()
    except UnicodeEncodeError:
        raise UserError(f"{flag} {ascii(str(path))}: the path is not UTF-8; rename the folder or use another") from None
    return Path(path)


def user_cache() -> Path:
    """The folder for what is kept for the user and can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minimind"
