"""A token store of several shards: what a large corpus becomes.

A shard is a token store of its own, of a stretch of the corpus (dealing.py cuts it). So no file grows with the corpus,
processes and machines make shards beside each other, and none has to put them together. What is known of all of them
stands in two files beside them:

    manifest.json     of each shard its documents, tokens, bytes and the digest of its meta.json, which has those of its files
    lengths.bin       uint32 [entries, 2]: of each shard how many documents (second) have how many tokens (first)
    shard-00000/      a token store (format.py)
    shard-00001/      ...

The documents of a sharded store are those of its shards, one after the other: the same, in the same order, as in one store.
A shard is opened when one of its documents is asked for. How many rows a corpus has follows from lengths.bin alone
(dataset/grouped_plan.py).
"""

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.errors import DataError
from common.files import atomic_file, read_small
from dataset.reading.faults import BadLines
from dataset.store.format import DamagedStore, TokenStore, digest_of_json, has_store_fields
from dataset.store.interface import Ints
from dataset.store.joined import Joined

# What a hundred thousand shards take.
MOST_MANIFEST_BYTES = 64 << 20
MOST_LENGTHS_BYTES = 8 << 30
# Shards that are mapped at a time. A group of documents (dataset/grouped_plan.py) has some dozens.
KEPT_SHARDS = 256


class ShardEntry(NamedTuple):
    """What the manifest says of a shard. lengths: its entries of lengths.bin. meta: the digest of its meta.json."""

    name: str
    documents: int
    tokens: int
    text_bytes: int
    lengths: int
    n_bytes: int
    meta: str


class ShardedStore:
    """Token stores under the interface of one; see TokenStore for the arrays.

    bounds: int64 [shards + 1], documents before each shard. Errors: DamagedStore where manifest and files do not agree;
    DataError where a shard that is asked for later turns out damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest, self.shards = _read_manifest(folder)
        self.meta = manifest
        self.fingerprint: str = manifest["key"]
        self.source_name: str = manifest["source_name"]
        self.max_token_id: int = manifest["max_token_id"]
        self.bad_lines = BadLines.from_dict(manifest["bad_lines"])
        self._lengths = _read_lengths(folder, manifest["lengths_sha256"])
        self._lengths_before = np.cumsum([0, *(shard.lengths for shard in self.shards)])
        if self._lengths_before[-1] != len(self._lengths):
            raise DamagedStore("lengths.bin does not have the lengths of all shards")
        documents = [shard.documents for shard in self.shards]
        tokens = [shard.tokens for shard in self.shards]
        self.bounds = np.cumsum([0, *documents])
        # The last offset of a shard is the first one of the next: only the last shard gives all of its own.
        offsets = [*documents[:-1], documents[-1] + 1]
        tokens_before = np.cumsum([0, *tokens])[:-1].tolist()
        self.tokens = Joined(tokens, np.dtype(manifest["dtype"]), lambda i: self.shard(i).tokens)
        self.offsets = Joined(offsets, np.dtype(np.int64), self._offsets_of, tokens_before)
        self.text_bytes = Joined(documents, np.dtype(np.uint32), lambda i: self.shard(i).text_bytes)
        self.doc_hash = Joined(documents, np.dtype(np.uint64), lambda i: self.shard(i).doc_hash)
        # The shard that was used last at the end.
        self._open: OrderedDict[int, TokenStore] = OrderedDict()
        self._refuse_missing_files()

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __reduce__(self) -> tuple[type["ShardedStore"], tuple[Path]]:
        # A worker process maps the files itself.
        return ShardedStore, (self.folder,)

    def document(self, i: int) -> Ints:
        """The ids of document i."""
        return np.asarray(self.tokens[self.offsets[i] : self.offsets[i + 1]])

    def lengths(self) -> Ints:
        """int64 [documents]: tokens of each."""
        return np.diff(self.offsets[:])

    @property
    def total_text_bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return sum(shard.text_bytes for shard in self.shards)

    def lengths_of_shard(self, i: int) -> tuple[Ints, Ints]:
        """(tokens, how many documents of the shard have so many), both int64 [entries]."""
        lo, hi = self._lengths_before[i : i + 2]
        entries = self._lengths[lo:hi].astype(np.int64)
        return entries[:, 0], entries[:, 1]

    def parts(self) -> Iterator[TokenStore]:
        """All shards, one at a time. Errors: DamagedStore."""
        for i in range(len(self.shards)):
            yield self._opened(i)

    def shard(self, i: int) -> TokenStore:
        """One of the shards. Errors: DataError for a damaged one, which the next start makes anew."""
        if i in self._open:
            self._open.move_to_end(i)
            return self._open[i]
        try:
            store = self._opened(i)
        except (DamagedStore, OSError) as error:
            folder = self.folder / self.shards[i].name
            # Without it the next start finds no shard and makes it.
            (folder / "meta.json").unlink(missing_ok=True)
            raise DataError(f"{folder} is damaged ({error}); the next start makes it anew") from None
        self._open[i] = store
        while len(self._open) > KEPT_SHARDS:
            self._open.popitem(last=False)
        return store

    def _opened(self, i: int) -> TokenStore:
        entry = self.shards[i]
        store = TokenStore(self.folder / entry.name)
        if digest_of_json(store.meta) != entry.meta:
            raise DamagedStore("it is not the shard that the manifest tells of")
        return store

    def _offsets_of(self, i: int) -> Ints:
        offsets = self.shard(i).offsets
        return offsets if i == len(self.shards) - 1 else offsets[:-1]

    def _refuse_missing_files(self) -> None:
        """Errors: DamagedStore. The contents are compared when a shard is opened, and beside the training."""
        for shard in self.shards:
            folder = self.folder / shard.name
            if not (folder / "meta.json").is_file() or bytes_of_shard(folder) != shard.n_bytes:
                raise DamagedStore(f"{shard.name} is not whole")


# What trainers open: a small corpus is one store, a large one has shards.
Store = TokenStore | ShardedStore


def bytes_of_shard(folder: Path) -> int:
    """Of all its files."""
    return sum(file.stat().st_size for file in folder.iterdir())


def write_manifest(folder: Path, names: Sequence[str], meta: dict[str, Any], bad_lines: BadLines) -> None:
    """Write manifest.json and lengths.bin for the shards of these names, which lie in the folder.

    Shards without a document are left out. meta: what is known of the corpus. Errors: DamagedStore.
    """
    digest = hashlib.sha256()
    shards = []
    max_token_id = -1
    with open(folder / "lengths.bin", "wb") as file:
        for name in names:
            store = TokenStore(folder / name)
            if not len(store):
                continue
            # uint32 [entries, 2]
            lengths = np.stack(np.unique(store.lengths(), return_counts=True), axis=1).astype(np.uint32)
            file.write(lengths.data)
            digest.update(lengths.data)
            max_token_id = max(max_token_id, store.max_token_id)
            text_bytes = int(store.text_bytes.sum(dtype=np.int64))
            n_bytes = bytes_of_shard(folder / name)
            meta_digest = digest_of_json(store.meta)
            shards.append(
                ShardEntry(name, len(store), len(store.tokens), text_bytes, len(lengths), n_bytes, meta_digest)
            )
        file.flush()
        os.fsync(file.fileno())
    content = {
        **meta,
        "documents": sum(shard.documents for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "max_token_id": max_token_id,
        "bad_lines": bad_lines.to_dict(),
        "shards": [list(shard) for shard in shards],
        "lengths_sha256": digest.hexdigest(),
    }
    text = json.dumps({**content, "manifest_sha256": digest_of_json(content)})
    with atomic_file(folder / "manifest.json") as manifest:
        manifest.write(text.encode())


def _read_manifest(folder: Path) -> tuple[dict[str, Any], list[ShardEntry]]:
    """(what it says of the whole corpus, of each shard). Errors: DamagedStore."""
    try:
        manifest = json.loads(read_small(folder / "manifest.json", MOST_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError):
        raise DamagedStore("manifest.json is missing or damaged") from None
    if not isinstance(manifest, dict):
        raise DamagedStore("manifest.json is damaged")
    digest = manifest.pop("manifest_sha256", None)
    entries = manifest.get("shards")
    if digest != digest_of_json(manifest) or not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise DamagedStore("manifest.json is damaged")
    shards = [ShardEntry(*entry) for entry in manifest.pop("shards")]
    if not shards or not has_store_fields(manifest) or not isinstance(manifest.get("lengths_sha256"), str):
        raise DamagedStore("manifest.json is damaged")
    return manifest, shards


def _is_entry(entry: object) -> bool:
    """A digest that holds does not say who made the file."""
    if not isinstance(entry, list) or len(entry) != len(ShardEntry._fields):
        return False
    name, *counts, meta = entry
    # No path that leads elsewhere.
    if not isinstance(name, str) or not name.startswith("shard-") or not name[6:].isdigit():
        return False
    return all(type(count) is int and count >= 0 for count in counts) and isinstance(meta, str)


def _read_lengths(folder: Path, digest: str) -> Ints:
    """uint32 [entries, 2]. Errors: DamagedStore."""
    path = folder / "lengths.bin"
    size = path.stat().st_size if path.is_file() else 0
    if not 0 < size <= MOST_LENGTHS_BYTES or size % 8:
        raise DamagedStore("lengths.bin is missing or damaged")
    lengths = np.memmap(path, np.uint32, "r").view(np.ndarray)
    if hashlib.sha256(lengths.data).hexdigest() != digest:
        raise DamagedStore("the content of lengths.bin is not what was written")
    return lengths.reshape(-1, 2)
