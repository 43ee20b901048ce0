"""Documents that are copies of earlier ones: to the letter, or nearly.

Two texts are *near* each other if their sets of shingles are. A shingle is a run of five characters of the text in lower
case, with all white space made single spaces; so it needs no words, and Chinese has them like English. How near is told
by the Jaccard similarity: the shingles that both have, divided by those that either has.

To compare all pairs of a million documents would take days. MinHash makes a signature of each document, some numbers of
which two documents have as many equal, in the mean, as their similarity says. Only documents that agree in all numbers of
one *band* of their signatures are compared, by their whole signatures (locality-sensitive hashing).

    similarity                               0.65   0.7    0.75   0.8    0.85
    two documents share a band               96 %   99 %   100 %  100 %  100 %
    ... and their signatures say near         0.1 %  5 %   52 %   98 %  100 %

The result depends on the texts and their order alone: the hashes have fixed seeds, and a document is compared with
earlier ones only.
"""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from common.errors import optional_package
from dataset.store.format import Ints

SHINGLE = 5
# The beginning of a longer text counts. Its shingles take up to ninety bytes a character.
MOST_CHARACTERS = 1 << 21

BANDS = 40
ROWS = 6
SLOTS = BANDS * ROWS
# Share of equal numbers in two signatures from which they are near. It lies within 0.026 of the similarity in two cases of
# three, so this finds nearly all that are similar by 0.8.
NEAR_FROM = 0.75
SEED = 2
# A bucket of documents that look alike and are not near each other is given up after so many rounds, see `_compare`.
MOST_ROUNDS = 64
# Pairs of signatures that are compared at once: 60 MB.
PAIRS = 1 << 16

# No earlier document.
NONE = -1

# What hashes of 64 bits are mixed with: an odd number whose bits look random (the golden ratio as a fraction of 2^64), and a
# shift that brings high bits down.
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)


class Copies(NamedTuple):
    """For each document the earlier one that it is a copy of.

    of          int64 [documents]: the number of the earlier document, or NONE
    similarity  float32 [documents]: as estimated; 1 for copies to the letter
    is_exact    bool [documents]
    """

    of: Ints
    similarity: np.ndarray
    is_exact: np.ndarray


def library() -> ModuleType:
    """The library that makes signatures. Errors: DataError, if it is not installed."""
    return optional_package("rensa", "to find near duplicates")


def version_of_near() -> list[object]:
    """All that decides, beside the texts, which documents are near copies: part of the identity of what is made so."""
    return [SHINGLE, MOST_CHARACTERS, BANDS, ROWS, NEAR_FROM, SEED, MOST_ROUNDS, library().RMinHash.ALGORITHM_VERSION]


def exact_copies(doc_hash: Ints) -> Copies:
    """Those with the hash of an earlier text. doc_hash: uint64 [documents]."""
    first = _first_alike(doc_hash)
    is_exact = first != np.arange(len(first))
    return Copies(np.where(is_exact, first, NONE), is_exact.astype(np.float32), is_exact)


def near_copies(texts: Iterable[tuple[int, str]], exact: Copies, scratch: Path | None = None) -> Copies:
    """Adds near copies to those to the letter.

    texts: (number, text) of the documents in ascending order; those that are copies to the letter are passed over.
    scratch: a folder for the signatures, which take 480 bytes a document; None: the system's.
    Errors: DataError, if the library is not installed; OSError.
    """
    rensa = library()
    n = len(exact.of)
    if not n:
        return exact
    # The file has no name from the start, so nothing is left of it whatever happens.
    with tempfile.TemporaryFile(dir=scratch) as file:
        # A disk that is full would end the process when a page of the map is written: the room is taken before.
        size = BANDS * n * ROWS * np.dtype(np.uint16).itemsize
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        # Band after band: one band of all documents is read at once.
        signatures = np.memmap(file, np.uint16, "w+", shape=(BANDS, n, ROWS))
        for number, text in texts:
            if exact.is_exact[number]:
                continue
            min_hash = rensa.RMinHash(SLOTS, SEED)
            min_hash.update(shingles(text))
            numbers = np.array(min_hash.digest(), np.uint32)
            # Sixteen bits of each: two that differ agree in them once in 65,536 times.
            signatures[:, number] = (numbers ^ (numbers >> np.uint32(16))).astype(np.uint16).reshape(BANDS, ROWS)
        return _compare(signatures, np.flatnonzero(~exact.is_exact), exact)


def shingles(text: str) -> list[str]:
    """The runs of SHINGLE characters from each place of a text on; of a shorter text the whole."""
    plain = " ".join(text[:MOST_CHARACTERS].lower().split())
    return [plain[i : i + SHINGLE] for i in range(max(len(plain) - SHINGLE + 1, 1))]


def _compare(signatures: Ints, documents: Ints, exact: Copies) -> Copies:
    """Looks for an earlier near document of each. documents: numbers, ascending, of those that have signatures.

    In each band, documents with the same numbers make a bucket. In a round, the first document of each bucket is
    compared with all others of it. Those that are near are copies of it and leave, and so does the first; the next
    round goes on with what is left. A document that is known for a copy takes no part in later bands.
    """
    of = exact.of.copy()
    similarity = exact.similarity.copy()
    left = documents
    for band in range(BANDS):
        left = left[of[left] == NONE]
        members = left
        # of each member a number that tells its bucket
        buckets = _keys(signatures[band, members])
        for _ in range(MOST_ROUNDS):
            first = _first_alike(buckets)
            is_other = first != np.arange(len(first))
            others = members[is_other]
            if not len(others):
                break
            of_others = members[first[is_other]]
            found = _similarities(signatures, of_others, others)
            is_near = found >= NEAR_FROM
            of[others[is_near]] = of_others[is_near]
            similarity[others[is_near]] = found[is_near]
            buckets = buckets[is_other][~is_near]
            members = others[~is_near]
    _cut_chains(signatures, of, similarity, exact)
    return Copies(of, similarity, exact.is_exact)


def _cut_chains(signatures: Ints, of: Ints, similarity: np.ndarray, exact: Copies) -> None:
    """Lets each near copy be one of a document that stays: changes `of` and `similarity` where it is not.

    The first document of a bucket may turn out, in a later band, to be a copy itself. Those that are near it are
    compared with the one that it is a copy of, and stay if they are not near that. So a chain of small changes does not
    take away what is unlike all that stays.
    """
    is_near_copy = (of != NONE) & ~exact.is_exact
    near = np.flatnonzero(is_near_copy)
    of_a_copy = near[of[of[near]] != NONE]
    # In ascending order, so what is asked of an earlier document is settled.
    for number in of_a_copy:
        first = of[of[number]]
        if first == NONE:
            continue
        (found,) = _similarities(signatures, np.array([first]), np.array([number]))
        is_near = found >= NEAR_FROM
        of[number] = first if is_near else NONE
        similarity[number] = found if is_near else 0


def _first_alike(values: Ints) -> Ints:
    """Where the first value stands that is equal to each, int64 [values]."""
    _, first, which = np.unique(values, return_index=True, return_inverse=True)
    return np.asarray(first[which])


def _keys(rows: Ints) -> Ints:
    """A uint64 for each row of a band, uint16 [documents, ROWS]: equal where the rows are."""
    keys = np.zeros(len(rows), np.uint64)
    for row in range(ROWS):
        keys ^= rows[:, row]
        keys *= MULTIPLIER
        keys ^= keys >> HALF
    return keys


def _similarities(signatures: Ints, first: Ints, second: Ints) -> np.ndarray:
    """float32 [pairs]: the share of equal numbers of two documents' signatures."""
    shares = np.empty(len(first), np.float32)
    for lo in range(0, len(first), PAIRS):
        equal = signatures[:, first[lo : lo + PAIRS]] == signatures[:, second[lo : lo + PAIRS]]
        shares[lo : lo + PAIRS] = equal.mean(axis=(0, 2))
    return shares
