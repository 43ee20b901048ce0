"""Some documents of a store, on their way into another one."""

from collections.abc import Iterator

import numpy as np

from dataset.reading.faults import BadLines
from dataset.store.encode_worker import EncodedBlock
from dataset.store.interface import Ints
from dataset.store.sharded import Shard

# Tokens that are copied at once, and one document more.
BLOCK_TOKENS = 1 << 22


def chosen_blocks(store: Shard, chosen: Ints) -> Iterator[EncodedBlock]:
    """The chosen documents, in pieces of bounded size. chosen: bool [documents]."""
    lo = 0
    while lo < len(chosen):
        # So many documents that have BLOCK_TOKENS together, but one at least.
        hi = int(np.searchsorted(store.offsets, store.offsets[lo] + BLOCK_TOKENS, side="right")) - 1
        hi = min(max(hi, lo + 1), len(chosen))
        of_block = chosen[lo:hi]
        lengths = np.diff(store.offsets[lo : hi + 1])
        tokens = store.tokens[store.offsets[lo] : store.offsets[hi]][np.repeat(of_block, lengths)]
        yield EncodedBlock(
            tokens=tokens,
            lengths=lengths[of_block],
            text_bytes=store.text_bytes[lo:hi][of_block],
            hashes=store.doc_hash[lo:hi][of_block],
            # Those of the whole store are known.
            bad=BadLines(),
            max_token_id=int(tokens.max()) if len(tokens) else -1,
        )
        lo = hi
