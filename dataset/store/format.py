"""The files of a token store and how they are read.

What the digests are for: a flipped bit in tokens.bin would train the model on another text, one in offsets.bin would cut
documents in the wrong places, one in doc_hash.bin would move a document to the other side of a split. None of them would
raise an error. So meta.json has the SHA-256 of each file, and its own; a store that does not agree with them is made
anew out of the data.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from common.files import read_small
from dataset.reading.faults import BadLines
from dataset.store.interface import Ints

# Bytes of tokens whose SHA-256 takes a few hundredths of a second.
CHECKED_AT_ONCE = 64 << 20
MOST_META_BYTES = 16 << 20
# The files of a store, beside meta.json.
FILES = ("tokens.bin", "offsets.bin", "text_bytes.bin", "doc_hash.bin")


class DamagedStore(ValueError):
    """The folder is not a complete store."""


class TokenStore:
    """Memory-mapped documents.

    tokens     uint16 or uint32 [all tokens], document after document, BOS and EOS included
    offsets    int64 [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
    text_bytes uint32 [documents]: UTF-8 bytes of the text, for bits per byte
    doc_hash   uint64 [documents]: hash of the text, for splits by content

    Sizes and the SHA-256 of the files are checked here, against meta.json, which carries its own. Only the tokens of a
    large store are left to `DigestCheck` (check.py), which reads them beside the training.
    Errors: DamagedStore.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        meta = _read_meta(self.folder)
        self.meta = meta
        self.tokens = self._map("tokens.bin", np.dtype(meta["dtype"]), meta["tokens"])
        self.offsets = self._map("offsets.bin", np.dtype("int64"), meta["documents"] + 1)
        self.text_bytes = self._map("text_bytes.bin", np.dtype("uint32"), meta["documents"])
        self.doc_hash = self._map("doc_hash.bin", np.dtype("uint64"), meta["documents"])
        # These are small beside the tokens, so they are compared at every start. The tokens of a large store are not: minutes
        # of hashing would come before the first update. A thread does it then, see check.py.
        arrays = {"offsets.bin": self.offsets, "text_bytes.bin": self.text_bytes, "doc_hash.bin": self.doc_hash}
        if self.tokens.nbytes <= CHECKED_AT_ONCE:
            arrays["tokens.bin"] = self.tokens
        for name, array in arrays.items():
            if hashlib.sha256(array.data).hexdigest() != meta["sha256"].get(name):
                raise DamagedStore(f"the content of {name} is not what was written")
        self.max_token_id: int = meta["max_token_id"]
        self.fingerprint: str = meta["key"]
        self.source_name: str = meta["source_name"]
        self.bad_lines = BadLines.from_dict(meta["bad_lines"])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, i: int) -> Ints:
        """The ids of document i."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def lengths(self) -> Ints:
        """int64 [documents]: tokens of each."""
        return np.diff(self.offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process maps the files itself.
        return TokenStore, (self.folder,)

    @property
    def total_text_bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return int(self.text_bytes.sum(dtype=np.int64))

    def _map(self, name: str, dtype: np.dtype[Any], count: int) -> Ints:
        """The numbers of a file, in memory as far as they are read. Errors: DamagedStore for a file of another size."""
        path = self.folder / name
        size = path.stat().st_size if path.exists() else 0
        if size != count * dtype.itemsize or not size:
            raise DamagedStore(f"{name} has {size:,} bytes where {count * dtype.itemsize:,} belong")
        # As plain arrays: slicing np.memmap objects costs a microsecond each.
        return np.memmap(path, dtype, "r").view(np.ndarray)


def _read_meta(folder: Path) -> dict[str, Any]:
    """The content of meta.json, of which its own digest says that it is what was written."""
    meta = read_small_json(folder / "meta.json", MOST_META_BYTES)
    if not isinstance(meta, dict):
        raise DamagedStore("meta.json is missing or damaged")
    if meta.pop("meta_sha256", None) != digest_of_json(meta):
        raise DamagedStore("meta.json is damaged")
    return meta


def read_small_json(path: Path, most_bytes: int) -> object:
    """What a JSON file of our own holds; None where it is missing, larger than such a file can be, or no JSON."""
    try:
        return json.loads(read_small(path, most_bytes))
    except (OSError, ValueError, RecursionError):
        return None


def digest_of_json(content: object) -> str:
    """The SHA-256 of what can be written as JSON, whatever the order of its keys and the white space of a file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
