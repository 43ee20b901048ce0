"""EpochPlan against naive packers and the row layout of docs/design.md."""

import tracemalloc
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset import packing
from dataset.packing import EpochPlan, best_fit


def make_store(lengths, tokens=None, hashes=None):
    """An in-memory token store. By default every token of it is different, so that a ledger can name each one."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.uint32) if tokens is None else np.asarray(tokens)
    hashes = np.arange(len(lengths)) if hashes is None else hashes
    return SimpleStore(
        tokens=tokens,
        offsets=offsets,
        text_bytes=np.asarray(lengths, dtype=np.uint32) * 3,
        doc_hash=np.asarray(hashes, dtype=np.uint64),
        fingerprint=f"{len(lengths)}",
    )


class SimpleStore(SimpleNamespace):
    def __len__(self):
        return len(self.offsets) - 1


def random_lengths(n, seed=0, mean=3.0, top=100):
    return np.random.default_rng(seed).lognormal(mean, 1.0, n).astype(np.int64).clip(0, top)


def naive_pieces(lengths, max_seq_len, long_documents):
    """{(document, start, pairs)} one document at a time."""
    pieces = set()
    for document, n in enumerate(lengths):
        if long_documents == "truncate":
            n = min(n, max_seq_len)
        for start in range(0, n - 1, max_seq_len):
            pieces.add((document, start, min(max_seq_len, n - 1 - start)))
    return pieces


def naive_plan(lengths, max_seq_len, seed, epoch, long_documents, shuffle):
    """The rows of a packed epoch as lists of (document, start, pairs), piece by piece, with tuples as sort keys."""
    bits = np.random.PCG64([seed, epoch])
    T = max_seq_len
    pieces = sorted(naive_pieces(lengths, T, long_documents))
    runs, *_ = best_fit(np.bincount([pairs for *_, pairs in pieces], minlength=T + 1), T)
    n_rows = max((first + rows for first, rows, _ in runs), default=0)

    def draws(n):
        return bits.random_raw(n).tolist() if shuffle else [0] * n

    row_keys = [(draw >> 32, row) for row, draw in enumerate(draws(n_rows))]
    place = [row for _, row in sorted(row_keys)]
    piece_keys = []
    for number, draw in enumerate(draws(len(pieces))):
        piece_keys.append((-pieces[number][2], draw >> 32 + T.bit_length(), number))
    by_length = iter(sorted(piece_keys))
    plan = [[] for _ in range(n_rows)]
    for first, rows, each in runs:
        for row in range(first, first + rows):
            plan[place[row]] += [next(by_length)[2] for _ in range(each)]
    return [[pieces[number] for number in sorted(row)] for row in plan]


# (T, lengths of pieces)
PIECES = st.integers(1, 12).flatmap(lambda T: st.tuples(st.just(T), st.lists(st.integers(1, T), max_size=40)))


@settings(max_examples=200, deadline=None)
@given(PIECES)
def test_best_fit_puts_each_piece_into_the_fullest_row_that_has_room(case):
    """Reference: the rule itself, asked of every piece in turn."""
    T, lengths = case
    runs, *_ = best_fit(np.bincount(lengths, minlength=T + 1), T)
    pieces = iter(sorted(lengths, reverse=True))
    room_of = {}
    for first, rows, each in runs:
        for row in range(first, first + rows):
            for _ in range(each):
                length = next(pieces)
                fullest = min((room for room in room_of.values() if room >= length), default=None)
                assert room_of.get(row) == fullest, "None: a new row, where no row has room"
                room_of[row] = room_of.get(row, T) - length
    assert next(pieces, None) is None
    assert sorted(room_of) == list(range(len(room_of)))


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=60),
    max_seq_len=st.integers(2, 16),
    long_documents=st.sampled_from(["split", "truncate"]),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    chunk=st.sampled_from([1, 7, packing.CHUNK]),
)
def test_packed_rows_equal_those_of_lists(lengths, max_seq_len, long_documents, shuffle, seed, chunk):
    """Reference: naive_plan. Every row, and the order of rows and pieces: checkpoints count on it."""
    with patch.object(packing, "CHUNK", chunk):
        plan = EpochPlan(
            make_store(lengths).offsets, max_seq_len, seed, 3, long_documents=long_documents, shuffle=shuffle
        )
    rows = [plan.pieces_of_row(r) for r in range(plan.n_rows)]
    assert rows == naive_plan(lengths, max_seq_len, seed, 3, long_documents, shuffle)
    pieces = [piece for row in rows for piece in row]
    assert len(pieces) == len(set(pieces)) and set(pieces) == naive_pieces(lengths, max_seq_len, long_documents)
    for r, row in enumerate(rows):
        assert plan.totals(r, r + 1) == (sum(pairs for *_, pairs in row), len(row))


@pytest.mark.parametrize("shuffle", [True, False])
def test_padded_rows_come_in_the_order_of_their_random_numbers(shuffle):
    """Reference: a sort of tuples."""
    lengths = random_lengths(300, top=60)
    plan = EpochPlan(make_store(lengths).offsets, 20, 3, 5, pack=False, shuffle=shuffle)
    pieces = sorted(naive_pieces(lengths, 20, "truncate"))
    assert plan.T == 19
    draws = np.random.PCG64([3, 5]).random_raw(len(pieces)).tolist()
    keys = [(draw >> 32 if shuffle else 0, piece) for draw, piece in zip(draws, pieces, strict=True)]
    assert [plan.pieces_of_row(r) for r in range(plan.n_rows)] == [[piece] for _, piece in sorted(keys)]


@pytest.mark.slow
def test_ten_million_documents_take_250_mb():
    lengths = np.random.default_rng(0).lognormal(5.3, 0.8, 10_000_000).astype(np.int64).clip(2, 20_000)
    offsets, documents = np.concatenate([[0], np.cumsum(lengths)]), np.arange(len(lengths), dtype=np.uint32)
    tracemalloc.start()
    plan = EpochPlan(offsets, 512, 0, 0, documents=documents)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 250e6 and plan.fill > 0.99
