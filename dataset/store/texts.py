"""The texts that the documents of a store were made of, read once more from the files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import DataError
from dataset.reading.documents import BadLines, read_documents
from dataset.store.encode_worker import measure
from dataset.store.format import TokenStore
from dataset.tokenizing.encoder import DocumentEncoder


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
            if number < len(store) and measure(encoder.body(text)).digest == store.doc_hash[number]:
                yield StoredText(number, file, line, text)
                number += 1
    if number != len(store):
        raise DataError(f"{files[0].parent}: the data has changed since it was tokenised; start again")
