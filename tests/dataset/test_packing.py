"""EpochPlan against naive packers and the row layout of docs/design.md."""

import time
import tracemalloc
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset import packing
from dataset.best_fit import best_fit
from dataset.packing import EpochPlan


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


def naive_best_fit(lengths, T):
    """Room left in each row, piece by piece."""
    room = []
    for length in sorted(lengths, reverse=True):
        fits = [r for r in room if r >= length]
        if fits:
            room.remove(min(fits))
            room.append(min(fits) - length)
        else:
            room.append(T - length)
    return sorted(room)


def naive_plan(lengths, max_seq_len, seed, epoch, long_documents, shuffle, group=(), documents=None):
    """The rows of a packed epoch as lists of (document, start, pairs), piece by piece, with tuples as sort keys.

    group: what the random numbers are drawn by, beside seed and epoch. documents: those to use, default all.
    """
    bits = np.random.PCG64([seed, epoch, *group])
    T = max_seq_len
    pieces = sorted(naive_pieces(lengths, T, long_documents))
    if documents is not None:
        pieces = [piece for piece in pieces if piece[0] in documents]
    runs, _ = best_fit(np.bincount([pairs for *_, pairs in pieces], minlength=T + 1), T)
    n_rows = len(naive_best_fit([pairs for *_, pairs in pieces], T))

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


# Of a plan: lengths of documents, max_seq_len, long_documents, shuffle, seed.
PLANS = (
    st.lists(st.integers(0, 40), max_size=60),
    st.integers(2, 16),
    st.sampled_from(["split", "truncate"]),
    st.booleans(),
    st.integers(0, 2**40),
)
# (T, lengths of pieces)
PIECES = st.integers(1, 12).flatmap(lambda T: st.tuples(st.just(T), st.lists(st.integers(1, T), max_size=40)))


@settings(max_examples=200, deadline=None)
@given(PIECES)
def test_best_fit_puts_each_piece_into_the_fullest_row_that_has_room(case):
    """Reference: the rule itself, asked of every piece in turn."""
    T, lengths = case
    runs, _ = best_fit(np.bincount(lengths, minlength=T + 1), T)
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


@settings(max_examples=200, deadline=None)
@given(PIECES)
def test_best_fit_leaves_the_room_that_a_naive_packer_leaves(case):
    T, lengths = case
    runs, room = best_fit(np.bincount(lengths, minlength=T + 1), T)
    assert sorted(r for r, runs_ in enumerate(room) for _, rows in runs_ for _ in range(rows)) == naive_best_fit(
        lengths, T
    )
    assert sum(rows * each for _, rows, each in runs) == len(lengths)


@settings(max_examples=100, deadline=None)
@given(*PLANS)
def test_every_piece_once_and_no_row_overfull(lengths, max_seq_len, long_documents, shuffle, seed):
    """Reference: naive_pieces. Counts agree with the pieces themselves."""
    plan = EpochPlan(make_store(lengths), max_seq_len, seed, 1, long_documents=long_documents, shuffle=shuffle)
    rows = [plan.pieces_of_row(r) for r in range(plan.n_rows)]
    pieces = [piece for row in rows for piece in row]
    assert len(pieces) == len(set(pieces)) == plan.n_pieces
    assert set(pieces) == naive_pieces(lengths, max_seq_len, long_documents)
    for r, row in enumerate(rows):
        assert 0 < sum(pairs for *_, pairs in row) <= plan.T == max_seq_len
        assert plan.row_documents(r, r + 1) == len(row)
        assert plan.row_targets(r, r + 1) == sum(pairs for *_, pairs in row)
    assert plan.row_documents(0, plan.n_rows) == len(pieces)
    assert plan.row_targets(0, plan.n_rows) == sum(pairs for *_, pairs in pieces)


@settings(max_examples=150, deadline=None)
@given(
    *PLANS,
    st.sampled_from([1, 7, packing.CHUNK]),
)
def test_packed_rows_equal_those_of_lists(lengths, max_seq_len, long_documents, shuffle, seed, chunk):
    """Reference: naive_plan. Every row, and the order of rows and pieces: checkpoints count on it."""
    with patch.object(packing, "CHUNK", chunk):
        plan = EpochPlan(make_store(lengths), max_seq_len, seed, 3, long_documents=long_documents, shuffle=shuffle)
    rows = [plan.pieces_of_row(r) for r in range(plan.n_rows)]
    assert rows == naive_plan(lengths, max_seq_len, seed, 3, long_documents, shuffle)


@pytest.mark.parametrize("shuffle", [True, False])
def test_padded_rows_come_in_the_order_of_their_random_numbers(shuffle):
    """Reference: a sort of tuples."""
    lengths = random_lengths(300, top=60)
    plan = EpochPlan(make_store(lengths), 20, 3, 5, pack=False, shuffle=shuffle)
    pieces = sorted(naive_pieces(lengths, 20, "truncate"))
    draws = np.random.PCG64([3, 5]).random_raw(len(pieces)).tolist()
    keys = [(draw >> 32 if shuffle else 0, piece) for draw, piece in zip(draws, pieces, strict=True)]
    assert [plan.pieces_of_row(r) for r in range(plan.n_rows)] == [[piece] for _, piece in sorted(keys)]


def test_selected_documents_alone_are_planned():
    store, chosen = make_store(random_lengths(300)), np.arange(1, 300, 3, dtype=np.uint32)
    plan = EpochPlan(store, 32, 0, 0, documents=chosen)
    expected = {piece for piece in naive_pieces(np.diff(store.offsets), 32, "split") if piece[0] % 3 == 1}
    assert {piece for r in range(plan.n_rows) for piece in plan.pieces_of_row(r)} == expected


def test_padded_plan_has_each_document_once_in_a_row_of_its_own():
    lengths = random_lengths(200, top=60)
    plan = EpochPlan(make_store(lengths), 20, 3, 0, pack=False)
    rows = [plan.pieces_of_row(r) for r in range(plan.n_rows)]
    assert plan.T == 19 and all(len(row) == 1 for row in rows)
    assert {row[0] for row in rows} == naive_pieces(lengths, 20, "truncate")
    assert [plan.row_targets(r, r + 1) for r in range(plan.n_rows)] == [row[0][2] for row in rows]


@pytest.mark.parametrize("pack", [True, False])
def test_order_depends_on_seed_and_epoch_only(pack):
    """No shuffle, set_epoch forgotten."""
    store = make_store(random_lengths(500))

    def order(seed, epoch):
        plan = EpochPlan(store, 32, seed, epoch, pack=pack)
        return [plan.pieces_of_row(r) for r in range(plan.n_rows)]

    first = order(7, 0)
    assert order(7, 0) == first
    assert order(7, 1) != first and order(8, 0) != first
    assert len(order(7, 1)) == len(first), "the number of rows depends on the lengths alone"


def test_order_is_the_same_on_every_machine():
    """Written down once; raw PCG64 bits and sorts of distinct keys must give it everywhere."""
    plan = EpochPlan(make_store([5, 9, 3, 4, 20, 2, 6, 4]), 8, 1, 2)
    assert [plan.pieces_of_row(r) for r in range(plan.n_rows)] == [
        [(0, 0, 4), (3, 0, 3), (5, 0, 1)],
        [(6, 0, 5), (7, 0, 3)],
        [(4, 8, 8)],
        [(1, 0, 8)],
        [(2, 0, 2), (4, 16, 3)],
        [(4, 0, 8)],
    ]


def test_rows_and_equal_lengths_come_in_uniform_order():
    """Each of 6 equal documents is first in a sixth of 3,000 epochs (chi-square, 5 degrees of freedom, p > 1e-4)."""
    store = make_store([4] * 6)
    first = [EpochPlan(store, 4, 0, epoch).pieces_of_row(0)[0][0] for epoch in range(3000)]
    assert ((np.bincount(first, minlength=6) - 500) ** 2 / 500).sum() < 25.7


def test_packing_wastes_little_where_padding_wastes_most():
    """Padding everything to max_length."""
    store = make_store(random_lengths(20_000, mean=4.5, top=4000))
    assert EpochPlan(store, 512, 0, 0).fill > 0.995
    assert EpochPlan(store, 512, 0, 0, pack=False).fill < 0.35


def test_no_documents_no_rows():
    for lengths in ([], [0, 1, 1]):
        plan = EpochPlan(make_store(lengths), 8, 0, 0)
        assert plan.n_rows == plan.n_pieces == 0 and plan.fill == 0


def test_bad_options_are_value_errors():
    with pytest.raises(ValueError, match="split or truncate"):
        EpochPlan(make_store([3]), 8, 0, 0, long_documents="drop")
    with pytest.raises(ValueError, match="max_seq_len"):
        EpochPlan(make_store([3]), 1, 0, 0)


def plan_costs(n):
    lengths = np.random.default_rng(0).lognormal(5.3, 0.8, n).astype(np.int64).clip(2, 20_000)
    store = SimpleNamespace(offsets=np.concatenate([[0], np.cumsum(lengths)]))
    tracemalloc.start()
    start = time.perf_counter()
    plan = EpochPlan(store, 512, 0, 0)
    seconds, (held, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return plan, seconds, held, peak


def test_plan_holds_a_few_bytes_a_document():
    """Memory per rank. At 500,000 documents, beside the fixed 20 MB of temporaries."""
    _, _, held, peak = plan_costs(500_000)
    assert held < 16 * 500_000 and peak < 20 * 500_000 + 20e6


@pytest.mark.slow
def test_ten_million_documents_in_ten_seconds_and_200_mb():
    plan, seconds, _, peak = plan_costs(10_000_000)
    assert seconds < 10 and peak < 200e6 and plan.fill > 0.99
