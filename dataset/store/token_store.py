"""A corpus as token ids on disk: tokenised once, memory-mapped ever after.

A store is a folder of plain binary files and a meta.json (format.py). Its name carries a digest of the data's content, of the
tokenizer and of the options, so that an edit or another tokenizer never meets an old store. builder.py makes one, and
file_digests.py remembers the digest of the data's content.
"""

import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from common.errors import DataError
from common.paths import user_cache
from dataset.reading.file_kinds import expanded, find_files
from dataset.reading.remote import is_address
from dataset.store.builder import build, first_writable, lock, open_store
from dataset.store.encode_worker import BlockEncoder
from dataset.store.file_digests import hash_files, remember_hashes, settled_stats
from dataset.store.format import TokenStore
from dataset.tokenizing.encoder import DocumentEncoder

# Raise this number when the same input gives another store, so that no old one is taken for it.
FORMAT = 1


class StoreOptions(TypedDict, total=False):
    """What `open_or_build` may be given beside the data and the encoder."""

    cache_dir: str | None
    text_field: str
    skip_bad_lines: bool
    num_procs: int | None
    progress: bool
    text_suffixes: Sequence[str] | None


def open_or_build(
    data_path: str | Path | list[str], encoder: DocumentEncoder, **options: Unpack[StoreOptions]
) -> TokenStore:
    """The store of the files of `data_path` (several: one after the other), tokenised now if it is not there yet.

    The store lies in `.token_store/` beside the data, in the user's cache folder where that is read-only, or in
    `cache_dir`; that of data behind addresses in one of the latter two. Of processes that start together one builds and
    the others wait. num_procs: default all cores. text_suffixes: as in `find_files`. Raises DataError.
    """
    text_field = options.get("text_field", "text")
    skip_bad_lines = options.get("skip_bad_lines", False)
    cache_dir = options.get("cache_dir")
    progress = options.get("progress", True)
    paths = [str(data_path)] if isinstance(data_path, str | Path) else list(data_path)
    files = files_of(paths, options.get("text_suffixes"), cache_dir)
    places = places_of(paths[0], files[0], cache_dir)
    try:
        stats = settled_stats(files, places)
        hashed_at = time.time()
        data, unknown = hash_files(files, stats, places)
    except OSError as error:
        raise DataError(f"{error.filename or paths[0]}: {error.strerror or error}") from error
    key = hashlib.sha256(
        json.dumps([FORMAT, data, encoder.fingerprint, text_field, skip_bad_lines]).encode()
    ).hexdigest()
    meta = {
        "key": key,
        "source_name": _source_name(Path(paths[0])),
        "data": hashlib.sha256(json.dumps(data).encode()).hexdigest(),
        "tokenizer": encoder.fingerprint,
        "text_field": text_field,
        "skip_bad_lines": skip_bad_lines,
        "dtype": "uint16" if encoder.vocab_size <= 1 << 16 else "uint32",
    }
    name = f"{meta['source_name']}-{key[:16]}"
    store = find_store(places, name, key)
    if store is None:
        folder = first_writable(places) / name
        encode = BlockEncoder(encoder, text_field, skip_bad_lines)
        try:
            with lock(folder, progress):
                # Another process may have made it while this one waited for the lock.
                store = open_store(folder, key, tell=True)
                if store is None:
                    store = build(folder, meta, files, stats, encode, options.get("num_procs"), progress)
        except OSError as error:
            raise store_error(error, folder) from error
    if unknown:
        remember_hashes(stats, data, store.folder.parent, hashed_at)
    return store


def store_error(error: OSError, folder: Path) -> DataError:
    """What keeps a store from being written, with what helps."""
    where = error.filename or folder.parent
    return DataError(f"{where}: {error.strerror or error}; --cache_dir names another folder for the token store")


def files_of(paths: list[str], text_suffixes: Sequence[str] | None = None, cache_dir: str | None = None) -> list[Path]:
    """The files of some paths, in the order of the store that they make; see `find_files`. Errors: DataError."""
    files: list[Path] = []
    for path in paths:
        files += find_files(path, text_suffixes, cache_dir)
    return files


def find_store(places: Sequence[Path], name: str, key: str) -> TokenStore | None:
    """The store where it is complete in one of the places."""
    for place in places:
        store = open_store(place / name, key)
        if store is not None:
            return store
    return None


def places_of(path: str, first_file: Path, cache_dir: str | None) -> list[Path]:
    """The folders in which the store may lie, the best one first."""
    if cache_dir:
        return [expanded(cache_dir)]
    of_user = user_cache() / "token_store"
    if is_address(path):
        return [of_user]
    folder = expanded(path) if expanded(path).is_dir() else first_file.parent
    return [folder / ".token_store", of_user]


def _source_name(path: Path) -> str:
    """The name of the data as the first part of a folder's name."""
    name = re.sub(r"[^\w.-]+", "_", path.resolve().name).strip("._")
    name = re.sub(r"\.jsonl.*$|\.parquet$|\.txt$", "", name)[:80]
    # Systems limit names in bytes (255), of which a character may take four; what is added takes about fifty.
    return name.encode()[:160].decode(errors="ignore") or "data"
