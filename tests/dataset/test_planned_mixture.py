"""Shares over a whole run, by counting. References: the schedule's own integral, the documents' lengths, and the rows of
each pass made by itself."""

import re
import time
from collections import Counter

import numpy as np
import pytest

from common.errors import DataError
from dataset import planned_mixture
from dataset.loader import UpdateSchedule
from dataset.mixed_plan import Move
from dataset.packing import EpochPlan
from dataset.planned_mixture import FAR_TOO_MUCH, ONE_PASS, ROOM, PlannedMixture, RunLength
from dataset.shares import Curve, Point, Source, group_sources
from dataset.sources import ConcatStore
from tests.dataset.test_packing import make_store

T = 32


def mixture(arguments, lengths, length=ONE_PASS, pack=True, T=T, documents=None):
    """A PlannedMixture of stores with documents of the given lengths."""
    sources = arguments if isinstance(arguments[0], Source) else group_sources(arguments)
    store = ConcatStore([make_store(of_source) for of_source in lengths])
    if documents is None:
        documents = [
            np.arange(lo, hi, dtype=np.uint32) for lo, hi in zip(store.bounds[:-1], store.bounds[1:], strict=True)
        ]

    def make_plan(chosen, epoch):
        return EpochPlan(store, T, 3, epoch, pack, documents=chosen)

    return PlannedMixture(store, sources, documents, make_plan, 3, length, max_targets=None if pack else T - 1)


def random_lengths(seed, counts, low=2, high=90):
    rng = np.random.default_rng(seed)
    return [rng.integers(low, high, n).tolist() for n in counts]


def of_rows(planned, lo, hi):
    """Targets of each source in some rows, from their pieces."""
    _, document, _, pairs = planned.plan.pieces(range(lo, hi))
    source = np.searchsorted(planned.store.bounds[1:], document, side="right")
    return np.bincount(source, weights=pairs, minlength=len(planned.sources))


def worst_share(planned, parts=10, asked=None):
    """How far the share of a source in a tenth of the run's tokens is from the schedule's at most."""
    plan = planned.plan
    ends = np.cumsum([plan.row_targets(row, row + 1) for row in range(plan.n_rows)])
    cuts = np.searchsorted(ends, ends[-1] * np.arange(parts + 1) / parts, side="left")
    cuts[0], cuts[-1] = 0, plan.n_rows
    worst = 0.0
    for part, (lo, hi) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        given = of_rows(planned, lo, hi)
        for i, curve in enumerate(planned.curves):
            wanted = (curve.area((part + 1) / parts) - curve.area(part / parts)) * parts
            worst = max(worst, abs(given[i] / given.sum() - wanted))
    return worst


ANNEAL = [
    Source(["web"], (Point(0, 0.8), Point(0.9, 0.8), Point(0.9, 0.1))),
    Source(["books"], (Point(0, 0.2), Point(0.9, 0.2), Point(0.9, 0.9)), repeat=4),
]
MIXTURES = [
    (["a:0.7..0.2", "b:0.3..0.8"], (12_000, 9_000)),
    (["a:70..20", "b:30..80:x3"], (12_000, 3_000)),
    (["a:0..1", "b:1..0"], (6_000, 7_000)),
    (["a:0.5..0.2", "b:0.3..0.3", "c:0.2..0.5:x2"], (9_000, 6_000, 4_000)),
    (["a:0.9", "b:0.1:x7"], (12_000, 300)),
    (ANNEAL, (15_000, 2_000)),
]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("arguments, counts", MIXTURES)
def test_each_tenth_of_a_run_has_the_shares_of_the_schedule(arguments, counts, pack):
    """Shares are of trained tokens, also where the rows of a source are emptier than those of another."""
    lengths = random_lengths(1, counts)
    lengths[0] = [max(2, n // 3) for n in lengths[0]]
    for length in (ONE_PASS, RunLength(updates=60, rows_of_update=64)):
        planned = mixture(arguments, lengths, length, pack)
        assert worst_share(planned) < 0.01
        # And nowhere has a source got ahead by more than a row or so.
        for end in np.linspace(1, planned.plan.n_rows, 40).astype(int).tolist():
            progress = planned.plan.row_targets(0, end) / planned.plan.row_targets(0, planned.plan.n_rows)
            given = planned.plan.source_targets(0, end)
            total = planned.plan.row_targets(0, planned.plan.n_rows)
            for i, curve in enumerate(planned.curves):
                assert abs(given[i] - curve.area(progress) * total) < 4 * T


@pytest.mark.parametrize("arguments, counts", MIXTURES)
def test_every_document_comes_as_often_as_planned(arguments, counts):
    """The scarcest source is used up; of the others each document comes so often or once more, and always whole."""
    lengths = random_lengths(2, counts)
    for epochs in (1, 2):
        planned = mixture(arguments, lengths, RunLength(epochs))
        _, document, start, pairs = planned.plan.pieces(range(planned.plan.n_rows))
        pieces = Counter(zip(document.tolist(), start.tolist(), pairs.tolist(), strict=True))
        offsets = planned.store.offsets[:]
        trained = np.zeros(len(offsets) - 1)
        for (number, _, of_piece), times in pieces.items():
            trained[number] += times * of_piece
        passes = trained / (np.diff(offsets) - 1)
        assert (passes == np.round(passes)).all()
        told = planned.told()
        used_up = 0
        for i, source in enumerate(planned.sources):
            of_source = passes[planned.store.bounds[i] : planned.store.bounds[i + 1]]
            assert of_source.max() - of_source.min() <= 1
            assert of_source.max() <= np.ceil(source.repeat * epochs)
            used_up += (of_source == source.repeat * epochs).all()
            assert told[i].targets == trained[planned.store.bounds[i] : planned.store.bounds[i + 1]].sum()
            in_source = np.diff(offsets)[planned.store.bounds[i] : planned.store.bounds[i + 1]] - 1
            assert told[i].passes == pytest.approx((of_source * in_source).sum() / in_source.sum())
        assert used_up >= 1


def test_the_rows_are_those_of_the_passes_in_their_order():
    """Reference: an EpochPlan of each pass, row by row, and each source by itself."""
    lengths = random_lengths(3, (200, 60))
    planned = mixture(["a:0.7..0.2", "b:0.3..0.8:x4"], lengths, RunLength(updates=40, rows_of_update=4))
    of_source = [[], []]
    for row in range(planned.plan.n_rows):
        pieces = planned.plan.pieces_of_row(row)
        sources = {int(number >= 200) for number, _, _ in pieces}
        assert len(sources) == 1
        of_source[sources.pop()].append(pieces)
    for i in range(2):
        expected = []
        number = 0
        while len(expected) < len(of_source[i]):
            plan = planned.make_plan(planned.documents[i], number * 2 + i)
            expected += [plan.pieces_of_row(row) for row in range(plan.n_rows)]
            number += 1
        assert of_source[i] == expected[: len(of_source[i])]
    assert number > 1, "more than one pass was looked at"
    rows = [5, 0, 17, 17]
    count, document, _, pairs = planned.plan.pieces(rows)
    whole = [planned.plan.pieces_of_row(row) for row in rows]
    assert count.tolist() == [len(pieces) for pieces in whole]
    assert document.tolist() == [piece[0] for pieces in whole for piece in pieces]
    totals = planned.plan.totals(10, 30)
    assert totals.targets == sum(piece[2] for row in range(10, 30) for piece in planned.plan.pieces_of_row(row))
    assert totals.documents == sum(len(planned.plan.pieces_of_row(row)) for row in range(10, 30))


def test_another_division_among_ranks_trains_the_same_rows():
    planned = mixture(["a:0.7..0.2", "b:0.3..0.8"], random_lengths(4, (500, 400)))
    again = mixture(["a:0.7..0.2", "b:0.3..0.8"], random_lengths(4, (500, 400)))
    n_rows = planned.plan.n_rows
    for ranks, batch_size in ((1, 8), (2, 4), (4, 1)):
        schedule = UpdateSchedule(n_rows, batch_size, 8 // batch_size, ranks)
        seen = []
        for rank in range(ranks):
            for _, _, lo, hi in schedule.steps(rank):
                seen += range(lo, hi)
        assert sorted(seen) == list(range(n_rows))
    for row in range(n_rows):
        assert planned.plan.pieces_of_row(row) == again.plan.pieces_of_row(row)


def order_of(planned):
    return [planned.plan.pieces_of_row(row) for row in range(planned.plan.n_rows)]


@pytest.mark.parametrize("end", [700, 1300])
def test_a_moved_end_keeps_the_rows_before_it_and_what_was_planned_for_the_fall(end):
    """The schedule jumps at 0.8 of the run, where the rate begins to fall: 200 rows before the end, wherever that is."""
    jump = [
        Source(["web"], (Point(0, 1.0), Point(0.8, 0.6), Point(0.8, 0.0)), repeat=9),
        Source(["books"], (Point(0, 0.0), Point(0.8, 0.4), Point(0.8, 1.0)), repeat=9),
    ]
    planned = mixture(jump, random_lengths(5, (400, 400)), RunLength(updates=100, rows_of_update=10))
    start = planned.plan.moves
    before = order_of(planned)
    move = Move(row=300, fall_row=end - 200, fall_progress=0.8, end=end)
    planned.replan([*start, move])
    after = order_of(planned)
    assert len(after) == end
    assert after[:300] == before[:300]
    # The jump is where the fall begins, to a few rows of estimates.
    last_of_web = max(row for row in range(end) if after[row][0][0] < 400)
    assert abs(last_of_web - (end - 200)) <= 5
    # What is left of the ramp goes over the rows between the move and the jump: 0.15 to 0.4 of books.
    middle = of_rows(planned, 300, end - 200)
    assert middle[1] / middle.sum() == pytest.approx((0.15 + 0.4) / 2, abs=0.015)
    # A second move, and the same again from its record alone.
    second = Move(row=end - 100, fall_row=end - 100, fall_progress=0.8, end=end + 50)
    planned.replan([*start, move, second])
    twice = order_of(planned)
    assert twice[: end - 100] == after[: end - 100] and len(twice) == end + 50
    fresh = mixture(jump, random_lengths(5, (400, 400)), RunLength(updates=100, rows_of_update=10))
    fresh.replan([*start, move, second])
    assert order_of(fresh) == twice
    # No row comes twice in a pass: a piece comes as often as its source was passed over, or once more.
    for i, told in enumerate(planned.told()):
        pieces = Counter(piece for row in twice for piece in row if (piece[0] >= 400) == bool(i))
        assert set(pieces.values()) <= {int(told.passes), int(told.passes) + 1}


def test_a_finished_run_that_goes_on_keeps_its_last_shares():
    planned = mixture(
        ["a:1..0.25:x9", "b:0..0.75:x9"], random_lengths(6, (300, 300)), RunLength(updates=50, rows_of_update=8)
    )
    before = order_of(planned)
    planned.replan([*planned.plan.moves, Move(row=400, fall_row=800, fall_progress=1.0, end=800)])
    assert order_of(planned)[:400] == before
    given = of_rows(planned, 400, 800)
    assert given[1] / given.sum() == pytest.approx(0.75, abs=0.01)


def test_a_source_that_is_too_small_is_told_with_what_would_fit():
    lengths = random_lengths(7, (2_000, 500))
    arguments = ["a:0.7..0.2", "b:0.3..0.8"]
    shortage = mixture(arguments, lengths, RunLength(updates=200, rows_of_update=10)).shortage()
    found = re.fullmatch(r"b is passed over \d+\.\d\d times where 1 may be \(x(\d+)\)", shortage.sources)
    fits = int(200 * shortage.fits * ROOM)
    assert mixture(arguments, lengths, RunLength(updates=fits, rows_of_update=10)).shortage() is None
    assert mixture(arguments, lengths, RunLength(updates=fits + 2, rows_of_update=10)).shortage() is not None
    more_passes = [arguments[0], f"{arguments[1]}:x{found[1]}"]
    assert mixture(more_passes, lengths, RunLength(updates=200, rows_of_update=10)).shortage() is None
    with pytest.raises(DataError, match="b has a share but no document to draw"):
        mixture(arguments, [[5, 6], [1, 1]])


@pytest.mark.parametrize("pack", [True, False])
def test_a_run_that_asks_for_far_too_much_is_refused_before_its_rows_are_laid_out(pack):
    """Reference: the plan with as many updates as are said to fit, and one of the run with fewer updates."""
    lengths = random_lengths(7, (300, 200))
    lengths[0] = [max(2, n // 3) for n in lengths[0]]
    arguments = ["a:0.7..0.2", "b:0.3..0.8"]
    start = time.perf_counter()
    with pytest.raises(DataError, match="--data_path: too little text for 1,000,000,000 updates: ") as caught:
        mixture(arguments, lengths, RunLength(updates=10**9, rows_of_update=256), pack)
    assert time.perf_counter() - start < 1
    # So many passes are not allowed at all.
    assert "allow more passes" not in str(caught.value)
    with pytest.raises(DataError, match="train at most") as caught:
        mixture(arguments, lengths, RunLength(updates=20_000, rows_of_update=1), pack)
    fits = int(str(caught.value).split("train at most ")[1].split(" ")[0])
    assert mixture(arguments, lengths, RunLength(updates=fits, rows_of_update=1), pack).shortage() is None
    assert mixture(arguments, lengths, RunLength(updates=int(fits * 1.05), rows_of_update=1), pack).shortage()
    told = re.search(r"b is passed over (\S+) times where 1 may be .* allow more passes, as in", str(caught.value))
    shorter = mixture(arguments, lengths, RunLength(updates=2_000, rows_of_update=1), pack).told()[1]
    passes = float(told[1].replace(",", ""))
    assert passes == pytest.approx(10 * shorter.passes, rel=0.05) and passes > FAR_TOO_MUCH


def test_a_run_that_is_too_long_to_be_laid_out_is_refused(monkeypatch):
    lengths = random_lengths(7, (300, 200))
    arguments = ["a:0.7..0.2:x1000", "b:0.3..0.8:x1000"]
    long = RunLength(updates=10**6, rows_of_update=1)
    with pytest.raises(DataError, match=r"passes over b about \d,\d{3} times, .* 1,000 passes .* train fewer updates"):
        mixture(arguments, lengths, long)
    with pytest.raises(DataError, match=r"passes over a about 2,000 times, .* fewer epochs or allow fewer passes"):
        mixture(["a:0.1..0.2:x1000", "b:0.9..0.8:x1000"], [[50], [100] * 60], RunLength(epochs=2))
    monkeypatch.setattr(planned_mixture, "MOST_ROWS", 1000)
    with pytest.raises(DataError, match=r"has about 1,1\d\d rows, .* at most 1,000 are planned: train fewer updates"):
        mixture(arguments, lengths, RunLength(updates=1100, rows_of_update=1))
    assert mixture(arguments, lengths, RunLength(updates=990, rows_of_update=1)).plan.n_rows == 990


def test_after_a_move_what_is_left_is_told_to_be_too_much():
    """Reference: the targets of the rows, and the plan with as many rows as are said to fit."""
    planned = mixture(
        ["a:0.7..0.2:x3", "b:0.3..0.8:x3"], random_lengths(7, (900, 400)), RunLength(updates=150, rows_of_update=10)
    )
    start = planned.plan.moves
    assert planned.shortage() is None
    longer = Move(row=600, fall_row=6000, fall_progress=1.0, end=6000)
    planned.replan([*start, longer])
    shortage = planned.shortage()
    assert max(of_rows(planned, 0, 6000) / planned.targets) > 3 and "where 3 may be" in shortage.sources
    end = 600 + int((longer.end - 600) * shortage.fits * ROOM)
    planned.replan([*start, Move(row=600, fall_row=end, fall_progress=1.0, end=end)])
    assert planned.shortage() is None
    assert 2.9 < max(of_rows(planned, 0, end) / planned.targets) <= 3
    # Rows that are trained cannot be taken back: only what comes is too much or not.
    planned.replan([*start, longer, Move(row=6000, fall_row=6000, fall_progress=1.0, end=6000)])
    assert planned.shortage() is None


def test_held_out_documents_are_in_no_row():
    lengths = random_lengths(8, (300, 200))
    kept = [np.arange(0, 300, 2, dtype=np.uint32), np.arange(301, 500, 3, dtype=np.uint32)]
    planned = mixture(["a:0.7..0.2", "b:0.3..0.8:x3"], lengths, documents=kept)
    _, document, _, _ = planned.plan.pieces(range(planned.plan.n_rows))
    assert set(document.tolist()) <= set(np.concatenate(kept).tolist())


def test_a_later_pass_is_made_when_it_is_wanted():
    """However many passes there are, few plans are held."""
    planned = mixture(
        ["a:0.5..0.4:x50", "b:0.5..0.6:x50"], random_lengths(9, (30, 20)), RunLength(updates=100, rows_of_update=5)
    )
    for row in range(planned.plan.n_rows):
        planned.plan.pieces_of_row(row)
        assert all(len(rows._plans) <= 2 for rows in planned.rows)


def test_a_curve_that_ends_at_nothing_ends_its_source():
    planned = mixture(["a:1..0", "b:0..1"], random_lengths(10, (400, 400)), RunLength(updates=20, rows_of_update=10))
    assert isinstance(planned.curves[0], Curve)
    last = of_rows(planned, 195, 200)
    assert last[0] <= T
