"""The files of a token store: how they are read and how they get there."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import numpy as np

from dataset.faults import BadLines


class DamagedStore(ValueError):
    """The folder is not a complete store."""


class TokenStore:
    """Memory-mapped documents.

    tokens     uint16 or uint32 [all tokens], document after document, BOS and EOS included
    offsets    int64 [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
    text_bytes uint32 [documents]: UTF-8 bytes of the text, for bits per byte
    doc_hash   uint64 [documents]: hash of the text, for splits by content
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.meta = meta = _read_meta(self.folder)
        self.tokens = self._map("tokens.bin", np.dtype(meta["dtype"]), meta["tokens"])
        self.offsets = self._map("offsets.bin", np.dtype("int64"), meta["documents"] + 1)
        self.text_bytes = self._map("text_bytes.bin", np.dtype("uint32"), meta["documents"])
        self.doc_hash = self._map("doc_hash.bin", np.dtype("uint64"), meta["documents"])
        if self.offsets[0] != 0 or self.offsets[-1] != meta["tokens"]:
            raise DamagedStore("the offsets do not fit the tokens")
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
    kinds = {"key": str, "source_name": str, "documents": int, "tokens": int, "max_token_id": int, "dtype": str}
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        meta = json.loads((folder / "meta.json").read_text())
        BadLines.from_dict(meta["bad_lines"])
        if all(isinstance(meta[name], kind) for name, kind in kinds.items()) and meta["dtype"] in ("uint16", "uint32"):
            return meta
    raise DamagedStore("meta.json is missing or damaged")


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
        self.files["offsets.bin"].write(np.zeros(1, np.int64))
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
            self.files[file_name].write(np.asarray(values))
        if "blocks.bin" in self.files:  # what a part needs to be put together with the others
            self.files["blocks.bin"].write(np.array([len(block.lengths), len(block.tokens)], np.int64))
        self.documents += len(block.lengths)
        self.tokens += len(block.tokens)
        self.max_token_id = max(self.max_token_id, block.max_token_id)

    def commit(self, meta: dict, bad: BadLines) -> Path:
        """Completes meta.json, makes all durable and renames."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        counts = {"documents": self.documents, "tokens": self.tokens, "max_token_id": self.max_token_id}
        with open(self.temp / "meta.json", "w") as file:
            json.dump({**meta, **counts, "bad_lines": bad.to_dict()}, file, indent=1, sort_keys=True)
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
