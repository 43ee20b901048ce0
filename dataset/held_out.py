"""Documents that are evaluated and not trained: a share of the data by hash, or documents of their own."""

import copy

import numpy as np

from dataset.packing import chunks, number_type
from dataset.store.format import Documents, Ints, TokenStore
from dataset.tokenizing.encoder import DocumentEncoder

# What decides on the side of a split, in place of a hash of the text: the least one is held out, the largest is trained.
HELD_OUT_HASH, TRAINED_HASH = 0, (1 << 64) - 1


def split_by_hash(store: Documents, fraction: float) -> tuple[Ints, Ints]:
    """(training, validation): the document numbers of each side, ascending, 4 bytes each (8 beyond 2^32 documents).

    A document is held out iff its hash lies in the lowest `fraction` of all hashes: whatever the order of the file
    and whatever is added to it, the same documents stay out, and copies of one text stay together.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the validation fraction must be at least 0 and below 1, not {fraction}")
    # Hashes are uniform over all 64-bit numbers, so the share below this number is `fraction`, but for chance.
    threshold = np.uint64(int(fraction * 2**64))
    # A first part that is empty, so that a side without documents is an array too.
    dtype = number_type(len(store))
    training = [np.empty(0, dtype)]
    validation = [np.empty(0, dtype)]
    for lo, hi in chunks(len(store)):
        held_out = np.asarray(store.doc_hash[lo:hi]) < threshold
        training.append((np.flatnonzero(~held_out) + lo).astype(dtype))
        validation.append((np.flatnonzero(held_out) + lo).astype(dtype))
    return np.concatenate(training), np.concatenate(validation)


def with_last_part(stores: list[TokenStore], encoder: DocumentEncoder, val_fraction: float) -> list[TokenStore]:
    """The stores; a single text, such as one long .txt file, as two documents, of which `split_by_hash` holds out the second.

    That is about the last `val_fraction` of its tokens, and begins behind the end of a line where there is one.
    """
    if not val_fraction or not encoder.can_be_cut or len(stores) > 1 or len(stores[0]) > 1:
        return stores
    store = copy.copy(stores[0])
    n_tokens = len(store.tokens)
    cut = n_tokens - round(val_fraction * n_tokens)
    last_part = np.asarray(store.tokens[cut:])
    line_ends = [token_id for token_id in np.unique(last_part).tolist() if encoder.ends_line(token_id)]
    places = np.flatnonzero(np.isin(last_part[:-2], line_ends))
    cut += int(places[0]) + 1 if len(places) else 0
    n_bytes = int(store.text_bytes[0])
    held_out_bytes = min(len(encoder.decode(store.tokens[cut:].tolist()).encode()), n_bytes)
    store.offsets = np.array([0, cut, n_tokens], np.int64)
    store.text_bytes = np.array([n_bytes - held_out_bytes, held_out_bytes], np.uint32)
    store.doc_hash = np.array([TRAINED_HASH, HELD_OUT_HASH], np.uint64)
    return [store]


def are_shared(training: Documents, validation: Documents) -> np.ndarray:
    """bool [validation]: which documents of it have the text of a training document, by the stored hashes of the texts."""
    # The training data may have millions of documents, so its hashes are looked up, piece by piece, among those of the
    # few validation documents, which are sorted for that.
    wanted = np.unique(np.asarray(validation.doc_hash[:]))
    found = np.zeros(len(wanted), dtype=bool)
    for lo, hi in chunks(len(training)):
        of_training = np.asarray(training.doc_hash[lo:hi])
        at = np.searchsorted(wanted, of_training)
        # What is beyond all that is wanted is compared with the first one, which it is not.
        at[at == len(wanted)] = 0
        found[at[wanted[at] == of_training]] = True
    shared = wanted[found]
    return np.isin(np.asarray(validation.doc_hash[:]), shared)
