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

    A list does not say where in the part's files a block begins. It need not: the blocks lie there one after the other,
    so a block begins where the counts of those before it add up to.
    """
    width = len(Place._fields)
    # One line for each block: part, place, documents before it in its part, tokens before it, its documents, its tokens.
    lines = []
    for number, part in enumerate(parts):
        blocks = np.fromfile(part.folder / "blocks.bin", np.int64).reshape(-1, width + 2)
        places = blocks[:, :width]
        counts = blocks[:, width:]
        # A running sum that includes the block itself, less the block itself: what comes before it.
        before = np.cumsum(counts, axis=0) - counts
        lines.append(np.column_stack([np.full(len(blocks), number), places, before, counts]))
    table = np.concatenate(lines)
    # lexsort sorts by its last column first, and by the others where that is equal. So the place's numbers are given
    # from the last to the first: block, section, file. Column 0 is the part, which plays no role.
    place_columns = [table[:, column] for column in range(width, 0, -1)]
    order = np.lexsort(place_columns)
    for line in table[order]:
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
                # The faults of all parts are put together at once, see Builder._assemble.
                bad=BadLines(),
                # That of the whole part. The largest of all blocks is what the store wants, so this is as good.
                max_token_id=part.max_token_id,
            ),
        )
