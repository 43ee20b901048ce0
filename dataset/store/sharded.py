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

import contextlib
import hashlib
import json
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from common.errors import DataError
from common.files import atomic_file, let_files_be_open, read_small
from dataset.reading.faults import BadLines
from dataset.store.format import FILES, DamagedStore, TokenStore, digest_of_json, has_store_fields
from dataset.store.interface import Ints
from dataset.store.joined import Joined

# What a hundred thousand shards take.
MOST_MANIFEST_BYTES = 128 << 20
# Shards that are mapped at a time. A group of documents (dataset/grouped_plan.py) has some dozens.
KEPT_SHARDS = 256
# Of each; a mixture has several stores.
FILES_OF_SHARD = 4
OPEN_FILES = 16 * KEPT_SHARDS * FILES_OF_SHARD


class ShardEntry(NamedTuple):
    """What the manifest says of a shard.

    lengths: its entries of lengths.bin. n_bytes: of all its files. meta: the digest of its meta.json. files: (bytes, SHA-256)
    of the others.
    """

    name: str
    documents: int
    tokens: int
    text_bytes: int
    lengths: int
    n_bytes: int
    meta: str
    files: dict[str, tuple[int, str]]


class Shard(Protocol):
    """A TokenStore, as far as it is read here."""

    @property
    def tokens(self) -> Ints: ...
    @property
    def offsets(self) -> Ints: ...
    @property
    def text_bytes(self) -> Ints: ...
    @property
    def doc_hash(self) -> Ints: ...


class ShardPlace(Protocol):
    """Where a sharded store lies: a ShardFolder, or RemoteShards (remote_shards.py). Errors of all: DamagedStore, DataError."""

    def __str__(self) -> str: ...
    def manifest(self) -> bytes:
        """The content of manifest.json."""

    def lengths(self) -> Ints:
        """The content of lengths.bin, uint8."""

    def refuse_missing(self, shards: Sequence[ShardEntry]) -> None:
        """Tell what is not there, as far as that is known without reading it."""

    def open(self, shard: ShardEntry, dtype: np.dtype[Any]) -> Shard: ...
    def holds(self, shard: ShardEntry) -> bool:
        """Whether what is trained of a shard is on this machine."""

    def fetched_bytes(self, shards: Sequence[ShardEntry]) -> int:
        """What these take of the cache of what is fetched."""

    @property
    def limit_bytes(self) -> int:
        """Of that cache."""

    def fetch(self, shards: Sequence[ShardEntry]) -> None:
        """Wait until what is trained of these is on this machine."""

    def prefetch(self, shards: Sequence[ShardEntry]) -> None:
        """Begin to bring it there."""


@dataclass(frozen=True)
class ShardFolder:
    """Shards on this machine. text_is_known: whether a start reads the text too, and makes a damaged shard anew from it."""

    folder: Path
    text_is_known: bool = True

    def __str__(self) -> str:
        return str(self.folder)

    def manifest(self) -> bytes:
        try:
            return read_small(self.folder / "manifest.json", MOST_MANIFEST_BYTES)
        except OSError as error:
            raise DamagedStore(f"manifest.json: {error.strerror}") from None

    def lengths(self) -> Ints:
        path = self.folder / "lengths.bin"
        if not path.is_file() or not path.stat().st_size:
            raise DamagedStore("lengths.bin is missing")
        return np.memmap(path, np.uint8, "r").view(np.ndarray)

    def refuse_missing(self, shards: Sequence[ShardEntry]) -> None:
        """The contents are compared when a shard is opened, and beside the training."""
        for shard in shards:
            folder = self.folder / shard.name
            try:
                n_bytes = bytes_of_shard(folder)
            except OSError:
                n_bytes = 0
            if n_bytes != shard.n_bytes:
                raise DamagedStore(f"{shard.name} is not whole")

    def open(self, shard: ShardEntry, dtype: np.dtype[Any]) -> TokenStore:
        folder = self.folder / shard.name
        try:
            store = TokenStore(folder)
            if digest_of_json(store.meta) != shard.meta:
                raise DamagedStore("it is not the shard that the manifest tells of")
            return store
        except (DamagedStore, FileNotFoundError) as error:
            if not self.text_is_known:
                raise DataError(f"{folder} is damaged ({error}); copy it again from where it was made") from None
            forget(folder)
            raise DataError(f"{folder} is damaged ({error}); the next start makes it anew") from None
        except OSError as error:
            # Too many open files, a network folder that is away: the shard itself may be whole.
            raise DataError(f"{folder} cannot be read now: {error.strerror or error}") from None

    def holds(self, shard: ShardEntry) -> bool:
        return True

    def fetched_bytes(self, shards: Sequence[ShardEntry]) -> int:
        return 0

    @property
    def limit_bytes(self) -> int:
        return sys.maxsize

    def fetch(self, shards: Sequence[ShardEntry]) -> None:
        """They are here."""

    def prefetch(self, shards: Sequence[ShardEntry]) -> None:
        """They are here."""


class ShardedStore:
    """Token stores under the interface of one; see TokenStore for the arrays.

    shard_bounds: int64 [shards + 1], documents before each shard. Errors: DamagedStore where manifest and files do not agree;
    DataError where a shard that is asked for later turns out damaged.
    """

    def __init__(self, place: ShardPlace) -> None:
        self.place = place
        let_files_be_open(OPEN_FILES)
        manifest, self.shards = _read_manifest(place.manifest())
        self.meta = manifest
        self.fingerprint: str = manifest["key"]
        self.source_name: str = manifest["source_name"]
        self.max_token_id: int = manifest["max_token_id"]
        self.bad_lines = BadLines.from_dict(manifest["bad_lines"])
        self._lengths = _as_lengths(place.lengths(), manifest["lengths_sha256"])
        self._lengths_before = np.cumsum([0, *(shard.lengths for shard in self.shards)])
        if self._lengths_before[-1] != len(self._lengths):
            raise DamagedStore("lengths.bin does not have the lengths of all shards")
        place.refuse_missing(self.shards)
        documents = [shard.documents for shard in self.shards]
        tokens = [shard.tokens for shard in self.shards]
        self.shard_bounds = np.cumsum([0, *documents])
        # The last offset of a shard is the first one of the next: only the last shard gives all of its own.
        offsets = [*documents[:-1], documents[-1] + 1]
        tokens_before = np.cumsum([0, *tokens])[:-1].tolist()
        self.tokens = Joined(tokens, np.dtype(manifest["dtype"]), lambda i: self.shard(i).tokens)
        self.offsets = Joined(offsets, np.dtype(np.int64), self._offsets_of, tokens_before)
        self.text_bytes = Joined(documents, np.dtype(np.uint32), lambda i: self.shard(i).text_bytes)
        self.doc_hash = Joined(documents, np.dtype(np.uint64), lambda i: self.shard(i).doc_hash)
        # The shard that was used last at the end.
        self._open: OrderedDict[int, Shard] = OrderedDict()

    def __len__(self) -> int:
        return int(self.shard_bounds[-1])

    def __reduce__(self) -> tuple[Callable[..., "ShardedStore"], tuple[ShardPlace, str]]:
        # A worker process maps the files itself.
        return _opened_again, (self.place, self.fingerprint)

    @property
    def folder(self) -> Path:
        """Of one on this machine."""
        assert isinstance(self.place, ShardFolder)
        return self.place.folder

    @property
    def is_elsewhere(self) -> bool:
        """Whether shards are fetched when they are asked for."""
        return not isinstance(self.place, ShardFolder)

    def shards_here(self) -> list[int]:
        """The numbers of those that need not be fetched to be trained."""
        return [i for i, shard in enumerate(self.shards) if self.place.holds(shard)]

    @property
    def stays_as_it_is(self) -> bool:
        """Whether a damaged shard cannot be made anew here, since only the tokens are known."""
        return not (isinstance(self.place, ShardFolder) and self.place.text_is_known)

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

    def fetched_bytes(self, shards: Iterable[int]) -> int:
        """What the shards of these numbers take of the cache of what is fetched; 0 of a store on this machine."""
        return self.place.fetched_bytes([self.shards[i] for i in shards])

    @property
    def limit_bytes(self) -> int:
        """Of that cache."""
        return self.place.limit_bytes

    def expect(self, now: Sequence[int], soon: Sequence[int]) -> None:
        """Documents of the shards `now` are asked for, and of the shards `soon` after them: these are fetched meanwhile, if
        there is room for all."""
        if self.fetched_bytes({*now, *soon}) <= self.limit_bytes:
            self.prefetch(soon)

    def fetch(self, shards: Iterable[int]) -> None:
        """Wait until what is trained of the shards of these numbers is on this machine. Errors: DataError."""
        self.place.fetch([self.shards[i] for i in shards])

    def prefetch(self, shards: Iterable[int]) -> None:
        """Begin to bring it there."""
        self.place.prefetch([self.shards[i] for i in shards])

    def parts(self) -> Iterator[TokenStore]:
        """All shards that are on this machine, one at a time. Errors: DataError."""
        if isinstance(self.place, ShardFolder):
            for shard in self.shards:
                yield self.place.open(shard, self.tokens.dtype)

    def shard(self, i: int) -> Shard:
        """One of the shards. Errors: DataError for a damaged one."""
        if i in self._open:
            self._open.move_to_end(i)
            return self._open[i]
        # What is mapped takes its place on the disk until it is let go.
        for other in [other for other in self._open if not self.place.holds(self.shards[other])]:
            del self._open[other]
        while len(self._open) >= KEPT_SHARDS:
            self._open.popitem(last=False)
        self._open[i] = self.place.open(self.shards[i], self.tokens.dtype)
        return self._open[i]

    def _offsets_of(self, i: int) -> Ints:
        offsets = self.shard(i).offsets
        return offsets if i == len(self.shards) - 1 else offsets[:-1]


def _opened_again(place: ShardPlace, fingerprint: str) -> ShardedStore:
    """The store as another process of a run opens it. Errors: DataError where it is another one by now."""
    store = ShardedStore(place)
    if store.fingerprint != fingerprint:
        raise DataError(f"{place}: another store has taken its place since this run began; start again")
    return store


# What trainers open: a small corpus is one store, a large one has shards.
Store = TokenStore | ShardedStore


def forget(store: Path) -> None:
    """Let the next start find no store in that folder, and make one."""
    with contextlib.suppress(OSError):
        (store / "meta.json").unlink()


def bytes_of_shard(folder: Path) -> int:
    """Of all its files. NFS keeps what is deleted while it is open, under names that begin with .nfs: these are none of them."""
    return sum((folder / name).stat().st_size for name in (*FILES, "meta.json"))


def write_manifest(folder: Path, names: Sequence[str], corpus: dict[str, Any], bad_lines: BadLines) -> None:
    """Write manifest.json and lengths.bin for the shards of these names, which lie in the folder.

    Shards without a document are left out. corpus: what is known of the corpus. Errors: DamagedStore.
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
            meta = digest_of_json(store.meta)
            files = {}
            for file_name in FILES:
                files[file_name] = ((folder / name / file_name).stat().st_size, store.meta["sha256"][file_name])
            shards.append(
                ShardEntry(name, len(store), len(store.tokens), text_bytes, len(lengths), n_bytes, meta, files)
            )
        file.flush()
        os.fsync(file.fileno())
    content = {
        **corpus,
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


def _read_manifest(content: bytes) -> tuple[dict[str, Any], list[ShardEntry]]:
    """(what it says of the whole corpus, of each shard). Errors: DamagedStore."""
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):
        raise DamagedStore("manifest.json is damaged") from None
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
    name, *counts, meta, files = entry
    # No path that leads elsewhere.
    if not isinstance(name, str) or not re.fullmatch("shard-[0-9]+", name) or not isinstance(meta, str):
        return False
    if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(files, dict):
        return False
    return all(_is_file(files.get(file)) for file in FILES)


def _is_file(entry: object) -> bool:
    """(bytes, SHA-256)"""
    if not isinstance(entry, list) or len(entry) != 2 or type(entry[0]) is not int or not 0 < entry[0] < 1 << 50:
        return False
    return isinstance(entry[1], str) and re.fullmatch("[0-9a-f]{64}", entry[1]) is not None


def _as_lengths(raw: Ints, digest: str) -> Ints:
    """uint32 [entries, 2]. raw: uint8. Errors: DamagedStore."""
    if hashlib.sha256(raw.data).hexdigest() != digest or len(raw) % 8:
        raise DamagedStore("the content of lengths.bin is not what was written")
    return raw.view(np.uint32).reshape(-1, 2)
