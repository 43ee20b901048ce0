"""Data that lies behind an address: s3://, http://, https://. fsspec lists and fetches it.

A file is fetched whole before it is read, into `downloads/` of the cache folder, and stays there. Its place there is known by
its address, size and version (what the server says: ETag, time): another version is fetched anew.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, cast
from urllib.parse import urlsplit

from common.errors import DataError
from common.files import file_lock
from common.packages import optional_package
from common.paths import user_cache
from common.wording import announce

ADDRESS = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
# the package that fsspec needs for each scheme
SCHEMES = {"s3": "s3fs", "http": "aiohttp", "https": "aiohttp"}
# A web server that does not answer, or sends nothing, for so long has failed. A whole file may take as long as it takes.
SILENCE_S = 60
# seconds before each try
WAITS_S = (0.0, 1.0, 5.0)
# A larger file is told before it is fetched.
TOLD_BYTES = 100_000_000

# fsspec's AbstractFileSystem, which has no types
FileSystem = Any
# (path below the folder that was named, whether there is a file of such a path) -> bool
IsOwnOutput = Callable[[PurePath, Callable[[PurePath], bool]], bool]


@dataclass(frozen=True)
class RemoteFile:
    """A file behind an address, as its server tells of it now."""

    address: str
    size: int | None
    version: str | None


def is_address(path: str) -> bool:
    """Whether a path of --data_path is read through fsspec."""
    found = ADDRESS.match(path)
    return found is not None and found.group(1).lower() in SCHEMES


def listed(address: str, is_own_output: IsOwnOutput) -> tuple[bool, dict[PurePosixPath, RemoteFile]]:
    """(whether the address is a file, the file or all files below a folder or of a pattern, by their paths).

    Hidden files are left out, and of a folder what runs have left there, see file_kinds.is_own_output. Errors: DataError.
    """
    scheme = address.partition("://")[0].lower()
    try:
        system = _file_system(scheme)
        system.invalidate_cache()
        # A web server lists no files, and a question mark is no pattern there.
        if scheme.startswith("http"):
            return True, {PurePosixPath(urlsplit(address).path): _remote_file(address, system.info(address))}
        if system.isfile(address):
            return True, {PurePosixPath(address): _remote_file(address, system.info(address))}
        # A name is a folder, and what holds one of these is a pattern.
        fixed = re.split(r"[*?\[]", address)[0]
        is_folder = fixed == address
        found = system.find(address, detail=True) if is_folder else system.glob(address, detail=True)
        beginning = system._strip_protocol(fixed).rstrip("/")

        def is_there(below: PurePath) -> bool:
            return f"{beginning}/{below}" in found

        files = {}
        for path, info in sorted(found.items()):
            below = path.removeprefix(beginning)
            if info.get("type") != "file" or not info.get("size") or "/." in below:
                continue
            # On the disk too a pattern names each file that it matches.
            if is_folder and is_own_output(PurePosixPath(below.removeprefix("/")), is_there):
                continue
            files[PurePosixPath(path)] = _remote_file(f"{scheme}://{path}", info)
        if not files:
            raise FileNotFoundError(address)
        return False, files
    except Exception as error:
        # botocore and aiohttp have errors of their own.
        raise _told(address, error) from None


def fetched(path: PurePosixPath, file: RemoteFile, cache_dir: str | None) -> Path:
    """The copy of a file on this machine, fetched now if it is not there. cache_dir: None: the user's cache folder.

    Errors: DataError.
    """
    place = user_cache() if cache_dir is None else Path(cache_dir).expanduser()
    key = hashlib.sha256(json.dumps([file.address, file.size, file.version]).encode()).hexdigest()[:16]
    copy = place / "downloads" / key / path.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    # Of ranks that start together one fetches.
    with file_lock(copy.parent / ".lock"):
        if file.version is not None and copy.exists():
            return copy
        if (file.size or 0) > TOLD_BYTES:
            announce(f"fetching {file.address} ({cast(int, file.size) / 1e6:,.0f} MB)")
        part = copy.with_name(f".{copy.name}.part")
        for wait in WAITS_S:
            time.sleep(wait)
            try:
                system = _file_system(file.address.partition("://")[0].lower())
                system.get_file(file.address, str(part))
                system.invalidate_cache()
                if _remote_file(file.address, system.info(file.address)) != file:
                    raise DataError(f"{file.address}: it has changed since this run began; start again")
                if file.size not in (None, part.stat().st_size):
                    raise OSError(f"{part.stat().st_size:,} bytes came where {file.size:,} were told")
                os.replace(part, copy)
                return copy
            except (DataError, FileNotFoundError, PermissionError) as error:
                raise _told(file.address, error) from None
            except Exception as error:
                last = error
        raise _told(file.address, last) from None


def _file_system(scheme: str) -> FileSystem:
    """What reads such addresses. Errors: DataError where a package is missing, which the line names."""
    package = SCHEMES[scheme]
    optional_package(package, f"to read {scheme}:// addresses")
    options: dict[str, Any] = {}
    if package == "aiohttp":
        from aiohttp import ClientTimeout

        # The bytes of the file as they are; and by itself it would give a whole file five minutes.
        timeout = ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        options = {"headers": {"Accept-Encoding": "identity"}, "client_kwargs": {"timeout": timeout}}
    # Not by the address as a whole: fsspec would follow what it calls a chain of addresses.
    return optional_package("fsspec", f"to read {scheme}:// addresses").filesystem(scheme, **options)


def _remote_file(address: str, info: dict[str, Any]) -> RemoteFile:
    version = next(
        (str(info[name]) for name in ("ETag", "Content-MD5", "Last-Modified", "mtime") if info.get(name)), None
    )
    size = info.get("size")
    return RemoteFile(address, None if size is None else int(size), version)


def _told(address: str, error: Exception) -> DataError:
    """What went wrong, in a line."""
    if isinstance(error, DataError):
        return error
    if isinstance(error, FileNotFoundError):
        return DataError(f"{address}: no such file or folder")
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return DataError(f"{address}: cannot be read ({reason})")
