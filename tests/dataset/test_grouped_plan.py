"""Epochs that are planned in groups, against lists and tuples, a plan of each group, and a token ledger."""

import time
import tracemalloc
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset import grouped_plan
from dataset.corpus import Corpus
from dataset.grouped_plan import GROUP_STREAM, GroupedPlan, Groups
from dataset.loader import IGNORE, Assembler, UpdateSchedule, make_loader
from dataset.packing import EpochPlan
from dataset.tokenizing.encoder import DocumentEncoder
from tests.dataset.test_packing import make_store, naive_pieces, naive_plan, random_lengths
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import write_corpus


def small(pieces=8, documents=4, of_stretch=6):
    """Groups and stretches as small as that."""
    return patch.multiple(grouped_plan, GROUP_PIECES=pieces, STRETCH_DOCUMENTS=documents, STRETCH_PIECES=of_stretch)


def naive_order(entropy, n):
    """Numbers below n, sorted by a random number of each."""
    draws = np.random.PCG64(entropy)
    return lambda: [
        number for _, number in sorted((draw >> 32, i) for i, draw in enumerate(draws.random_raw(n).tolist()))
    ]


def naive_groups(pieces, documents, seed, n_groups, most_documents, most_pieces):
    """The documents of each group, one document at a time. pieces: of each document of the store."""
    stretches = []
    of_stretch = 0
    for place, document in enumerate(documents):
        if place % most_documents == 0 or of_stretch + pieces[document] > most_pieces:
            stretches.append([])
            of_stretch = 0
        stretches[-1].append(document)
        of_stretch += pieces[document]

    def size(stretch):
        return sum(pieces[document] for document in stretch)

    groups = [[] for _ in range(n_groups)]
    next_order = naive_order([seed, GROUP_STREAM], n_groups)
    for first in range(0, len(stretches), n_groups):
        turn = range(first, min(first + n_groups, len(stretches)))
        # The smallest group takes the largest stretch.
        smallest_first = sorted(next_order(), key=lambda group: size(groups[group]))
        largest_first = sorted(turn, key=lambda number: -size(stretches[number]))
        group_of = dict(zip(largest_first, smallest_first, strict=False))
        for number in turn:
            groups[group_of[number]] += stretches[number]
    return groups


def rows_of(plan):
    return [plan.pieces_of_row(row) for row in range(plan.n_rows)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=9, max_size=60),
    st.integers(2, 16),
    st.sampled_from(["split", "truncate"]),
    st.sampled_from([None, 2, 3]),
    st.integers(0, 2**40),
    st.integers(0, 5),
    st.sampled_from([(8, 4, 6), (5, 3, 2), (20, 7, 1000)]),
)
def test_the_rows_are_those_of_the_groups_in_their_order(lengths, T, long_documents, every, seed, epoch, sizes):
    """Reference: naive_groups, and naive_plan of each group."""
    documents = list(range(0, len(lengths), every or 1))
    chosen = np.array(documents, dtype=np.uint32) if every else None
    with small(*sizes):
        groups = Groups(make_store(lengths), T, seed, True, long_documents, chosen)
        n = groups.n_groups
        plan = groups.plan(epoch)
        rows = rows_of(plan)
    if n == 1:
        assert rows == naive_plan(lengths, T, seed, epoch, long_documents, True, documents=documents)
        return
    expected = []
    pieces = [sum(piece[0] == i for piece in naive_pieces(lengths, T, long_documents)) for i in range(len(lengths))]
    of_groups = naive_groups(pieces, documents, seed, n, *sizes[1:])
    for group in naive_order([seed, epoch, GROUP_STREAM], n)():
        expected += naive_plan(lengths, T, seed, epoch, long_documents, True, (group + 1,), of_groups[group])
    assert rows == expected
    assert plan.totals(0, plan.n_rows) == (sum(pairs for row in rows for *_, pairs in row), sum(map(len, rows)))
    assert plan.n_pairs == plan.row_targets(0, plan.n_rows)
    assert plan.targets_of_rows().tolist() == [sum(pairs for *_, pairs in row) for row in rows]


@pytest.mark.parametrize("pack, long_documents", [(True, "split"), (True, "truncate"), (False, "split")])
def test_every_piece_once_and_totals_of_any_rows(pack, long_documents):
    """Reference: naive_pieces, and the pieces of the rows themselves."""
    lengths = random_lengths(300)
    with small(60, 11, 15):
        groups = Groups(make_store(lengths), 32, 7, pack, long_documents)
        plan = groups.plan(2)
        assert groups.n_groups > 4
        rows = rows_of(plan)
        pieces = [piece for row in rows for piece in row]
        assert len(pieces) == len(set(pieces))
        assert set(pieces) == naive_pieces(lengths, 32, long_documents if pack else "truncate")
        n = plan.n_rows
        for lo, hi in ((0, n), (0, 1), (n - 1, n), (3, 3), (5, n // 2), (n // 3, n - 2), (1, n - 1)):
            of_rows = [piece for row in rows[lo:hi] for piece in row]
            assert plan.totals(lo, hi) == (sum(pairs for *_, pairs in of_rows), len(of_rows))
        # In any order, and from several groups at once
        wanted = [n - 1, 0, n // 2, 0, n // 4]
        count, document, start, pairs = plan.pieces(wanted)
        assert count.tolist() == [len(rows[row]) for row in wanted]
        found = list(zip(document.tolist(), start.tolist(), pairs.tolist(), strict=True))
        assert found == [piece for row in wanted for piece in rows[row]]
        assert [len(part) for part in plan.pieces([])] == [0, 0, 0, 0]


def test_a_small_corpus_is_planned_at_once_as_ever():
    """Reference: EpochPlan. Runs of earlier versions go on."""
    store = make_store(random_lengths(500))
    chosen = np.arange(0, 500, 3, dtype=np.uint32)
    for documents in (None, chosen):
        plan = Groups(store, 32, 5, documents=documents).plan(3)
        assert isinstance(plan, EpochPlan)
        assert rows_of(plan) == rows_of(EpochPlan(store, 32, 5, 3, documents=documents))


def test_each_group_is_spread_evenly_over_the_corpus():
    """Reference: the share of a part of the corpus in all documents. A sorted corpus does not come topic after topic."""
    store = make_store([20] * 6000)
    with small(500, 10, 500):
        groups = Groups(store, 32, 1)
        for group in range(groups.n_groups):
            documents = groups.documents_of_group(group)
            first_third = (documents < 2000).mean()
            assert abs(first_third - 1 / 3) < 0.05
    assert groups.n_groups >= 12


@pytest.mark.parametrize("long_documents", ["split", "truncate"])
def test_no_group_is_larger_than_planned_whatever_the_lengths(long_documents):
    """Long documents at one end and short ones at the other; the bound is that of the module's text."""
    generator = np.random.default_rng(0)
    lengths = np.sort(generator.lognormal(3, 2, 3000).astype(np.int64) + 2)
    with small(500, 64, 60):
        groups = Groups(make_store(lengths), 32, 1, True, long_documents)
        sizes = [size.totals.documents for size in groups.sizes()]
        largest = max(60, -(-(lengths.max() - 1) // 32)) if long_documents == "split" else 60
    assert len(sizes) > 5 and max(sizes) <= 500 + largest and max(sizes) - min(sizes) <= largest


@pytest.mark.parametrize("long_documents", ["split", "truncate"])
def test_long_rows_make_groups_of_bounded_bytes_and_short_ones_stay_as_they_were(long_documents, monkeypatch):
    """Reference: the groups by pieces alone, as versions before had them. A corpus that was one group stays one."""
    lengths = random_lengths(400, top=200)
    store = make_store(lengths)
    tokens = int(store.offsets[-1])

    def divided(T, most_tokens, pieces=64):
        monkeypatch.setattr(grouped_plan, "GROUP_TOKENS", most_tokens)
        with small(pieces, 11, 15):
            groups = Groups(store, T, 7, True, long_documents)
            rows = rows_of(groups.plan(0))
            return groups.n_groups, groups.rule(), rows

    for T in (8, 16, 32, 64, 128):
        before = divided(T, 1 << 60)
        bounded = divided(T, 64 * 16)
        if T <= 16 and long_documents == "split":
            assert bounded == before
        else:
            assert bounded[0] == max(before[0], -(-tokens // (64 * 16)))
            assert bounded[1] != before[1], "a resume of the other division is refused"
        assert divided(T, 64 * 16, pieces=1 << 20)[0] == 1


def test_the_bound_on_tokens_is_that_on_pieces_of_rows_of_512():
    assert grouped_plan.GROUP_TOKENS == grouped_plan.GROUP_PIECES * 512


def test_more_groups_than_stretches_leave_some_empty():
    """Reference: EpochPlan of the same documents, by their pieces."""
    store = make_store([400] * 3)
    with small(8, 4, 13):
        groups = Groups(store, 32, 1)
        plan = groups.plan(0)
        rows = rows_of(plan)
        assert groups.n_groups > 3 and min(size.rows for size in groups.sizes()) == 0
        assert sorted(sum(rows, [])) == sorted(sum(rows_of(EpochPlan(store, 32, 1, 0)), []))
        assert plan.targets_of_rows().sum() == 3 * 399


def test_epochs_have_other_orders_of_the_groups_and_within_them():
    store = make_store(random_lengths(400))
    with small(40, 5, 20):
        groups = Groups(store, 32, 1)
        plans = [groups.plan(epoch) for epoch in range(3)]
        orders = [[frozenset(row) for row in rows_of(plan)] for plan in plans]
        assert groups.n_groups > 5
        again = rows_of(Groups(store, 32, 1).plan(2))
    assert [frozenset(row) for row in again] == orders[2]
    assert len({plan.n_rows for plan in plans}) == 1
    # Which group the first rows of the epoch are of
    assert len({plan._order[0] for plan in plans}) > 1
    assert orders[0] != orders[1] != orders[2]
    group_of_document = {}
    for group in range(groups.n_groups):
        group_of_document |= dict.fromkeys(groups.documents_of_group(group).tolist(), group)
    for order in orders:
        for row in order:
            assert len({group_of_document[document] for document, *_ in row}) == 1


def test_groups_are_planned_when_their_rows_are_asked_for():
    """Of an epoch the sizes are known, and no more than KEPT_GROUPS plans lie in memory."""
    store = make_store(random_lengths(400))
    with small(40, 5, 20), patch.object(grouped_plan, "EpochPlan", side_effect=EpochPlan) as made:
        plan = Groups(store, 32, 1).plan(0)
        assert isinstance(plan, GroupedPlan)
        plan.totals(0, plan.n_rows)
        assert plan.fill > 0 and made.call_count == 0
        for row in range(plan.n_rows):
            # As in training: batches are made some rows ahead of the totals.
            plan.recipe(range(min(row + 3, plan.n_rows - 1), min(row + 4, plan.n_rows)))
            plan.totals(row, row + 1)
            assert len(plan._plans) <= grouped_plan.KEPT_GROUPS
        assert made.call_count == plan.groups.n_groups


@pytest.mark.parametrize("pack", [True, False])
def test_targets_that_are_trained_alone_are_counted(pack):
    """Reference: their sum over the documents of each row, as for the answers of conversations."""
    lengths = random_lengths(200, top=60)
    trained = np.maximum(np.minimum(lengths, 31) - 1, 0) // 2
    with small(40, 7, 20):
        plan = Groups(make_store(lengths), 32, 3, pack, "truncate", trained=trained).plan(1)
        rows = rows_of(plan)
        assert plan.groups.n_groups > 3
        expected = [sum(trained[document] for document, *_ in row) for row in rows]
        assert plan.targets_of_rows().tolist() == expected
        assert plan.row_targets(0, plan.n_rows) == sum(expected)
        assert plan.row_targets(4, plan.n_rows - 3) == sum(expected[4:-3])
        assert plan.n_pairs == sum(pairs for row in rows for *_, pairs in row)


@pytest.mark.parametrize("stop_after", [0, 1, 5, 9])
@pytest.mark.parametrize("pack", [True, False])
def test_ledger_over_groups_a_resume_and_another_world_size(pack, stop_after):
    """Every token of the store is another one: the sorted targets of the epoch are all of them but the first ones of documents."""
    lengths = random_lengths(150, top=30 if not pack else 100)
    store = make_store(lengths)
    expected = np.setdiff1d(store.tokens, store.tokens[store.offsets[:-1][lengths > 0]])
    targets = []

    def train(world, batch, start_row, updates):
        """Each rank has a plan of its own, as in a run. Returns the row at which the next update begins."""
        end_row = start_row
        for rank in range(world):
            plan = Groups(store, 32, 11, pack).plan(1)
            schedule = UpdateSchedule(plan.n_rows, batch, 2, world, start_row)
            for update, _, part in make_loader(Assembler(store), plan, schedule, rank):
                if update >= schedule.first_update + updates:
                    break
                end_row = max(end_row, schedule.rows(update)[1])
                if part is not None:
                    targets.append(part.targets[part.targets != IGNORE].numpy())
        return end_row

    with small(30, 6, 20):
        assert Groups(store, 32, 11, pack).n_groups > 4
        row = train(2, 3, 0, stop_after)
        train(3, 2, row, 1000)
    assert np.array_equal(np.sort(np.concatenate(targets)), expected)


def test_a_corpus_plans_in_groups_and_a_resume_of_another_division_is_another_layout(tmp_path):
    path = write_corpus(tmp_path / "data.jsonl")
    encoder = DocumentEncoder(small_tokenizer())

    def opened(arguments=(str(path),), **options):
        return Corpus(list(arguments), encoder, max_seq_len=16, seed=0, progress=False, **options)

    at_once = opened(val_fraction=0.2)
    assert "groups" not in at_once.layout()
    with small(40, 5, 20):
        in_groups = opened(val_fraction=0.2)
        plan = in_groups.plan(0)
        assert isinstance(plan, GroupedPlan)
        assert sorted(piece for row in rows_of(plan) for piece in row) == sorted(
            piece for row in rows_of(at_once.plan(0)) for piece in row
        )
        assert in_groups.plan(1).groups is plan.groups, "the lengths are read once"
        layout = in_groups.layout()
        assert layout.pop("groups") == [40, 20, 5]
    assert layout == at_once.layout()


@pytest.mark.slow
def test_a_group_of_a_large_corpus_takes_little_memory_and_time():
    """30 million documents, in groups of up to 8 million pieces. benchmarks/data.py does it with a billion."""
    lengths = np.random.default_rng(0).lognormal(5.2, 1, 30_000_000).astype(np.int64) + 2
    store = SimpleNamespace(offsets=np.concatenate([[0], np.cumsum(lengths)]))
    del lengths
    tracemalloc.start()
    groups = Groups(store, 512, 0)
    plan = groups.plan(0)
    _, peak = tracemalloc.get_traced_memory()
    assert groups.n_groups > 3 and plan.fill > 0.99 and peak < 50e6
    start = time.perf_counter()
    groups.plan_of_group(1, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.perf_counter() - start < 5 and peak < 200e6
