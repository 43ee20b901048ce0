"""The files of a token store: how they are read and how they get there."""

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np

from dataset.faults import BadLines

CHECKED_AT_ONCE = 64 << 20  # bytes of tokens whose SHA-256 takes a few hundredths of a second


class DamagedStore(ValueError):
    """The folder is not a complete store."""


class TokenStore:
    """Memory-mapped documents.

    tokens     uint16 or uint32 [all tokens], document after document, BOS and EOS included
    offsets    int64 [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
    text_bytes uint32 [documents]: UTF-8 bytes of the text, for bits per byte
    doc_hash   uint64 [documents]: hash of the text, for splits by content

    Sizes and the SHA-256 of the files are checked here, against meta.json, which carries its own. Only the tokens of a
    large store are left to `TokenCheck` (store_check.py), which reads them beside the training.
    Errors: DamagedStore.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.meta = meta = _read_meta(self.folder)
        self.tokens = self._map("tokens.bin", np.dtype(meta["dtype"]), meta["tokens"])
        self.offsets = self._map("offsets.bin", np.dtype("int64"), meta["documents"] + 1)
        self.text_bytes = self._map("text_bytes.bin", np.dtype("uint32"), meta["documents"])
        self.doc_hash = self._map("doc_hash.bin", np.dtype("uint64"), meta["documents"])
        arrays = {"offsets.bin": self.offsets, "text_bytes.bin": self.text_bytes, "doc_hash.bin": self.doc_hash}
        if self.tokens.nbytes <= CHECKED_AT_ONCE:
            arrays["tokens.bin"] = self.tokens
        for name, array in arrays.items():
            if hashlib.sha256(array).hexdigest() != meta["sha256"].get(name):
                raise DamagedStore(f"the content of {name} is not what was written")
        assert self.offsets[0] == 0 and self.offsets[-1] == meta["tokens"]
        self.max_token_id: int = meta["max_token_id"]
        self.fingerprint: str = meta["key"]
        self.source_name: str = meta["source_name"]
        self.bad_lines = BadLines.from_dict(meta["bad_lines"])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, i: int) -> np.ndarray:
        """The ids of document i."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def lengths(self) -> np.ndarray:
        """int64 [documents]: tokens of each."""
        return np.diff(self.offsets)

    def __reduce__(self):  # a worker process maps the files itself
        return TokenStore, (self.folder,)

    def _map(self, name: str, dtype: np.dtype, count: int) -> np.ndarray:
        path = self.folder / name
        size = path.stat().st_size if path.exists() else 0
        if size != count * dtype.itemsize:
            raise DamagedStore(f"{name} has {size:,} bytes where {count * dtype.itemsize:,} belong")
        # As plain arrays: slicing np.memmap objects costs a microsecond each.
        return np.memmap(path, dtype, "r").view(np.ndarray) if size else np.empty(0, dtype)


def _read_meta(folder: Path) -> dict:
    """The content of meta.json, of which its own digest says that it is what was written."""
    try:
        text = (folder / "meta.json").read_text(encoding="utf-8")
        meta = json.loads(text)
    except (OSError, ValueError, RecursionError):
        raise DamagedStore("meta.json is missing or damaged") from None
    if not isinstance(meta, dict):
        raise DamagedStore("meta.json is damaged")
    if "sha256" not in meta and "meta_sha256" not in meta:
        raise DamagedStore("an earlier version made it, without digests of its files")
    digest = meta.pop("meta_sha256", None)
    if digest != _digest_of_meta(meta):
        raise DamagedStore("meta.json is damaged")
    return meta


def _digest_of_meta(meta: dict) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


class StoreWriter:
    """Writes a store into `place/.tmp-name`, then renames it to `place/name`. For the holder of the name's lock."""

    def __init__(self, place: Path, name: str, keep_blocks: bool = False):
        self.place, self.name = place, name
        self.temp = place / f".tmp-{name}"
        remove(self.temp)  # an interrupted build's
        self.temp.mkdir(parents=True)
        names = ["tokens.bin", "offsets.bin", "text_bytes.bin", "doc_hash.bin"] + ["blocks.bin"] * keep_blocks
        # __exit__ closes them
        self.files = {file_name: open(self.temp / file_name, "wb") for file_name in names}  # noqa: SIM115
        self.digests = {file_name: hashlib.sha256() for file_name in names}
        self._write("offsets.bin", np.zeros(1, np.int64))
        self.documents = self.tokens = 0
        self.max_token_id = -1

    def add(self, block) -> None:
        """Appends an EncodedBlock."""
        ends = self.tokens + np.cumsum(block.lengths, dtype=np.int64)
        for file_name, values in (
            ("tokens.bin", block.tokens),
            ("offsets.bin", ends),
            ("text_bytes.bin", block.text_bytes),
            ("doc_hash.bin", block.hashes),
        ):
            self._write(file_name, np.ascontiguousarray(values))
        if "blocks.bin" in self.files:  # what a part needs to be put together with the others
            self._write("blocks.bin", np.array([len(block.lengths), len(block.tokens)], np.int64))
        self.documents += len(block.lengths)
        self.tokens += len(block.tokens)
        self.max_token_id = max(self.max_token_id, block.max_token_id)

    def _write(self, file_name: str, values: np.ndarray) -> None:
        self.files[file_name].write(values)
        self.digests[file_name].update(values)

    def commit(self, meta: dict, bad: BadLines) -> Path:
        """Completes meta.json, makes all durable and renames."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()  # Windows renames no folder that has an open file
        counts = {"documents": self.documents, "tokens": self.tokens, "max_token_id": self.max_token_id}
        digests = {file_name: digest.hexdigest() for file_name, digest in self.digests.items()}
        # Through JSON and back: the digest is of what a reader will have.
        content = json.loads(json.dumps({**meta, **counts, "bad_lines": bad.to_dict(), "sha256": digests}))
        content["meta_sha256"] = _digest_of_meta(content)
        with open(self.temp / "meta.json", "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        _fsync_folder(self.temp)
        final = self.place / self.name
        remove(final)  # a damaged one
        os.rename(self.temp, final)
        _fsync_folder(self.place)
        return final

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in self.files.values():
            with contextlib.suppress(OSError):  # a full disk, which has been told already
                file.close()
        remove(self.temp)


def remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _fsync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
