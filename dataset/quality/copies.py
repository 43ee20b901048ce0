"""Finds documents that are exact or near copies of earlier ones.

Two texts are *near* each other if their sets of shingles are similar. A shingle is a run of five characters of the text
in lower case, with white space collapsed to single spaces; it needs no words, so Chinese works like English. The measure
is the Jaccard similarity: the number of shingles in both texts, divided by the number in either.

Comparing all pairs of a million documents would take days. MinHash gives each document a signature of numbers; the
expected share of equal numbers in two signatures is the similarity of their documents. Only documents that agree in all
numbers of one *band* of their signatures are compared, by their whole signatures (locality-sensitive hashing);
docs/data.md has a table of what is found.

The result depends only on the texts and their order: the hashes have fixed seeds, and a document is compared with
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
from dataset.arrays import Ints

SHINGLE = 5
# Independent texts of few letters (DNA, music) share most shingles. Those with less than this share of distinct ones must share long
# ones too: LONG_FROM of LONG_SLOTS numbers. Copies by scattered edits share about a quarter of these, independent texts hardly any.
DISTINCT = 0.6
LONG_SHINGLE = 20
LONG_SLOTS = 64
LONG_FROM = 0.15
# Maximum characters compared of a text: shingles take up to ninety bytes per character.
MAX_CHARACTERS = 1 << 21

BANDS = 40
ROWS = 6
SLOTS = BANDS * ROWS
# Minimum share of equal numbers in two near signatures. It is within 0.026 of the similarity in two cases of three, so
# this finds nearly all pairs with a similarity of 0.8.
NEAR_FROM = 0.75
SEED = 2
# Maximum rounds, twice, on a bucket of documents that look alike and are not near each other, see `_compare`
MAX_ROUNDS = 64
# Pairs of signatures that are compared at once: 60 MB
PAIRS = 1 << 16

# no earlier document
NO_EARLIER = -1

# The sum of a band's numbers times these, modulo 2^64, is a hash of them.
FACTORS = np.random.PCG64(SEED).random_raw(ROWS)


class Copies(NamedTuple):
    """For each document the earlier one that it is a copy of.

    of          int64 [documents]: number of the earlier document, or NO_EARLIER
    similarity  float32 [documents]: an estimate; 1 for exact copies
    is_exact    bool [documents]
    """

    of: Ints
    similarity: np.ndarray
    is_exact: np.ndarray


def rensa_library() -> ModuleType:
    """rensa, which makes MinHash signatures. Errors: DataError if it is not installed."""
    return optional_package("rensa", "to find near duplicates")


def near_copies_version() -> list[object]:
    """Everything except the texts that decides which documents are near copies: part of cache keys."""
    version = rensa_library().RMinHash.ALGORITHM_VERSION
    of_long = [DISTINCT, LONG_SHINGLE, LONG_SLOTS, LONG_FROM]
    return [SHINGLE, MAX_CHARACTERS, BANDS, ROWS, NEAR_FROM, SEED, MAX_ROUNDS, version, *of_long]


def exact_copies(doc_hash: Ints) -> Copies:
    """The documents with the hash of an earlier one. doc_hash: uint64 [documents]."""
    first = _first_alike(doc_hash)
    is_exact = first != np.arange(len(first))
    return Copies(np.where(is_exact, first, NO_EARLIER), is_exact.astype(np.float32), is_exact)


def near_copies(texts: Iterable[tuple[int, str]], exact: Copies, scratch: Path | None = None) -> Copies:
    """Adds near copies to the exact ones.

    texts: (number, text) of the documents in ascending order; exact copies are skipped.
    scratch: folder for the signatures, of 480 bytes per document; None: the system's.
    Errors: DataError, if the library is not installed; OSError.
    """
    n = len(exact.of)
    if not n:
        return exact
    # The file never has a name, so nothing is left of it after a crash.
    with tempfile.TemporaryFile(dir=scratch) as file:
        # Space is reserved: on a full disk, writing a page of the map would kill the process.
        size = BANDS * n * ROWS * np.dtype(np.uint16).itemsize
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        # Band-major: one band of all documents is read at once.
        signatures = np.memmap(file, np.uint16, "w+", shape=(BANDS, n, ROWS))
        # of long shingles; 0 in a document that is not compared by them: such pages take no memory
        long_signatures = np.zeros((n, LONG_SLOTS), np.uint16)
        for number, text in texts:
            if exact.is_exact[number]:
                continue
            of_text = shingles(text)
            distinct = sorted(set(of_text))
            signatures[:, number] = _signature(distinct, SLOTS).reshape(BANDS, ROWS)
            if len(distinct) < DISTINCT * len(of_text):
                long_signatures[number] = _signature(shingles(text, LONG_SHINGLE), LONG_SLOTS)
        return _compare(signatures, long_signatures, np.flatnonzero(~exact.is_exact), exact)


def shingles(text: str, length: int = SHINGLE) -> list[str]:
    """All runs of so many characters of a text; a shorter text is one shingle."""
    plain = " ".join(text[:MAX_CHARACTERS].lower().split())
    return [plain[i : i + length] for i in range(max(len(plain) - length + 1, 1))]


def _signature(texts: list[str], slots: int) -> Ints:
    """uint16 [slots]: sixteen bits of each MinHash number; different numbers collide once in 65,536 times."""
    min_hash = rensa_library().RMinHash(slots, SEED)
    min_hash.update(texts)
    numbers = np.array(min_hash.digest(), np.uint32)
    return np.asarray((numbers ^ (numbers >> np.uint32(16))).astype(np.uint16))


def _compare(signatures: Ints, long_signatures: Ints, documents: Ints, exact: Copies) -> Copies:
    """Finds an earlier near document for each. documents: numbers, ascending, of those that have signatures.

    In each band, documents with the same numbers form a bucket. In a round, the first document of each bucket is
    compared with all others in it. Near ones are copies of it and leave, and so does the first; the next round continues
    with the rest. A known copy takes no part in later bands.
    """
    of = exact.of.copy()
    similarity = exact.similarity.copy()
    left = documents
    for band in range(BANDS):
        left = left[of[left] == NO_EARLIER]
        members = left
        # key of each member's bucket
        buckets = signatures[band, members] @ FACTORS
        for number in range(2 * MAX_ROUNDS):
            if number == MAX_ROUNDS:
                # Texts of few letters all look alike: those left must share a long shingle too.
                buckets = buckets + long_signatures[members, band]
            first = _first_alike(buckets)
            is_other = first != np.arange(len(first))
            others = members[is_other]
            if not len(others):
                break
            firsts = members[first[is_other]]
            compared = _similarities(signatures, long_signatures, firsts, others)
            is_near = compared >= NEAR_FROM
            of[others[is_near]] = firsts[is_near]
            similarity[others[is_near]] = compared[is_near]
            buckets = buckets[is_other][~is_near]
            members = others[~is_near]
    _cut_chains(signatures, long_signatures, of, similarity, exact)
    return Copies(of, similarity, exact.is_exact)


def _cut_chains(signatures: Ints, long_signatures: Ints, of: Ints, similarity: np.ndarray, exact: Copies) -> None:
    """Makes each near copy one of a document that is kept: updates `of` and `similarity` in place.

    In a later band, the first document of a bucket may turn out to be a copy itself. Those near it are compared with its
    original, and kept if they are not near that. So a chain of small changes does not remove a document that is unlike
    all kept ones.
    """
    is_near_copy = (of != NO_EARLIER) & ~exact.is_exact
    near = np.flatnonzero(is_near_copy)
    of_a_copy = near[of[of[near]] != NO_EARLIER]
    # Ascending, so that earlier documents are settled.
    for number in of_a_copy:
        first = of[of[number]]
        if first == NO_EARLIER:
            continue
        (compared,) = _similarities(signatures, long_signatures, np.array([first]), np.array([number]))
        is_near = compared >= NEAR_FROM
        of[number] = first if is_near else NO_EARLIER
        similarity[number] = compared if is_near else 0


def _first_alike(values: Ints) -> Ints:
    """Index of the first value that is equal to each, int64 [values]."""
    _, first, which = np.unique(values, return_index=True, return_inverse=True)
    return np.asarray(first[which])


def _similarities(signatures: Ints, long_signatures: Ints, first: Ints, second: Ints) -> np.ndarray:
    """float32 [pairs]: share of equal numbers in two documents' signatures; 0 if both have long shingles, and not the same."""
    shares = np.empty(len(first), np.float32)
    for lo in range(0, len(first), PAIRS):
        equal = signatures[:, first[lo : lo + PAIRS]] == signatures[:, second[lo : lo + PAIRS]]
        shares[lo : lo + PAIRS] = equal.mean(axis=(0, 2))
        long_first, long_second = long_signatures[first[lo : lo + PAIRS]], long_signatures[second[lo : lo + PAIRS]]
        is_compared = long_first.any(axis=1) & long_second.any(axis=1)
        shares[lo : lo + PAIRS][is_compared & ((long_first == long_second).mean(axis=1) < LONG_FROM)] = 0
    return shares
