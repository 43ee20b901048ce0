"""Writes the shards of a large corpus, one after the other: a StoreWriter for each, behind the face of one.

The folder has another name until its manifest is there, as that of a StoreWriter has: an interrupted build keeps the
shards that are complete, and goes on within the one that is not. Processes that make shards of one corpus share the folder;
each has a list of those that it makes.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from common.files import remove, sync_folder
from common.locks import file_lock
from dataset.reading.faults import BadLines
from dataset.store.dealing import Place, Start, shard_of
from dataset.store.encode_worker import EncodedBlock
from dataset.store.format import DamagedStore, TokenStore
from dataset.store.sharded import write_manifest
from dataset.store.writer import StoreWriter, give_name

# No block stands there.
BEHIND_ALL = Place(1 << 62, 0, 0)


class ShardWriter:
    """Writes some shards of a corpus into `place/.tmp-name`. For the holder of their lock.

    meta: what is known of the corpus before it is read. starts: where each of its shards begins. mine: the numbers of those
    that are made here, ascending. Attributes as those of StoreWriter, for all of these shards together.
    """

    def __init__(
        self,
        place: Path,
        name: str,
        identity: dict[str, Any],
        meta: dict[str, Any],
        starts: Sequence[Start],
        mine: Sequence[int],
    ) -> None:
        self.place = place
        self.name = name
        self.temp = place / f".tmp-{name}"
        self.identity = identity
        self.meta = meta
        self.starts = starts
        self.documents = 0
        self.tokens = 0
        self.mine = list(mine)
        # None for a shard that another process has made meanwhile.
        self.writer: StoreWriter | None = None
        self._lock: FileLock | None = None
        # Of the complete shards, by their numbers. After an interruption or a damage later ones may be complete first.
        self._faults: dict[int, BadLines] = {}
        # Of all blocks, where they were known at once.
        self._kept_faults: BadLines | None = None
        self.temp.mkdir(parents=True, exist_ok=True)
        # Those that are not complete, the one that is written first.
        self.left = [number for number in mine if not self._is_complete(number)]
        # Where the first of them begins, or the end of the corpus.
        self.last: Place | None = BEHIND_ALL
        if self.left:
            self.last = Place(*starts[self.left[0]], -1)
        self._begin()
        if self.writer is not None and self.writer.last is not None:
            self.last = self.writer.last
            self.documents += self.writer.documents
            self.tokens += self.writer.tokens

    def faults_at(self, place: Place) -> BadLines:
        """Where the faults of the block at that place go."""
        self._reach(place)
        return BadLines() if self.writer is None else self.writer.bad_lines

    @property
    def bad_lines(self) -> BadLines:
        """Of all these shards, in the order of the corpus."""
        if self._kept_faults is not None:
            return self._kept_faults
        faults = dict(self._faults)
        if self.writer is not None:
            faults[self.left[0]] = self.writer.bad_lines
        all_of_them = BadLines()
        for number in sorted(faults):
            all_of_them.merge(faults[number])
        return all_of_them

    def keep_faults(self, bad_lines: BadLines) -> None:
        """Of all blocks, where they are known at once."""
        self._kept_faults = bad_lines

    def add(self, block: EncodedBlock, place: Place) -> None:
        """Appends the block that stands at that place of the corpus."""
        self._reach(place)
        if self.writer is not None:
            self.writer.add(block, place)
        self.last = place
        self.documents += len(block.lengths)
        self.tokens += len(block.tokens)

    def finish(self) -> None:
        """All blocks of these shards are written."""
        while self.left:
            self._next()

    def commit(self, meta: dict[str, Any]) -> Path:
        """All shards of the corpus are complete: give the folder its name. Returns it."""
        self.finish()
        assert not self.starts[len(self.mine) :], "all shards are made here, or were there"
        names = [shard_name(number) for number in self.mine]
        write_manifest(self.temp, names, meta, self.bad_lines)
        for lock in self.temp.glob(".*.lock"):
            remove(lock)
        sync_folder(self.temp)
        return give_name(self.temp, self.place / self.name)

    def discard(self) -> None:
        """Nothing that is written will be of use."""
        if self.writer is not None:
            self.writer.discard()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *error: object) -> None:
        if self.writer is not None:
            self.writer.__exit__(*error)
        if self._lock is not None:
            self._lock.release()

    def _reach(self, place: Place) -> None:
        """Complete the shards before the one of that place; some may have no block."""
        wanted = shard_of(place, self.starts)
        while self.left[0] != wanted:
            self._next()

    def _next(self) -> None:
        """Complete a shard and begin the next one."""
        if self.writer is not None:
            self._faults[self.left[0]] = self.writer.bad_lines
            self.writer.commit({**self.meta, "key": self._key(self.left[0])})
            self.writer = None
        if self._lock is not None:
            self._lock.release()
        self.left.pop(0)
        self._begin()

    def _begin(self) -> None:
        if not self.left:
            return
        # A trainer may be started while processes with --shard are at work.
        name = shard_name(self.left[0])
        self._lock = file_lock(self.temp / f".{name}.lock")
        self._lock.acquire()
        if not self._is_complete(self.left[0]):
            self.writer = StoreWriter(self.temp, name, self.identity)

    def _is_complete(self, number: int) -> bool:
        folder = self.temp / shard_name(number)
        if not folder.is_dir():
            return False
        try:
            store = TokenStore(folder)
        except (DamagedStore, OSError):
            return False
        if store.fingerprint != self._key(number):
            return False
        self._faults[number] = store.bad_lines
        self.documents += len(store)
        self.tokens += len(store.tokens)
        return True

    def _key(self, number: int) -> str:
        return shard_key(self.meta["key"], number, self.starts)


def shard_name(number: int) -> str:
    """Of its folder."""
    return f"shard-{number:05}"


def shard_key(key: str, number: int, starts: Sequence[Start]) -> str:
    """What a shard is known by. key: of the corpus."""
    begin_and_end = starts[number : number + 2]
    return hashlib.sha256(json.dumps([key, number, len(starts), begin_and_end]).encode()).hexdigest()


# What a build writes with.
Writer = StoreWriter | ShardWriter
