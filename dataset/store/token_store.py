"""The files of a token store: reading one store, several as one, and checking that the files are intact.

Why digests: a flipped bit in tokens.bin would train the model on another text, one in offsets.bin would cut documents
in the wrong places, one in doc_hash.bin would move a document to the other side of a split, all without an error. So
meta.json has the SHA-256 of each file, and its own; a store that does not match them is rebuilt from the data.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.files import digest_of_json
from dataset.arrays import Ints
from dataset.reading.bad_lines import BadLines

# Maximum bytes of tokens.bin to check at opening: SHA-256 takes a second, and a disk that has to be read some more.
MAX_OPEN_CHECK_BYTES = 2 << 30
# files of a store, besides meta.json
FILES = ("tokens.bin", "offsets.bin", "text_bytes.bin", "doc_hash.bin", "copy_hash.bin")


class TokenStore:
    """Memory-mapped documents.

    tokens     uint16 or uint32 [all tokens], document after document, BOS and EOS included
    offsets    int64 [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]]
    text_bytes uint32 [documents]: UTF-8 bytes of the text, for bits per byte
    doc_hash   uint64 [documents]: hash of the text, for splits by content
    copy_hash  uint64 [documents]: the same for texts that differ in line ends or outer blanks; doc_hash in older stores

    Sizes and the SHA-256 of the files are checked here, against meta.json, which has its own; not that of more than
    MAX_OPEN_CHECK_BYTES of tokens, which would take minutes. Errors: ValueError or OSError for a store that is damaged or missing.
    """

    def __init__(self, folder: str | Path, is_checked: bool = False) -> None:
        """is_checked: this store was opened before."""
        self.folder = Path(folder)
        self.is_checked = is_checked
        meta = read_json(self.folder / "meta.json")
        if not isinstance(meta, dict) or meta.pop("meta_sha256", None) != digest_of_json(meta):
            raise ValueError("meta.json is missing or damaged")
        self.meta: dict[str, Any] = meta
        self.tokens = self._map("tokens.bin", meta["dtype"], meta["tokens"])
        self.offsets = self._map("offsets.bin", "int64", meta["documents"] + 1)
        self.text_bytes = self._map("text_bytes.bin", "uint32", meta["documents"])
        self.doc_hash = self._map("doc_hash.bin", "uint64", meta["documents"])
        of_copies = "copy_hash.bin" if "copy_hash.bin" in meta["sha256"] else "doc_hash.bin"
        self.copy_hash = self._map(of_copies, "uint64", meta["documents"])
        # digest of the data and of how it was tokenised
        self.fingerprint: str = meta["key"]
        self.source_name: str = meta["source_name"]
        self.bad_lines = BadLines.from_dict(meta["bad_lines"])
        # Lines for the user: what was done with fields of chats, what the tokenizer loses, skipped lines, and what the caller adds
        self.notices = [*meta.get("notes", []), *self.bad_lines.report()]
        # that it was opened for; where a file beside it may be, best first
        self.files: list[Path] = []
        self.cache_folders: list[Path] = []

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, i: int) -> Ints:
        """The ids of document i."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process maps the files itself.
        return TokenStore, (self.folder, True)

    def _map(self, name: str, dtype: str, count: int) -> Ints:
        """Memory-map the numbers of a file. Errors: as in the class; np.memmap refuses an empty file itself."""
        # As plain arrays: slicing np.memmap objects costs a microsecond each.
        numbers = np.memmap(self.folder / name, dtype, "r").view(np.ndarray)
        is_whole = len(numbers) == count
        is_too_large = name == "tokens.bin" and numbers.nbytes > MAX_OPEN_CHECK_BYTES
        if is_whole and not (self.is_checked or is_too_large):
            is_whole = hashlib.sha256(numbers.data).hexdigest() == self.meta["sha256"].get(name)
        if not is_whole:
            raise ValueError(f"the content of {name} is not what was written")
        return numbers


class JoinedTokens:
    """The tokens of several stores as one array, read by slices without a step.

    The parts are mapped files of many gigabytes, too large to copy into one array.
    """

    def __init__(self, parts: Sequence[Ints]) -> None:
        self.parts = parts
        self.bounds = np.cumsum([0] + [len(part) for part in parts])
        self.dtype = np.result_type(*(part.dtype for part in parts))

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, index: slice) -> Ints:
        begin, end, step = index.indices(len(self))
        assert step == 1
        pieces = [np.empty(0, self.dtype)]
        first, last = np.searchsorted(self.bounds[1:], (begin, end), side="right")
        for number in range(first, min(last + 1, len(self.parts))):
            before = int(self.bounds[number])
            pieces.append(self.parts[number][max(begin - before, 0) : end - before])
        return np.concatenate(pieces)


class ConcatStore:
    """Several token stores with the arrays of one; documents and tokens are numbered consecutively."""

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        self.stores = stores
        # documents before each store, and in total
        self.bounds = np.cumsum([0] + [len(store) for store in stores])
        self.tokens = JoinedTokens([store.tokens for store in stores])
        ends = [store.offsets[1:] + before for store, before in zip(stores, self.tokens.bounds.tolist(), strict=False)]
        self.offsets = np.concatenate([np.zeros(1, np.int64), *ends])
        self.text_bytes = np.concatenate([store.text_bytes for store in stores])
        self.doc_hash = np.concatenate([store.doc_hash for store in stores])
        self.copy_hash = np.concatenate([store.copy_hash for store in stores])
        self.fingerprint = hashlib.sha256(" ".join(store.fingerprint for store in stores).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        # Each store pickles without its arrays.
        return ConcatStore, (self.stores,)


# Tokenised documents, numbered from 0, and their tokens
Documents = TokenStore | ConcatStore
Tokens = Ints | JoinedTokens


def read_json(path: Path) -> object:
    """The content of one of our JSON files; None if it is missing or not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
