"""`--deduplicate`: which documents of the sources are copies of earlier ones.

The stores stay complete; a run leaves the copies out of its rows. The first of several copies stays, in the order of
`--data_path`, so a later source loses documents that an earlier one has. Exact copies are found at each start by the hashes in
the stores. Finding near copies takes minutes, so they are cached beside the stores.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from common.errors import DataError
from common.files import atomic_file, digest_of_json
from common.wording import announce, counted
from dataset.arrays import Bools
from dataset.quality.copies import NO_EARLIER, Copies, exact_copies, near_copies, near_copies_version
from dataset.reading.bad_lines import BadLines
from dataset.reading.conversations import CONVERSATION, conversation_text
from dataset.reading.documents import read_documents
from dataset.reading.settings import NEAR, TextSettings
from dataset.store.build import first_writable, hash_of_text
from dataset.store.token_store import TokenStore
from dataset.tokenizing.encoder import DocumentEncoder

# Raise this number when other documents would be left out.
VERSION = 1


def copies_among(
    stores: Sequence[TokenStore], encoder: DocumentEncoder, method: str, reading: TextSettings, progress: bool
) -> tuple[Bools, str, list[str]]:
    """(which documents are copies, a fingerprint of the others, a notice for each store).

    method: EXACT or NEAR. reading: of the stores.
    Errors: DataError if the files have changed; OSError.
    """
    exact = exact_copies(np.concatenate([store.copy_hash for store in stores]))
    of_texts = exact_copies(np.concatenate([store.doc_hash for store in stores]))
    # A run whose documents stay the same goes on.
    exact_version = VERSION if np.array_equal(exact.is_exact, of_texts.is_exact) else VERSION + 1
    version = near_copies_version() if method == NEAR else []
    fingerprint = digest_of_json([exact_version, method, version, [store.fingerprint for store in stores]])
    is_copy = exact.is_exact
    if method == NEAR:
        of_stores = (
            stored_texts(store, store.files, encoder, reading.text_field, reading.split_text) for store in stores
        )
        texts = (text for _, _, text in chain.from_iterable(of_stores))
        is_copy = _near_or_exact(stores[0], texts, exact, fingerprint, progress)
    notices = []
    for store, (lo, hi) in zip(stores, pairwise(np.cumsum([0, *map(len, stores)])), strict=True):
        n_copies = int(is_copy[lo:hi].sum())
        n_exact = int(exact.is_exact[lo:hi].sum())
        near = f", {n_copies - n_exact:,} near" if method == NEAR else ""
        notices.append(
            f"{store.source_name}: {n_copies:,} of {counted(len(store), 'document')} ({n_copies / len(store):.1%}) are copies of "
            f"earlier ones ({n_exact:,} exact{near}) and are left out"
        )
    return is_copy, fingerprint, notices


def _near_or_exact(first: TokenStore, texts: Iterator[str], exact: Copies, fingerprint: str, progress: bool) -> Bools:
    """The copies of either kind, cached by an earlier start beside the first store, or found now."""
    name = f"{first.source_name}-{NEAR}-{fingerprint[:16]}.npz"
    for folder in first.cache_folders:
        # A damaged file is made again: the archive has a checksum, and loading fails with many types of errors.
        with contextlib.suppress(Exception):
            return np.load(folder / name, allow_pickle=False)["is_copy"]
    folder = first_writable(first.cache_folders)
    # Commands that start together all search, with the same result.
    if progress:
        announce(f"looking for near duplicates among {counted(len(exact.of), 'document')}")
    is_copy = near_copies(enumerate(texts), exact, folder).of != NO_EARLIER
    with atomic_file(folder / name) as file:
        np.savez(file, is_copy=is_copy)
    return is_copy


def stored_texts(
    store: TokenStore, files: Sequence[Path], encoder: DocumentEncoder, text_field: str, split_text: str | None = None
) -> Iterator[tuple[int, int, str]]:
    """(file number, line from 1 or row of a table, text) of each document of a store, in order. The text of a
    conversation is that of its messages. files: those that the store was built from.

    Texts without a document (too long for the tokenizer, or without a token) are skipped; the hashes in the store show which.
    Errors: DataError if the files have changed.
    """
    number = 0
    for file, path in enumerate(files):
        # Bad lines were reported when the store was built, or were to be skipped.
        for line, text in read_documents(path, text_field, BadLines(), split_text or encoder.document_end):
            if number < len(store) and hash_of_text(encoder.body(text).encode()) == store.doc_hash[number]:
                yield file, line, conversation_text(text) if text_field == CONVERSATION else text
                number += 1
    if number != len(store):
        raise DataError(f"{files[0].parent}: the data has changed since it was tokenised; start again")
