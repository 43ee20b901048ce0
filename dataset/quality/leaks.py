"""Validation text that is in the training text too, though not to the letter: within other documents, or with small changes.

The loss on a document that a model has read does not tell what it makes of new text. So each validation document gives some of
its *runs*, RUN tokens that follow each other, evenly spread, and a hash of the run at every place of the training text is looked
up among them. A document is *leaked* if LEAKED of its runs are found: then it is there as a whole or nearly so. Single runs are
in common by chance: names, titles, licences, and in encyclopedias sentences of one pattern.

Tokens, and not characters, because they are what a store has: no text is read again, and the same works for Chinese. Text
that was set in another case or broken into other lines is not found.
"""

import math

import numpy as np

from common.wording import counted
from dataset.corpus import Corpus
from dataset.quality.copies import HALF, MULTIPLIER
from dataset.store.format import Ints

# A power of two, see `run_hashes`. About fifty letters of English.
RUN = 16
LEAKED = 0.8
# Tokens of the training text that are looked at, so that a start is not delayed, validation documents, and runs of each. About
# 0.2 s of one core and 10 MB.
LEAK_TOKENS = 1 << 24
LEAK_DOCUMENTS = 4096
LEAK_RUNS = 32
# tokens of the training text that are read at once
CHUNK = 1 << 16
# Bits of a hash that a first look goes by: most places of the training text are sorted out without a search.
FIRST_LOOK_BITS = 22


def leak_notices(corpus: Corpus) -> list[str]:
    """A line where validation documents are in the training text nearly whole, as far as a look at a part of it shows."""
    if corpus.val_documents is None or corpus.val_store is None:
        return []
    documents = corpus.val_documents.astype(np.int64)
    if corpus.val_shared is not None:
        # These have a line already.
        documents = documents[~corpus.val_shared]
    n_documents = min(len(documents), LEAK_DOCUMENTS)
    if not n_documents:
        return []
    documents = documents[np.arange(n_documents) * len(documents) // n_documents]
    hashes, of_document = runs_of(corpus, documents)
    wanted = np.unique(hashes)
    found = np.zeros(len(wanted), bool)
    shift = np.uint64(64 - FIRST_LOOK_BITS)
    may_be = np.zeros(1 << FIRST_LOOK_BITS, bool)
    may_be[wanted >> shift] = True

    store = corpus.store
    offsets = np.asarray(store.offsets[:])
    is_held_out = np.zeros(len(store), bool)
    if corpus.val_store is store:
        is_held_out[corpus.val_documents] = True
    # Some chunks of the tokens of all sources, evenly spread.
    n_tokens = len(store.tokens)
    n_chunks = math.ceil(n_tokens / CHUNK)
    n_chosen = math.ceil(n_chunks * min(1.0, LEAK_TOKENS / max(n_tokens, 1)))
    seen = 0
    for chosen in range(n_chosen):
        lo = chosen * n_chunks // n_chosen * CHUNK
        hi = min(lo + CHUNK, n_tokens)
        seen += hi - lo
        # The runs that begin in the chunk reach beyond it.
        tokens = store.tokens[lo : hi + RUN - 1]
        if len(tokens) < RUN:
            continue
        chunk = run_hashes(tokens)
        # What is held out is no training text: no run that begins in it.
        first, last = np.searchsorted(offsets, (lo, lo + len(chunk)), side="right") - 1
        lengths = np.diff(np.clip(offsets[first : last + 2], lo, lo + len(chunk)))
        chunk = chunk[~np.repeat(is_held_out[first : last + 1], lengths)]
        candidates = chunk[may_be[chunk >> shift]]
        at = np.searchsorted(wanted, candidates)
        # What is beyond all that is wanted is compared with the first one, which it is not.
        at[at == len(wanted)] = 0
        found[at[wanted[at] == candidates]] = True

    is_found = found[np.searchsorted(wanted, hashes)]
    runs = np.bincount(of_document, minlength=n_documents)
    share = np.bincount(of_document, weights=is_found, minlength=n_documents) / np.maximum(runs, 1)
    leaked = int((share >= LEAKED).sum())
    if not leaked:
        return []
    part = "" if seen == n_tokens else f" in the {seen / n_tokens:.1%} of it that was looked at"
    return [
        f"note: {leaked:,} of {counted(n_documents, 'validation document')} ({leaked / n_documents:.1%}) are in the training "
        f"text nearly whole{part}, so the validation loss may be too low"
    ]


def runs_of(corpus: Corpus, documents: Ints) -> tuple[Ints, Ints]:
    """(hash of each run, uint64; which of the documents it is of, int64) of at most LEAK_RUNS of each of some validation
    documents, evenly spread; one of fewer than RUN tokens has no run."""
    assert corpus.val_store is not None
    # BOS and EOS are none of the text.
    before, behind = corpus.added
    begin = np.asarray(corpus.val_store.offsets[documents]) + before
    places = np.maximum(np.asarray(corpus.val_store.offsets[documents + 1]) - behind - begin - RUN + 1, 0)
    chosen = np.minimum(places, LEAK_RUNS)
    of_document = np.repeat(np.arange(len(documents)), chosen)
    # 0, 1, ... of each document.
    number = np.arange(len(of_document)) - np.repeat(np.cumsum(chosen) - chosen, chosen)
    first = begin[of_document] + number * places[of_document] // chosen[of_document]
    # [runs, RUN]
    windows = np.asarray(corpus.val_store.tokens[first[:, None] + np.arange(RUN)])
    return run_hashes(windows)[:, 0], of_document


def run_hashes(tokens: Ints) -> Ints:
    """uint64 [..., places]: a hash of the RUN tokens from each place on, along the last axis of [..., tokens]."""
    # A polynomial in MULTIPLIER with the tokens as coefficients, modulo 2^64. That of twice as many tokens is that of the
    # first half, moved up by as many powers as the second half has, and that of the second half.
    hashes = tokens.astype(np.uint64)
    power = int(MULTIPLIER)
    width = 1
    while width < RUN:
        hashes = hashes[..., :-width] * np.uint64(power) + hashes[..., width:]
        power = power * power % 2**64
        width *= 2
    # So that all bits depend on all tokens.
    hashes ^= hashes >> HALF
    hashes *= MULTIPLIER
    hashes ^= hashes >> HALF
    return hashes
