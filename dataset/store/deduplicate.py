"""`--deduplicate`: stores without the documents that are copies of earlier ones.

Such a store is made out of the whole one, which stays: it is a store of its own with a key of its own, so what opens it
need not know of copies. Its key has the keys of the stores that it depends on, and all that decides which documents are
copies. The first of several that are alike stays, in the order of `--data_path`; of several sources the later ones lose
what an earlier one has.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np

from common.errors import DataError
from common.wording import announce, counted
from dataset.quality.copies import NONE, Copies, exact_copies, library, near_copies, version_of_near
from dataset.reading.conversations import CONVERSATION, said_in
from dataset.reading.documents import BadLines, read_documents
from dataset.reading.settings import EXACT, NEAR, OFF
from dataset.store.encode_worker import EncodedBlock, hash_of_text
from dataset.store.format import DigestCheck, Ints, TokenStore
from dataset.store.token_store import (
    StoreOptions,
    StoreWriter,
    files_of,
    first_writable,
    open_or_build,
    open_or_make,
    places_of,
)
from dataset.tokenizing.encoder import DocumentEncoder

# tokens that are copied at once, and one document more
BLOCK_TOKENS = 1 << 22
# Raise this number when the same stores would lose other documents.
VERSION = 1


def open_sources(
    groups: list[list[str]], encoder: DocumentEncoder, deduplicate: str = OFF, **options: Unpack[StoreOptions]
) -> list[TokenStore]:
    """The store of each group of paths, tokenised now if it is not there yet, without copies if that is asked for.

    Errors: DataError for a source that has nothing else, where the files have changed, and for a missing library.
    """
    check_library(deduplicate)
    whole = [open_or_build(paths, encoder, **options) for paths in groups]
    if deduplicate == OFF:
        return whole
    sources = Sources(whole, groups, encoder, deduplicate, options)
    return [sources.open(i) for i in range(len(whole))]


def check_library(method: str) -> None:
    """Errors: DataError where near copies are to be found and the library is missing, which is told before hours of work."""
    if method == NEAR:
        library()


def notice_of(store: TokenStore) -> str | None:
    """A line on what a store without copies leaves out; None for a whole one."""
    left_out = store.meta.get("left_out")
    if left_out is None:
        return None
    documents, exact, near = (left_out.get(kind, 0) for kind in ("documents", EXACT, NEAR))
    kinds = f"{exact:,} to the letter"
    if NEAR in left_out:
        kinds += f", {near:,} nearly"
    share = (exact + near) / max(documents, 1)
    return (
        f"{store.source_name}: {exact + near:,} of {counted(documents, 'document')} ({share:.1%}) are copies of earlier ones "
        f"({kinds}) and are left out"
    )


class Sources:
    """The sources of a run, and which of their documents are copies."""

    def __init__(
        self,
        whole: Sequence[TokenStore],
        groups: list[list[str]],
        encoder: DocumentEncoder,
        method: str,
        options: StoreOptions,
    ) -> None:
        self.whole = whole
        self.encoder = encoder
        self.method = method
        self.text_field = options.get("text_field", "text")
        self.shown = options.get("progress", True)
        cache_dir = options.get("cache_dir")
        self.files = [files_of(paths, options.get("text_suffixes"), cache_dir) for paths in groups]
        self.places = []
        for paths, files in zip(groups, self.files, strict=True):
            self.places.append(places_of(paths[0], files[0], cache_dir))
        # Documents before each source.
        self.bounds = np.cumsum([0] + [len(store) for store in whole])

    def open(self, i: int) -> TokenStore:
        """The store of source i without copies."""
        # A source loses what those before it have, so it depends on them too.
        keys = [store.fingerprint for store in self.whole[: i + 1]]
        version = version_of_near() if self.method == NEAR else []
        key = hashlib.sha256(json.dumps([VERSION, self.method, version, keys]).encode()).hexdigest()
        name = f"{self.whole[i].source_name}-{self.method}-{key[:16]}"
        return open_or_make(self.places[i], name, key, lambda folder: self._build(i, key, folder), progress=self.shown)

    def _build(self, i: int, key: str, folder: Path) -> TokenStore:
        whole = self.whole[i]
        # Damage that went along into the new store would get a digest that holds.
        DigestCheck([whole]).raise_if_damaged(wait_s=threading.TIMEOUT_MAX)
        copies = self.copies
        mine = slice(self.bounds[i], self.bounds[i + 1])
        stays = copies.of[mine] == NONE
        if not stays.any():
            raise DataError(
                f"{self.files[i][0]}: all {counted(len(whole), 'document')} are copies of documents in the sources before it: "
                "leave it out, or name it first"
            )
        exact = int(copies.is_exact[mine].sum())
        left_out = {"documents": len(whole), EXACT: exact}
        if self.method == NEAR:
            left_out[NEAR] = int((~stays).sum()) - exact
        with StoreWriter(folder) as writer:
            writer.bad_lines = whole.bad_lines
            for block in _blocks(whole, stays):
                writer.add(block)
            return writer.commit({**whole.meta, "key": key, "left_out": left_out})

    @cached_property
    def copies(self) -> Copies:
        """Of the documents of all sources, numbered through."""
        exact = exact_copies(np.concatenate([store.doc_hash[:] for store in self.whole]))
        if self.method == EXACT:
            return exact
        begin = time.monotonic()
        if self.shown:
            announce(f"looking for near duplicates among {counted(len(exact.of), 'document')}")
        found = near_copies(self._texts(), exact, first_writable(self.places[0]))
        if self.shown:
            announce(f"found {counted(found.near, 'near duplicate')}, {time.monotonic() - begin:.1f} s")
        return found

    def _texts(self) -> Iterator[tuple[int, str]]:
        """(number among all sources, text) of each document."""
        for i, store in enumerate(self.whole):
            for stored in stored_texts(store, self.files[i], self.encoder, self.text_field):
                text = said_in(stored.text) if self.text_field == CONVERSATION else stored.text
                yield int(self.bounds[i]) + stored.number, text


def _blocks(whole: TokenStore, stays: Ints) -> Iterator[EncodedBlock]:
    """The documents that stay, in pieces of about BLOCK_TOKENS tokens. stays: bool [documents]."""
    lo = 0
    while lo < len(stays):
        hi = int(np.searchsorted(whole.offsets, whole.offsets[lo] + BLOCK_TOKENS, side="right")) - 1
        hi = min(max(hi, lo + 1), len(stays))
        of_block = stays[lo:hi]
        lengths = np.diff(whole.offsets[lo : hi + 1])
        tokens = whole.tokens[whole.offsets[lo] : whole.offsets[hi]][np.repeat(of_block, lengths)]
        yield EncodedBlock(
            tokens=tokens,
            lengths=lengths[of_block],
            text_bytes=whole.text_bytes[lo:hi][of_block],
            hashes=whole.doc_hash[lo:hi][of_block],
            # Those of the whole store are known.
            bad=BadLines(),
        )
        lo = hi


class StoredText(NamedTuple):
    """The text of a document, and where it stands."""

    # Of the document in its store.
    number: int
    # Of its file among those of the store.
    file: int
    # From 1; a row of a table likewise.
    line: int
    text: str


def stored_texts(
    store: TokenStore, files: Sequence[Path], encoder: DocumentEncoder, text_field: str
) -> Iterator[StoredText]:
    """The texts of all documents of a store, in their order. files: those that the store was made of.

    A text without a document is passed over: some are too long for the tokenizer, and of some it makes no token. They
    are told by the hashes that the store has of its texts.
    Errors: DataError where the files have changed.
    """
    number = 0
    for file, path in enumerate(files):
        # What is wrong with a line was told when the store was made, or was to be skipped.
        for line, text in read_documents(path, text_field, BadLines(), encoder.blank_line_ends_document):
            if number < len(store) and hash_of_text(encoder.body(text).encode()) == store.doc_hash[number]:
                yield StoredText(number, file, line, text)
                number += 1
    if number != len(store):
        raise DataError(f"{files[0].parent}: the data has changed since it was tokenised; start again")
