"""Files at addresses: fsspec downloads each one whole before it is read, and the copy is kept."""

import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common.errors import DataError, optional_package
from common.files import digest_of_json, file_digest, file_lock, rename
from common.wording import announce, one_line

# the package that fsspec needs for each scheme
SCHEMES = {"s3": "s3fs", "http": "aiohttp", "https": "aiohttp"}
# Timeout of a web server that sends nothing; a whole file has none.
READ_TIMEOUT_S = 60


def scheme_of(path: str) -> str:
    """The scheme of an address; "" for a path. One letter is a drive of Windows."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", path)
    return match[1].lower() if match else ""


def is_address(path: str) -> bool:
    """True if a path of --data_path is read through fsspec."""
    return scheme_of(path) in SCHEMES


def fetch(address: str, cache: Path) -> Path:
    """The local copy of a remote file, in `downloads/` of the cache folder; downloaded if this version is not there.

    Errors: DataError."""
    system = _file_system(scheme_of(address))
    try:
        return _download(system, address, cache / "downloads")
    except Exception as error:
        # botocore and aiohttp raise their own classes; fsspec may hide any answer of a server behind a FileNotFoundError.
        cause: Any = error.__cause__ or error
        status = getattr(cause, "status", 404)
        reason = one_line(error)[:200] or type(error).__name__
        if status != 404:
            # 0: more redirects than aiohttp follows
            reason = f"the server answers {status} {cause.message}" if status else "it redirects without end"
        elif isinstance(error, FileNotFoundError):
            reason = "no such file or server; download a folder or a pattern first"
        raise DataError(f"{one_line(address)}: cannot be read ({reason})") from None


def _file_system(scheme: str) -> Any:
    """The fsspec file system of a scheme. Errors: DataError that names a missing package."""
    package = SCHEMES[scheme]
    optional_package(package, f"to read {scheme}:// addresses")
    options: dict[str, Any] = {}
    if package == "aiohttp":
        from aiohttp import ClientTimeout

        # identity: no compression in transit. By default aiohttp gives a whole file five minutes.
        timeout = ClientTimeout(total=None, sock_connect=READ_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        options = {"headers": {"Accept-Encoding": "identity"}, "client_kwargs": {"timeout": timeout}}
    # By scheme: from a whole address fsspec would follow a chained URL.
    return optional_package("fsspec", f"to read {scheme}:// addresses").filesystem(scheme, **options)


# fsspec's own cache misses changes of a file behind http://.
def _download(system: Any, address: str, folder: Path) -> Path:
    """Errors: those of the file system's library; OSError."""
    size, tags = version = _version(system, address)
    copy = folder / digest_of_json([address, *version])[:16] / Path(urlsplit(address).path).name
    copy.parent.mkdir(parents=True, exist_ok=True)
    # Without an announced size: half of the free disk
    limit = shutil.disk_usage(folder).free // 2 if size is None else size

    def check_length(_: int | None, received: int, **__: object) -> None:
        if received > limit:
            raise OSError(f"stopped: the server sends more than {limit:,} bytes")

    callback = optional_package("fsspec.callbacks", "to read addresses").Callback(hooks={"length": check_length})
    # Only one of several ranks downloads.
    with file_lock(copy.with_name(".lock")):
        if tags and copy.exists():
            return copy
        announce(f"fetching {address}")
        part = copy.with_name(f".{copy.name}.part")
        try:
            system.get_file(address, str(part), callback=callback)
            if size not in (None, part.stat().st_size) or _version(system, address) != version:
                raise OSError("it was cut off, or changed while it was fetched; start again")
            # Equal content keeps its time stamps: another process may be reading the copy.
            if not copy.exists() or file_digest(copy) != file_digest(part):
                rename(part, copy)
        finally:
            part.unlink(missing_ok=True)
    return copy


def _version(system: Any, address: str) -> tuple[int | None, list[str]]:
    """(size, list of at most one version tag) of a file as it is now; None and [] if the server reports none."""
    system.invalidate_cache()
    info = system.info(address)
    if info["type"] != "file":
        raise FileNotFoundError(address)
    tags = [str(info[tag]) for tag in ("ETag", "Content-MD5", "Last-Modified", "mtime") if info.get(tag)]
    return info.get("size"), tags[:1]
