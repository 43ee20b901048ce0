"""The files of a token store and how they are read."""

import hashlib
import json
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
    if digest != digest_of_json(meta):
        raise DamagedStore("meta.json is damaged")
    return meta


def digest_of_json(meta: dict) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
