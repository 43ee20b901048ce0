"""Shards of a token store that lie behind an address (s3://, https://), fetched when they are needed.

A corpus is tokenised on one machine or many, and the folder of its store is copied to where all machines can read it. A
run names its manifest.json. Then each file of a shard that is asked for is fetched as a whole, compared with the digest
that the manifest has of it, and kept by a DiskCache under that digest. So nothing is used that was cut off or changed.

The documents of a group (dataset/grouped_plan.py) are asked for in random order, so all of its shards must have room at
once. While one group is trained the shards of the next one are fetched, if both have room.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import DataError
from common.files import file_digest
from common.notices import announce
from dataset.reading.disk_cache import DiskCache, Wanted
from dataset.reading.remote import beside, fetch_file, remote_files
from dataset.store.format import DamagedStore, are_offsets
from dataset.store.interface import Ints
from dataset.store.sharded import MOST_MANIFEST_BYTES, ShardEntry

MOST_LENGTHS_BYTES = 1 << 30
# What is needed of a shard to plan and to train. The others serve splits and figures.
TRAINED_FILES = ("offsets.bin", "tokens.bin")
# Files that are fetched beside each other.
FETCHED_AT_ONCE = 4
# A fetch that takes longer is told.
LINE_AFTER_S = 5.0


@dataclass(frozen=True)
class RemoteShards:
    """Where a sharded store lies. address: of the folder of its manifest.json. tell: say when a fetch takes long."""

    address: str
    cache: DiskCache
    tell: bool = False

    def __str__(self) -> str:
        return self.address

    def manifest(self) -> bytes:
        return self._content("manifest.json", MOST_MANIFEST_BYTES)

    def lengths(self) -> Ints:
        return np.frombuffer(self._content("lengths.bin", MOST_LENGTHS_BYTES), np.uint8)

    def _content(self, name: str, most_bytes: int) -> bytes:
        _, (file,) = remote_files(f"{self.address}/{name}", self.cache)
        if file.size > most_bytes:
            raise DamagedStore(f"{name} has {file.size:,} bytes, more than a store can have")
        with file.open() as stream:
            return stream.read()

    def refuse_missing(self, shards: Sequence[ShardEntry]) -> None:
        """It is told when a shard is asked for."""

    def open(self, shard: ShardEntry, dtype: np.dtype[Any]) -> "RemoteShard":
        return RemoteShard(self, shard, dtype)

    def holds(self, shard: ShardEntry) -> bool:
        return all((self.cache.folder / shard.files[name][1]).exists() for name in TRAINED_FILES)

    def fetched_bytes(self, shards: Sequence[ShardEntry]) -> int:
        return sum(shard.n_bytes for shard in shards)

    @property
    def limit_bytes(self) -> int:
        return self.cache.limit_bytes

    def fetch(self, shards: Sequence[ShardEntry]) -> None:
        files = [self.wanted(shard, name) for shard in shards for name in TRAINED_FILES]
        # What is here is marked as used first, so that it does not go to make room for the others.
        files.sort(key=lambda file: not self.cache.has(file))
        missing = sum(file.n_bytes for file in files if not self.cache.has(file))
        line = f"fetching {missing / 1e9:.3g} GB from {self.address}: the documents that are trained next"
        late = threading.Timer(LINE_AFTER_S, announce, [line])
        late.daemon = True
        if self.tell and missing:
            late.start()
        pool = ThreadPoolExecutor(FETCHED_AT_ONCE, "fetch")
        try:
            # Reading the answers raises what has failed.
            list(pool.map(self.cache.fetch, files))
        finally:
            late.cancel()
            pool.shutdown(cancel_futures=True)

    def prefetch(self, shards: Sequence[ShardEntry]) -> None:
        beside(self._prefetch, shards)

    def _prefetch(self, shards: Sequence[ShardEntry]) -> None:
        for shard in shards:
            for name in TRAINED_FILES:
                self.cache.prefetch(self.wanted(shard, name))

    def wanted(self, shard: ShardEntry, name: str) -> Wanted:
        """A file of a shard, as the cache is asked for it."""
        n_bytes, digest = shard.files[name]
        address = f"{self.address}/{shard.name}/{name}"

        def is_whole(path: Path) -> bool:
            return path.stat().st_size == n_bytes and file_digest(path) == digest

        def fill(path: Path) -> None:
            fetch_file(address, path, n_bytes, is_whole)

        return Wanted(digest, n_bytes, fill, is_whole)


class RemoteShard:
    """The arrays of a TokenStore, each fetched when it is asked for."""

    def __init__(self, place: RemoteShards, shard: ShardEntry, dtype: np.dtype[Any]) -> None:
        self.place = place
        self.shard = shard
        self.dtype = dtype

    @cached_property
    def tokens(self) -> Ints:
        return self._mapped("tokens.bin", self.dtype)

    @cached_property
    def offsets(self) -> Ints:
        offsets = self._mapped("offsets.bin", np.dtype(np.int64))
        if not are_offsets(offsets, self.shard.tokens):
            raise DataError(f"{self.place.address}/{self.shard.name}/offsets.bin does not tell where documents begin")
        return offsets

    @cached_property
    def text_bytes(self) -> Ints:
        return self._mapped("text_bytes.bin", np.dtype(np.uint32))

    @cached_property
    def doc_hash(self) -> Ints:
        return self._mapped("doc_hash.bin", np.dtype(np.uint64))

    def _mapped(self, name: str, dtype: np.dtype[Any]) -> Ints:
        wanted = {"tokens.bin": self.shard.tokens, "offsets.bin": self.shard.documents + 1}
        n_bytes, _ = self.shard.files[name]
        if n_bytes != wanted.get(name, self.shard.documents) * dtype.itemsize:
            raise DataError(
                f"{self.place.address}: the manifest does not agree with itself on {self.shard.name}/{name}"
            )

        def mapped(path: Path) -> Ints:
            return np.memmap(path, dtype, "r").view(np.ndarray)

        return self.place.cache.use(self.place.wanted(self.shard, name), mapped)
