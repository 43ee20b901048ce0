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
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from common.errors import DataError
from common.wording import announce, counted
from dataset.quality.copies import NONE, Copies, exact_copies, library, near_copies, version_of_near
from dataset.reading.conversations import CONVERSATION, said_in
from dataset.reading.documents import read_documents
from dataset.reading.faults import BadLines
from dataset.reading.settings import EXACT, NEAR, OFF
from dataset.store.encode_worker import EncodedBlock, hash_of_text
from dataset.store.format import DigestCheck, TokenStore
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

# tokens that are copied at once; a longer document by itself
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
    shown = options.get("progress", True)
    cache_dir = options.get("cache_dir")
    files = [files_of(paths, options.get("text_suffixes"), cache_dir) for paths in groups]
    places = [places_of(paths[0], of_group[0], cache_dir) for paths, of_group in zip(groups, files, strict=True)]

    @cache
    def copies() -> Copies:
        """The copies among the documents of all sources, numbered through. Looked for once, and only where a store is made."""
        exact = exact_copies(np.concatenate([store.doc_hash[:] for store in whole]))
        if deduplicate == EXACT:
            return exact
        begin = time.monotonic()
        if shown:
            announce(f"looking for near duplicates among {counted(len(exact.of), 'document')}")
        texts = chain.from_iterable(
            (text for _, _, text in stored_texts(store, of_group, encoder, options.get("text_field", "text")))
            for store, of_group in zip(whole, files, strict=True)
        )
        found = near_copies(enumerate(texts), exact, first_writable(places[0]))
        if shown:
            near = int((found.of != NONE).sum() - found.is_exact.sum())
            announce(f"found {counted(near, 'near duplicate')}, {time.monotonic() - begin:.1f} s")
        return found

    bounds = np.cumsum([0, *map(len, whole)]).tolist()

    def without_copies(i: int) -> TokenStore:
        """Source i, whose documents are those from bounds[i] on."""
        store = whole[i]

        def write(writer: StoreWriter) -> dict[str, Any]:
            # Damage that went along into the new store would get a digest that holds.
            DigestCheck([store]).raise_if_damaged(wait_s=threading.TIMEOUT_MAX)
            mine = slice(bounds[i], bounds[i + 1])
            stays = copies().of[mine] == NONE
            if not stays.any():
                raise DataError(
                    f"{files[i][0]}: all {counted(len(store), 'document')} are copies of documents in the sources before it: "
                    "leave it out, or name it first"
                )
            exact = int(copies().is_exact[mine].sum())
            left_out = {"documents": len(store), EXACT: exact}
            if deduplicate == NEAR:
                left_out[NEAR] = int((~stays).sum()) - exact
            writer.bad_lines = store.bad_lines
            lo = 0
            while lo < len(store):
                hi = int(np.searchsorted(store.offsets, store.offsets[lo] + BLOCK_TOKENS, side="right")) - 1
                hi = max(hi, lo + 1)
                of_block = stays[lo:hi]
                offsets = store.offsets[lo : hi + 1]
                lengths = np.diff(offsets)
                block = EncodedBlock(
                    tokens=store.tokens[offsets[0] : offsets[-1]][np.repeat(of_block, lengths)],
                    lengths=lengths[of_block],
                    text_bytes=store.text_bytes[lo:hi][of_block],
                    hashes=store.doc_hash[lo:hi][of_block],
                    # Those of the whole store are known.
                    bad=BadLines(),
                )
                writer.add(block)
                lo = hi
            return {**store.meta, "key": key, "left_out": left_out}

        # A source loses what those before it have, so it depends on them too.
        keys = [earlier.fingerprint for earlier in whole[: i + 1]]
        version = version_of_near() if deduplicate == NEAR else []
        key = hashlib.sha256(json.dumps([VERSION, deduplicate, version, keys]).encode()).hexdigest()
        return open_or_make(places[i], f"{store.source_name}-{deduplicate}", key, write, progress=shown)

    return [without_copies(i) for i in range(len(whole))]


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


def stored_texts(
    store: TokenStore, files: Sequence[Path], encoder: DocumentEncoder, text_field: str
) -> Iterator[tuple[int, int, str]]:
    """(number of its file, its line from 1 or row of a table, its text) of each document of a store, in their order. Of a
    conversation the text is what is said. files: those that the store was made of.

    A text without a document is passed over: some are too long for the tokenizer, and of some it makes no token. They
    are told by the hashes that the store has of its texts.
    Errors: DataError where the files have changed.
    """
    number = 0
    for file, path in enumerate(files):
        # What is wrong with a line was told when the store was made, or was to be skipped.
        for line, text in read_documents(path, text_field, BadLines(), encoder.blank_line_ends_document):
            if number < len(store) and hash_of_text(encoder.body(text).encode()) == store.doc_hash[number]:
                yield file, line, said_in(text) if text_field == CONVERSATION else text
                number += 1
    if number != len(store):
        raise DataError(f"{files[0].parent}: the data has changed since it was tokenised; start again")
