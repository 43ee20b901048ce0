"""Putting the parts of a corpus, each tokenised by a process of its own, back into one order."""

from collections.abc import Iterator

import numpy as np

from dataset.reading.faults import BadLines
from dataset.store.dealing import Place
from dataset.store.encode_worker import EncodedBlock
from dataset.store.format import TokenStore


def in_document_order(parts: list[TokenStore]) -> Iterator[tuple[Place, EncodedBlock]]:
    """The blocks of all parts, sorted by their places in the corpus.

    A part keeps a list of its blocks, blocks.bin: for each one its place in the corpus, its documents and its tokens.
    Only these lists are sorted. The documents themselves are views of the parts' files.
    """
    width = len(Place._fields)
    # One line for each block: part, place, documents before it in its part, tokens before it, its documents, its tokens.
    lines = []
    for number, part in enumerate(parts):
        blocks = np.fromfile(part.folder / "blocks.bin", np.int64).reshape(-1, width + 2)
        places = blocks[:, :width]
        counts = blocks[:, width:]
        before = np.cumsum(counts, axis=0) - counts
        lines.append(np.column_stack([np.full(len(blocks), number), places, before, counts]))
    table = np.concatenate(lines)
    # lexsort sorts by its last column first, and by the others where that is equal.
    place_columns = [table[:, column] for column in range(width, 0, -1)]
    for line in table[np.lexsort(place_columns)]:
        number, *place, first_document, first_token, documents, tokens = line.tolist()
        part = parts[number]
        chosen = slice(first_document, first_document + documents)
        yield (
            Place(*place),
            EncodedBlock(
                tokens=part.tokens[first_token : first_token + tokens],
                lengths=np.diff(part.offsets[first_document : first_document + documents + 1]),
                text_bytes=part.text_bytes[chosen],
                hashes=part.doc_hash[chosen],
                bad=BadLines(),
                max_token_id=part.max_token_id,
            ),
        )
