"""Held-out documents of shards that lie elsewhere, in a token store on this machine.

`--val_fraction` chooses documents by their hash, so some lie in every shard. An evaluation that read them where they are
would fetch the whole corpus, each time. So the first start goes through the shards once, and copies these documents.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import DataError
from common.notices import announce
from common.paths import user_cache
from common.wording import counted
from dataset.reading.file_kinds import expanded
from dataset.store.builder import open_store
from dataset.store.copying import chosen_blocks
from dataset.store.dealing import Place
from dataset.store.encode_worker import EncodedBlock
from dataset.store.format import TokenStore
from dataset.store.interface import Ints
from dataset.store.places import first_writable, lock
from dataset.store.sharded import Shard, ShardedStore, Store
from dataset.store.writer import StoreWriter

# Raise this number when the same arguments give another store.
VERSION = 1


def copied_here(
    stores: Sequence[Store], documents: Ints, rule: str, cache_dir: str | None = None, tell: bool = True
) -> Store:
    """A store of these documents, made now if it is not there yet. Of several processes one makes it.

    documents: ascending numbers, through all stores. rule: how they were chosen. Errors: DataError.
    """
    keys = [store.fingerprint for store in stores]
    key = hashlib.sha256(json.dumps([VERSION, rule, keys]).encode()).hexdigest()
    name = f"held-out-{key[:16]}"
    places = [expanded(cache_dir) if cache_dir else user_cache() / "token_store"]
    try:
        place = first_writable(places)
        with lock(place, name, tell):
            found = open_store(place / name, key, tell=True)
            if found is None:
                if tell:
                    announce(
                        f"copying {counted(len(documents), 'held-out document')} to {place / name}: all shards are fetched for "
                        "it, this once"
                    )
                found = _build(stores, documents, key, name, place)
            return found
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{places[0]}: {reason}; --cache_dir names another folder for what is fetched") from error


def _build(stores: Sequence[Store], documents: Ints, key: str, name: str, place: Path) -> TokenStore:
    dtype = np.result_type(*(store.tokens.dtype for store in stores))
    with StoreWriter(place, name, {"key": key}) as writer:
        for at, block in _blocks(stores, documents, writer.last):
            block.tokens = block.tokens.astype(dtype, copy=False)
            writer.add(block, at)
        return TokenStore(writer.commit({"key": key, "source_name": "held out", "dtype": dtype.name}))


def _blocks(stores: Sequence[Store], documents: Ints, after: Place | None) -> Iterator[tuple[Place, EncodedBlock]]:
    """All of the documents, each block with its place. after: of the last one that an interrupted build has written."""
    for number, part in enumerate(_parts(stores)):
        lo, hi = np.searchsorted(documents, [part.first, part.end])
        if lo == hi or (after is not None and number < after.file):
            continue
        chosen = np.zeros(part.end - part.first, bool)
        chosen[documents[lo:hi].astype(np.int64) - part.first] = True
        for count, block in enumerate(chosen_blocks(_open(part), chosen)):
            at = Place(number, 0, count)
            if after is None or at > after:
                yield at, block


class Part(NamedTuple):
    """A shard of a store, or a store that has none. Its documents are [first, end) through all stores."""

    store: Store
    shard: int
    first: int
    end: int


def _parts(stores: Sequence[Store]) -> Iterator[Part]:
    first = 0
    for store in stores:
        sizes = [shard.documents for shard in store.shards] if isinstance(store, ShardedStore) else [len(store)]
        for shard, size in enumerate(sizes):
            yield Part(store, shard, first, first + size)
            first += size


def _open(part: Part) -> Shard:
    """While one is read, the next one of those that lie elsewhere is fetched."""
    store = part.store
    if not isinstance(store, ShardedStore):
        return store
    store.expect([part.shard], range(part.shard + 1, min(part.shard + 2, len(store.shards))))
    return store.shard(part.shard)
