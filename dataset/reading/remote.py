"""Data that lies behind an address: s3://, http://, https://, file://. fsspec does the talking.

A RemoteFile has what readers ask of a Path. It is read in pieces of PIECE_BYTES, which a DiskCache keeps for a while: so a
file may be larger than the disk, a reader of one part of it fetches that part, and the processes of a machine fetch each
piece once. While a piece is read the next one is fetched.

What a server holds may change while it is read. So a file is one *version*, by the ETag or the time that the server
tells, and each piece is taken only if the server tells the same version after it as before.
"""

import hashlib
import io
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from common.errors import DataError
from common.packages import optional_package
from common.paths import user_cache
from dataset.reading.disk_cache import DiskCache, Wanted
from dataset.reading.own_output import is_own_output

ADDRESS = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
# Of each scheme the package that fsspec needs for it.
SCHEMES = {"file": "fsspec", "s3": "s3fs", "http": "aiohttp", "https": "aiohttp"}

PIECE_BYTES = 8 << 20
# A large object of S3 is fetched as a whole in so many pieces of PIECE_BYTES beside each other. s3fs holds them in memory; by
# itself it would take ten of 50 MB.
S3_PIECES_AT_ONCE = 4
# --cache_gb where nothing else is said.
USUAL_CACHE_GB = 32.0
# A web server that does not answer, or sends nothing, for so long has failed. A whole file may take as long as it takes.
SILENCE_S = 60
# After a failure it is tried again: at once, then after so many seconds.
WAITS_S = (0.0, 1.0, 5.0, 15.0)

# fsspec's AbstractFileSystem, which has no types.
FileSystem = Any
Fetched = TypeVar("Fetched")


def is_address(path: str) -> bool:
    """Whether a path of --data_path is read through fsspec."""
    found = ADDRESS.match(path)
    return found is not None and found.group(1).lower() in SCHEMES


def _is_of_web(address: str) -> bool:
    return address.lower().startswith("http")


def cache_in(cache_dir: str | Path | None, cache_gb: float = USUAL_CACHE_GB) -> DiskCache:
    """Where pieces go. cache_dir: of --cache_dir; None: the user's cache folder."""
    place = user_cache() if cache_dir is None else Path(cache_dir).expanduser()
    return DiskCache(place / "downloads", int(cache_gb * 1e9))


class Size(NamedTuple):
    """What is asked of os.stat_result."""

    st_size: int


@dataclass(frozen=True)
class RemoteFile:
    """One version of a file behind an address. version: what the server calls it."""

    address: str
    size: int
    version: str
    cache: DiskCache

    @property
    def name(self) -> str:
        """As a Path has it; without what a web address has behind a question mark."""
        path = self.address
        # In the key of an object # and ? are characters like others.
        if _is_of_web(self.address):
            path = urlsplit(self.address).path
        return PurePosixPath(path).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> str:
        return self.address.rpartition("/")[0]

    @property
    def digest(self) -> str:
        """Stands for the content: another version has another one."""
        return hashlib.sha256(json.dumps([self.address, self.size, self.version]).encode()).hexdigest()

    def __str__(self) -> str:
        return self.address

    def as_posix(self) -> str:
        return self.address

    def resolve(self) -> "RemoteFile":
        return self

    def stat(self) -> Size:
        return Size(self.size)

    def open(self, mode: str = "rb", buffering: int = io.DEFAULT_BUFFER_SIZE) -> BinaryIO:
        """A stream with seek. Errors, of its reads too: DataError."""
        assert mode == "rb", "only read"
        return cast(BinaryIO, io.BufferedReader(_Pieces(self), buffering))


# What the readers of this package are given.
DataFile = Path | RemoteFile


class _Pieces(io.RawIOBase):
    """The bytes of a RemoteFile."""

    def __init__(self, file: RemoteFile) -> None:
        self.file = file
        self.position = 0
        # The piece that is open, and its number.
        self.piece: BinaryIO | None = None
        self.number = -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.file.size}[whence]
        self.position = max(base + offset, 0)
        return self.position

    def readinto(self, buffer: Any) -> int:
        """As io.RawIOBase has it: fills the start of the buffer, 0 at the end."""
        if self.position >= self.file.size:
            return 0
        number, begin = divmod(self.position, PIECE_BYTES)
        if self.piece is None or number != self.number:
            self.close_piece()
            self.piece = _open_piece(self.file, number)
            self.number = number
            _prefetch_piece(self.file, number + 1)
        self.piece.seek(begin)
        # At the end of a piece fewer than asked for, which readers of raw streams know.
        n_bytes: int = cast(Any, self.piece).readinto(buffer)
        self.position += n_bytes
        return n_bytes

    def close_piece(self) -> None:
        if self.piece is not None:
            self.piece.close()
            self.piece = None

    def close(self) -> None:
        self.close_piece()
        super().close()


def _open_piece(file: RemoteFile, number: int) -> BinaryIO:
    return file.cache.use(_piece(file, number), _opened)


def _opened(path: Path) -> BinaryIO:
    return open(path, "rb")


def _prefetch_piece(file: RemoteFile, number: int) -> None:
    """Fetch a piece beside what goes on, if there is one of that number."""
    if number * PIECE_BYTES < file.size:
        beside(file.cache.prefetch, _piece(file, number))


def beside(function: Callable[..., object], *arguments: object) -> None:
    """Call the function in a thread, which ends with the process. Whoever needs what it makes will learn what fails."""

    def run() -> None:
        try:
            function(*arguments)
        except (DataError, OSError):
            return

    threading.Thread(target=run, name="prefetch", daemon=True).start()


def _piece(file: RemoteFile, number: int) -> Wanted:
    begin = number * PIECE_BYTES
    end = min(begin + PIECE_BYTES, file.size)

    def fill(path: Path) -> None:
        content = _again_and_again(file.address, lambda: _bytes_of(file, begin, end))
        with open(path, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())

    return Wanted(f"{file.digest}-{number}", end - begin, fill)


def _bytes_of(file: RemoteFile, begin: int, end: int) -> bytes:
    """Errors: DataError where the server has another version by now, OSError for fewer bytes than asked for."""
    system = file_system(file.address)
    content: bytes = system.cat_file(file.address, start=begin, end=end)
    if _version_of(_info(system, file.address)) != file.version:
        raise DataError(f"{file.address}: it has changed since this run began; start again")
    if len(content) != end - begin:
        raise OSError(f"{len(content):,} bytes came where {end - begin:,} were asked for")
    return content


def fetch_file(address: str, path: Path, n_bytes: int, is_whole: Callable[[Path], bool]) -> None:
    """Copy a file to this machine. is_whole: whether what came is what it should be. Errors: DataError, at once where the server
    has another number of bytes."""

    def fetch() -> None:
        system = file_system(address)
        there = _info(system, address).get("size")
        if there is not None and int(there) != n_bytes:
            raise _other_size(address, f"{int(there):,}", n_bytes)
        system.get_file(address, str(path), callback=_at_most(address, n_bytes))
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        if not is_whole(path):
            raise OSError("what came is cut off, or is not what its digest says")

    _again_and_again(address, fetch)


def _at_most(address: str, n_bytes: int) -> Any:
    """A callback of fsspec, which is told how many bytes have come: it ends a download that does not end by itself."""
    from fsspec.callbacks import Callback

    def refuse_more(size: int | None, value: int, **_: object) -> None:
        if value > n_bytes:
            raise _other_size(address, f"more than {n_bytes:,}", n_bytes)

    return Callback(hooks={"bound": refuse_more})


def _other_size(address: str, there: str, wanted: int) -> DataError:
    return DataError(f"{address}: the server has {there} bytes of it where {wanted:,} belong; copy it there again")


def file_system(address: str) -> FileSystem:
    """What reads this address. Errors: DataError where a package is missing, which the line names."""
    found = ADDRESS.match(address)
    assert found is not None
    scheme = found.group(1).lower()
    package = SCHEMES[scheme]
    optional_package(package, f"to read {scheme}:// addresses")
    options: dict[str, Any] = {}
    if package == "s3fs":
        options = {"default_block_size": PIECE_BYTES, "max_concurrency": S3_PIECES_AT_ONCE}
    if package == "aiohttp":
        from aiohttp import ClientTimeout

        # By itself it would give a whole file five minutes.
        options["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)}
    # Not by the address as a whole: fsspec would follow what it calls a chain of addresses.
    return optional_package("fsspec", f"to read {scheme}:// addresses").filesystem(scheme, **options)


def _again_and_again(address: str, fetch: Callable[[], Fetched]) -> Fetched:
    """fetch(), tried again where a server or the way to it fails. Errors: DataError."""
    for wait in WAITS_S:
        time.sleep(wait)
        try:
            return fetch()
        except (DataError, FileNotFoundError, PermissionError) as error:
            last: Exception = error
            break
        # botocore and aiohttp have errors of their own.
        except Exception as error:
            last = error
    raise _told(address, last)


def _told(address: str, error: Exception) -> DataError:
    """What went wrong, in a line."""
    if isinstance(error, DataError):
        return error
    if isinstance(error, FileNotFoundError):
        return DataError(f"{address}: no such file or folder")
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return DataError(f"{address}: cannot be read ({reason})")


@contextmanager
def _errors_told(address: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _told(address, error) from None


def _info(system: FileSystem, address: str) -> dict[str, Any]:
    """What the server says of a file now, and not what fsspec remembers."""
    system.invalidate_cache()
    return cast(dict[str, Any], system.info(address))


def _version_of(info: dict[str, Any]) -> str | None:
    """What tells the content apart from an earlier or later one; None where the server says nothing of the kind."""
    for name in ("ETag", "Content-MD5", "Last-Modified"):
        if info.get(name):
            return str(info[name])
    # Of a file system of this machine.
    if "mtime" in info:
        return f"{info['mtime']!r} {info.get('ino')}"
    return None


def remote_files(address: str, cache: DiskCache | None = None) -> tuple[bool, list[RemoteFile]]:
    """(whether the address is a file, the file or all files below a folder or of a pattern).

    Hidden files are left out, and of a folder what runs have left there. Errors: DataError.
    """
    cache = cache or cache_in(None)
    with _errors_told(address):
        system = file_system(address)
        system.invalidate_cache()
        # A web server lists no files, and a question mark is no pattern there.
        if _is_of_web(address):
            file = _remote_file(address, _info(system, address), cache)
            _refuse_whole_files_only(system, file)
            return True, [file]
        if system.isfile(address):
            return True, [_remote_file(address, _info(system, address), cache)]
        # A name is a folder, and what holds one of these is a pattern.
        fixed = re.split(r"[*?\[]", address)[0]
        is_folder = fixed == address
        found = system.find(address, detail=True) if is_folder else system.glob(address, detail=True)
        scheme = address.partition("://")[0].lower()
        # It may end within a name, and what stands behind it is then no whole name.
        beginning = system._strip_protocol(fixed).rstrip("/")

        def is_there(below: PurePath) -> bool:
            return f"{beginning}/{below}" in found

        files = []
        for path, info in sorted(found.items()):
            below = path.removeprefix(beginning)
            if info.get("type") != "file" or not info.get("size") or "/." in below:
                continue
            # On the disk too a pattern names each file that it matches.
            if is_folder and is_own_output(PurePosixPath(below.removeprefix("/")), is_there):
                continue
            files.append(_remote_file(f"{scheme}://{path}", info, cache))
        if not files:
            raise FileNotFoundError(address)
        return False, files


def _refuse_whole_files_only(system: FileSystem, file: RemoteFile) -> None:
    """Errors: DataError where a web server gives a large file as a whole alone, which python -m http.server does."""
    if file.size <= PIECE_BYTES:
        return
    try:
        # One byte, not the first one: any server can give the beginning.
        with system.open(file.address, cache_type="none") as stream:
            stream.seek(1)
            stream.read(1)
    except ValueError:
        raise _no_parts(file.address) from None


def _no_parts(address: str) -> DataError:
    return DataError(
        f"{address}: the server does not tell size and version of the file, or gives no parts of it; download it first "
        f"(curl -L -O {address}) and name the copy"
    )


def _remote_file(address: str, info: dict[str, Any], cache: DiskCache) -> RemoteFile:
    size = info.get("size")
    version = _version_of(info)
    if size is None or version is None or info.get("partial") is False:
        raise _no_parts(address)
    return RemoteFile(address, int(size), version, cache)
