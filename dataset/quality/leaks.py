"""Text to be judged on that is in the training text too: runs of the same tokens.

The loss on a validation document that a model has read does not tell what it makes of new text. So each validation
document gives some of its *runs*, RUN tokens that follow each other, evenly spread. The training text is read once, and a
hash of the run at every one of its places is looked up among them. A document is *leaked* if LEAKED of its runs are
found: then it is there as a whole or nearly so, whatever stands around it. Single runs are in common by chance: names,
titles, licences, and in encyclopedias sentences of one pattern.

Tokens, and not characters, because they are what a store has: no text is read again, and the same works for Chinese. Text
that was set in another case or broken into other lines is not found.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.arithmetic import ceil_div
from common.arrays import Array
from dataset.quality.hashing import HALF, MULTIPLIER
from dataset.store.interface import Column, HasTokens, Ints

# A power of two, see `run_hashes`. About fifty letters of English.
RUN = 16
# Of one document. The share of so many that is found lies within 0.09 of the share of all in 19 cases of 20.
RUNS_OF_DOCUMENT = 128
LEAKED = 0.8
# Tokens of the training text that are read at once.
CHUNK = 1 << 16
# Bits of a hash that a first look goes by: most places of the training text are sorted out without a search.
FIRST_LOOK_BITS = 22


class Runs(NamedTuple):
    """The runs that stand for some documents.

    hashes    uint64 [runs]
    document  int64 [runs]: which of the documents each is of, from 0
    documents how many there are; one of fewer than RUN tokens has no run
    """

    hashes: Ints
    document: Ints
    documents: int


def runs_of(tokens: Column, begins: Ints, ends: Ints, most: int = RUNS_OF_DOCUMENT, at_once: int = 1 << 12) -> Runs:
    """At most `most` runs of each document, evenly spread. Document i is tokens[begins[i]:ends[i]], int64, without BOS and EOS."""
    hashes: list[Ints] = [np.empty(0, np.uint64)]
    document = [np.empty(0, np.int64)]
    for lo in range(0, len(begins), at_once):
        begin = begins[lo : lo + at_once]
        places = np.maximum(ends[lo : lo + at_once] - begin - RUN + 1, 0)
        chosen = np.minimum(places, most)
        of_document = np.repeat(np.arange(len(begin)), chosen)
        # 0, 1, ... of each document.
        number = np.arange(len(of_document)) - np.repeat(np.cumsum(chosen) - chosen, chosen)
        first = begin[of_document] + number * places[of_document] // chosen[of_document]
        # [runs, RUN]
        windows = np.asarray(tokens[first[:, None] + np.arange(RUN)])
        hashes.append(run_hashes(windows)[:, 0])
        document.append(of_document + lo)
    return Runs(np.concatenate(hashes), np.concatenate(document), len(begins))


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


class Search:
    """Looks for the runs of some documents."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.wanted = np.unique(runs.hashes)
        self.found = np.zeros(len(self.wanted), bool)
        self._shift = np.uint64(64 - FIRST_LOOK_BITS)
        self._may_be = np.zeros(1 << FIRST_LOOK_BITS, bool)
        self._may_be[self.wanted >> self._shift] = True

    def look(self, hashes: Ints) -> None:
        """hashes: of runs of the training text, uint64."""
        candidates = hashes[self._may_be[hashes >> self._shift]]
        if not len(candidates):
            return
        at = np.searchsorted(self.wanted, candidates)
        # What is beyond all that is wanted is compared with the first one, which it is not.
        at[at == len(self.wanted)] = 0
        self.found[at[self.wanted[at] == candidates]] = True

    def shares(self) -> Array:
        """float64 [documents]: of the runs of each the part that was found; NaN for a document without runs."""
        is_found = self.found[np.searchsorted(self.wanted, self.runs.hashes)]
        of_each = np.bincount(self.runs.document, minlength=self.runs.documents)
        found = np.bincount(self.runs.document, weights=is_found, minlength=self.runs.documents)
        return np.divide(found, of_each, out=np.full(self.runs.documents, np.nan), where=of_each > 0)


class TrainingText(NamedTuple):
    """The tokens of a store, and where in them documents begin and end that are held out, int64, ascending."""

    store: HasTokens
    held_out_begins: Ints = np.empty(0, np.int64)
    held_out_ends: Ints = np.empty(0, np.int64)


def read_through(searches: Sequence[Search], texts: Sequence[TrainingText], most: float = np.inf) -> float:
    """Lets the searches look at training text; returns the share of it that they have seen.

    most: look at about so many tokens, in chunks that are evenly spread over all texts.
    """
    sizes = [len(text.store.tokens) for text in texts]
    total = max(sum(sizes), 1)
    # Chunks before each text, and in all.
    bounds = np.cumsum([0, *(ceil_div(size, CHUNK) for size in sizes)])
    n_chunks = int(bounds[-1])
    n_chosen = math.ceil(n_chunks * min(1.0, most / total))
    looked_at = 0
    for chosen in range(n_chosen):
        number = chosen * n_chunks // n_chosen
        of_text = int(np.searchsorted(bounds, number, side="right")) - 1
        looked_at += _look_at_chunk(searches, texts[of_text], number - int(bounds[of_text]))
    return looked_at / total


def _look_at_chunk(searches: Sequence[Search], text: TrainingText, number: int) -> int:
    """How many tokens were looked at."""
    lo = number * CHUNK
    # The runs that begin in the chunk reach beyond it.
    tokens = np.asarray(text.store.tokens[lo : lo + CHUNK + RUN - 1])
    if len(tokens) >= RUN:
        hashes = run_hashes(tokens)
        hashes = hashes[_outside(lo, len(hashes), text.held_out_begins, text.held_out_ends)]
        for search in searches:
            search.look(hashes)
    return min(CHUNK, len(tokens))


def _outside(lo: int, n: int, begins: Ints, ends: Ints) -> Array:
    """bool [n]: which of the runs that begin at lo, lo + 1, ... have no token of the documents [begin, end)."""
    outside = np.ones(n, bool)
    first = int(np.searchsorted(ends, lo, side="right"))
    last = int(np.searchsorted(begins, lo + n + RUN - 1))
    for begin, end in zip(begins[first:last].tolist(), ends[first:last].tolist(), strict=True):
        outside[max(begin - RUN + 1 - lo, 0) : max(end - lo, 0)] = False
    return outside
