"""A corpus as token ids on disk: tokenised once, memory-mapped ever after.

A store is a folder of plain binary files and a meta.json. Its name carries a digest of the data's content, of the
tokenizer and of the options, so that an edit or another tokenizer never meets an old store. It appears by one rename
when it is complete.

    token_store.py    which store belongs to some data: found, or made now
    builder.py        making one: whole, in parts, after an interruption (writer.py writes, encode_worker.py tokenises)
    format.py         reading one: files, digests
    sharded.py        ... of many shards, which a large corpus becomes (shard_writer.py writes)
    file_digests.py   the digest of the data's content, kept beside the stores so that it is computed once
"""

import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from common.errors import DataError
from common.paths import user_cache
from dataset.reading.disk_cache import DiskCache
from dataset.reading.file_kinds import MANIFEST, expanded, find_files, is_tokenised
from dataset.reading.remote import USUAL_CACHE_GB, DataFile, RemoteFile, cache_in, is_address
from dataset.store.builder import Builder, open_store
from dataset.store.encode_worker import BlockEncoder
from dataset.store.file_digests import hash_files, remember_hashes, settled_stats
from dataset.store.format import DamagedStore
from dataset.store.places import first_writable
from dataset.store.remote_shards import RemoteShards
from dataset.store.sharded import ShardedStore, ShardFolder, ShardPlace, Store
from dataset.tokenizing.encoder import DocumentEncoder

# Raise this number when the same input gives another store, so that no old one is taken for it.
FORMAT = 1


class StoreOptions(TypedDict, total=False):
    """What `open_or_build` may be told, see `build_shard`."""

    cache_dir: str | None
    cache_gb: float
    text_field: str
    skip_bad_lines: bool
    num_procs: int | None
    progress: bool
    text_suffixes: Sequence[str] | None


def open_or_build(
    data_path: str | Path | list[str], encoder: DocumentEncoder, **options: Unpack[StoreOptions]
) -> Store:
    """The store of the files of `data_path`, whole: what all trainers open. Tokenised now if it is not there yet."""
    store = build_shard(data_path, encoder, None, **options)
    assert store is not None, "only a part can be missing others"
    return store


def build_shard(
    data_path: str | Path | list[str],
    encoder: DocumentEncoder,
    shard: tuple[int, int] | None,
    cache_dir: str | None = None,
    cache_gb: float = USUAL_CACHE_GB,
    text_field: str = "text",
    skip_bad_lines: bool = False,
    num_procs: int | None = None,
    progress: bool = True,
    text_suffixes: Sequence[str] | None = None,
) -> Store | None:
    """The store of the files of `data_path` (several: one after the other), tokenised now if it is not there yet.

    The store lies in `.token_store/` beside the data, in the user's cache folder where that is read-only, or in
    `cache_dir`; that of data behind addresses in one of the latter two. Of processes that start together one builds and
    the others wait. num_procs: default all cores.
    shard=(k, n): only part k of n (from 1) is made; the last part to finish puts the store together, and None is
    returned while parts are missing. text_suffixes: as in `find_files`. cache_gb: of the disk, for what is fetched from
    addresses. Raises DataError.
    """
    paths = [str(data_path)] if isinstance(data_path, str | Path) else list(data_path)
    if any(map(is_tokenised, paths)):
        return open_tokenised(paths, encoder, cache_in(cache_dir, cache_gb), progress)
    files = files_of(paths, text_suffixes, cache_in(cache_dir, cache_gb))
    places = places_of(paths[0], files[0], cache_dir)
    if shard is not None:
        # The parts share the folder from the start.
        places = [first_writable(places)]
    try:
        stats = settled_stats(files, places)
        hashed_at = time.time()
        data, unknown = hash_files(files, stats, places, shard)
    except OSError as error:
        raise DataError(f"{error.filename or paths[0]}: {error.strerror or error}") from error
    meta = meta_of(Path(paths[0]), data, encoder, text_field, skip_bad_lines)
    name = f"{meta['source_name']}-{meta['key'][:16]}"
    store, place = find_store(places, name, meta["key"])
    if place is None:
        place = first_writable(places)
        encode = BlockEncoder(encoder, text_field, skip_bad_lines)
        builder = Builder(place, name, meta, files, stats, encode, num_procs, progress)
        try:
            store = builder.whole() if shard is None else builder.shard(*shard)
        except OSError as error:
            where = error.filename or place
            reason = error.strerror or error
            raise DataError(f"{where}: {reason}; --cache_dir names another folder for the token store") from error
    if unknown:
        remember_hashes(stats, data, place, hashed_at)
    return store


def open_tokenised(paths: list[str], encoder: DocumentEncoder, cache: DiskCache, progress: bool = True) -> ShardedStore:
    """The store whose manifest is named. progress: say when shards are fetched for long. Errors: DataError."""
    path = paths[0]
    if len(paths) > 1:
        raise DataError(f"{', '.join(paths)}: a token store stands alone; give each source a share, as in {path}:0.5")
    folder = path.removesuffix(MANIFEST).rstrip("/\\")
    place: ShardPlace = ShardFolder(expanded(folder or "."), text_is_known=False)
    if is_address(path):
        place = RemoteShards(folder, cache, tell=progress)
    try:
        store = ShardedStore(place)
    except (DamagedStore, OSError) as error:
        raise DataError(f"{path}: no token store that can be read ({error})") from None
    if store.meta.get("tokenizer") != encoder.fingerprint:
        raise DataError(
            f"{path}: it was tokenised with another tokenizer, or other --parse_special_tokens; name the same ones, or the text"
        )
    return store


def files_of(
    paths: list[str], text_suffixes: Sequence[str] | None = None, cache: DiskCache | None = None
) -> list[DataFile]:
    """The files of some paths, in the order of the store that they make. cache: for what lies behind addresses.

    Errors: DataError.
    """
    files: list[DataFile] = []
    for path in paths:
        files += find_files(path, text_suffixes, cache)
    return files


def find_store(places: Sequence[Path], name: str, key: str) -> tuple[Store | None, Path | None]:
    """(the store, the place that it lies in), or (None, None)."""
    for place in places:
        store = open_store(place / name, key)
        if store is not None:
            return store, place
    return None, None


def places_of(path: str, first_file: DataFile, cache_dir: str | None) -> list[Path]:
    """The folders in which the store may lie, the best one first."""
    if cache_dir:
        return [expanded(cache_dir)]
    of_user = user_cache() / "token_store"
    if isinstance(first_file, RemoteFile):
        return [of_user]
    folder = expanded(path) if expanded(path).is_dir() else first_file.parent
    return [folder / ".token_store", of_user]


def meta_of(
    path: Path, data: list[tuple[str, str]], encoder: DocumentEncoder, text_field: str, skip_bad_lines: bool
) -> dict[str, Any]:
    """What a store says of itself. path: the first of the data's. data: as hash_files gives it. key: by which the same store is
    found again."""
    options = [FORMAT, data, encoder.fingerprint, text_field, skip_bad_lines]
    return {
        "key": hashlib.sha256(json.dumps(options).encode()).hexdigest(),
        "source_name": _source_name(path),
        "data": hashlib.sha256(json.dumps(data).encode()).hexdigest(),
        "tokenizer": encoder.fingerprint,
        "text_field": text_field,
        "skip_bad_lines": skip_bad_lines,
        "dtype": "uint16" if encoder.vocab_size <= 1 << 16 else "uint32",
    }


def _source_name(path: Path) -> str:
    """The name of the data as the first part of a folder's name."""
    name = re.sub(r"[^\w.-]+", "_", path.resolve().name).strip("._")
    name = re.sub(r"\.jsonl.*$|\.parquet$|\.txt$", "", name)[:80]
    # Systems limit names in bytes (255), of which a character may take four; what is added takes about fifty.
    return name.encode()[:160].decode(errors="ignore") or "data"
