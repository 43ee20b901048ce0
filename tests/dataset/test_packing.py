"""EpochPlan against `naive_rows` and other naive packers."""

import tracemalloc
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset import packing
from dataset.packing import EpochPlan, naive_rows


def make_store(lengths, tokens=None, hashes=None):
    """An in-memory token store. By default every token of it is different, so that a ledger can name each one."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.uint32) if tokens is None else np.asarray(tokens)
    hashes = np.arange(len(lengths)) if hashes is None else hashes
    store = SimpleStore(tokens=tokens, offsets=offsets, fingerprint=f"{len(lengths)}")
    store.text_bytes = np.asarray(lengths, dtype=np.uint32) * 3
    store.doc_hash = store.copy_hash = np.asarray(hashes, dtype=np.uint64)
    return store


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


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=60),
    max_seq_len=st.integers(2, 16),
    long_documents=st.sampled_from(["split", "truncate"]),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    chunk=st.sampled_from([1, 7, packing.CHUNK]),
)
def test_packed_rows_are_the_naive_ones(lengths, max_seq_len, long_documents, shuffle, seed, chunk):
    """Every row, and the order of rows and pieces: checkpoints count on it."""
    offsets = make_store(lengths).offsets
    with patch.object(packing, "CHUNK", chunk):
        plan = EpochPlan(offsets, max_seq_len, seed, 3, long_documents=long_documents, shuffle=shuffle)
    rows = [plan.pieces_of_row(r) for r in range(plan.n_rows)]
    kept = lengths if long_documents == "split" else [min(length, max_seq_len) for length in lengths]
    in_order = SimpleNamespace(random_raw=lambda n: np.zeros(n, dtype=np.uint64))
    assert rows == naive_rows(kept, max_seq_len, np.random.PCG64([seed, 3]) if shuffle else in_order)
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
