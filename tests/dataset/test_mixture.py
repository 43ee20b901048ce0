"""Sources with shares, by counting. References: the schedule's integral, the rows of each pass, a walk round each source."""

import re
from collections import Counter

import numpy as np
import pytest

from common.errors import DataError
from dataset import mixture as module
from dataset.mixture import MIXTURE_STREAM, Mixture
from dataset.packing import EpochPlan
from dataset.shares import Point, Source, group_sources
from dataset.store.token_store import ConcatStore
from tests.dataset.test_packing import make_store

T = 32
ANNEAL = [
    Source(["web"], (Point(0, 0.8), Point(0.9, 0.8), Point(0.9, 0.1))),
    Source(["books"], (Point(0, 0.2), Point(0.9, 0.2), Point(0.9, 0.9)), repeat=4),
]
MIXTURES = [
    (["a:0.7..0.2", "b:0.3..0.8"], (12_000, 9_000)),
    (["a:0.5..0.2", "b:0.3..0.3", "c:0.2..0.5:x2"], (9_000, 6_000, 4_000)),
    (ANNEAL, (15_000, 2_000)),
]


def mixture(arguments, lengths, epochs=1, n_rows=0, pack=True):
    """A Mixture of stores with documents of the given lengths."""
    sources = arguments if isinstance(arguments[0], Source) else group_sources(arguments)
    store = ConcatStore([make_store(of_source) for of_source in lengths])
    documents = np.arange(len(store), dtype=np.uint32)

    def make_plan(chosen, epoch):
        return EpochPlan(store.offsets, T, 3, epoch, pack, documents=chosen)

    targets = np.concatenate([np.array(of_source) - 1 for of_source in lengths]).clip(0, None if pack else T - 1)
    return Mixture(store, sources, documents, store.bounds.tolist(), make_plan, targets, 3, epochs, n_rows)


def random_lengths(seed, counts, low=2, high=90):
    rng = np.random.default_rng(seed)
    return [rng.integers(low, high, n).tolist() for n in counts]


def of_rows(planned, lo, hi, epoch=0):
    """Targets of each source in some rows, from their pieces."""
    _, document, _, pairs = planned.plan(epoch).pieces(range(lo, hi))
    source = np.searchsorted(planned.store.bounds[1:], document, side="right")
    return np.bincount(source, weights=pairs, minlength=len(planned.sources))


def worst_share(planned, epoch=0, parts=10):
    """How far the share of a source in a tenth of the run's tokens is from the schedule's at most."""
    plan = planned.plan(epoch)
    ends = np.cumsum([plan.row_targets(row, row + 1) for row in range(plan.n_rows)])
    cuts = np.searchsorted(ends, ends[-1] * np.arange(parts + 1) / parts, side="left")
    cuts[0], cuts[-1] = 0, plan.n_rows
    worst = 0.0
    for part, (lo, hi) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        given = of_rows(planned, lo, hi, epoch)
        for i, curve in enumerate(planned.curves):
            wanted = (curve.area((part + 1) / parts) - curve.area(part / parts)) * parts
            worst = max(worst, abs(given[i] / given.sum() - wanted))
    return worst


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("arguments, counts", [*MIXTURES, (["a:0.7", "b:0.3"], (4_000, 3_000))])
def test_each_tenth_of_a_run_has_the_shares_of_the_schedule(arguments, counts, pack):
    """Shares are of trained tokens, also where the rows of a source are emptier than those of another."""
    lengths = random_lengths(1, counts)
    lengths[0] = [max(2, n // 3) for n in lengths[0]]
    for n_rows in (0, 60 * 64):
        planned = mixture(arguments, lengths, n_rows=n_rows, pack=pack)
        assert worst_share(planned) < 0.01 and (planned.is_one_plan or worst_share(planned, epoch=2) < 0.01)
        # And nowhere has a source got ahead by more than a row or so.
        plan = planned.plan(0)
        total = plan.row_targets(0, plan.n_rows)
        for end in np.linspace(1, plan.n_rows, 40).astype(int).tolist():
            given = plan.source_targets(end)
            progress = plan.row_targets(0, end) / total
            for i, curve in enumerate(planned.curves):
                assert abs(given[i] - curve.area(progress) * total) < 4 * T


@pytest.mark.parametrize("arguments, counts", MIXTURES)
def test_every_document_comes_as_often_as_planned(arguments, counts):
    """The scarcest source is used up; of the others each document comes so often or once more, and always whole."""
    lengths = random_lengths(2, counts)
    for epochs in (1, 2):
        planned = mixture(arguments, lengths, epochs)
        plan = planned.plan(0)
        _, document, start, pairs = plan.pieces(range(plan.n_rows))
        pieces = Counter(zip(document.tolist(), start.tolist(), pairs.tolist(), strict=True))
        offsets = planned.store.offsets[:]
        trained = np.zeros(len(offsets) - 1)
        for (number, _, of_piece), times in pieces.items():
            trained[number] += times * of_piece
        passes = trained / (np.diff(offsets) - 1)
        assert (passes == np.round(passes)).all()
        told = plan.source_targets(plan.n_rows)
        used_up = 0
        for i, source in enumerate(planned.sources):
            of_source = passes[planned.store.bounds[i] : planned.store.bounds[i + 1]]
            assert of_source.max() - of_source.min() <= 1
            assert of_source.max() <= np.ceil(source.repeat * epochs)
            used_up += (of_source == source.repeat * epochs).all()
            assert told[i] == trained[planned.store.bounds[i] : planned.store.bounds[i + 1]].sum()
        assert used_up >= 1


def test_the_rows_are_those_of_the_passes_in_their_order():
    lengths = random_lengths(3, (200, 60))
    planned = mixture(["a:0.7..0.2", "b:0.3..0.8:x4"], lengths, n_rows=160)
    of_source, whole = [[], []], planned.plan(0)
    for row in range(whole.n_rows):
        pieces = whole.pieces_of_row(row)
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
    pieces = [piece for row in range(10, 30) for piece in whole.pieces_of_row(row)]
    assert whole.totals(10, 30) == (sum(pairs for *_, pairs in pieces), len(pieces))


def order_of(planned, epochs=1):
    plans = [planned.plan(epoch) for epoch in range(epochs)]
    return [plan.pieces_of_row(row) for plan in plans for row in range(plan.n_rows)]


def test_behind_the_planned_end_the_last_shares_go_on():
    """References: a run of fixed shares that is planned for as many rows, and the last points of the schedule."""
    lengths = random_lengths(5, (400, 400))
    fixed = ["a:0.7:x9", "b:0.3:x9"]
    assert order_of(mixture(fixed, lengths, n_rows=500), 2) == order_of(mixture(fixed, lengths, n_rows=1000))

    to_a_fifth = ["a:0.8..0.2:x9", "b:0.2..0.8:x9"]
    planned = mixture(to_a_fifth, lengths, n_rows=500)
    behind = of_rows(planned, 0, 500, epoch=1)
    assert behind[0] / behind.sum() == pytest.approx(0.2, abs=0.01)
    # Nothing is left out, and each piece comes as often as its source was passed over, or once more.
    rows = order_of(planned, 2)
    for i, targets in enumerate(planned.trained_before(2)):
        pieces = Counter(piece for row in rows for piece in row if (piece[0] >= 400) == bool(i))
        passes = targets // planned.pass_targets[i]
        assert set(pieces.values()) <= {passes, passes + 1}
    # A resume asks for what is behind the end alone.
    assert order_of(planned, 2)[500:] == rows[500:]
    behind_end = mixture(to_a_fifth, lengths, n_rows=500).plan(1)
    assert [behind_end.pieces_of_row(row) for row in range(500)] == rows[500:]

    # Nothing of a source comes that has no share at the end.
    assert of_rows(mixture(["a:1..0:x9", "b:0..1:x9"], lengths, n_rows=500), 0, 500, epoch=1)[0] == 0


def test_a_source_that_is_too_small_is_told_with_the_passes_that_it_needs():
    lengths = random_lengths(7, (2_000, 500))
    arguments = ["a:0.7..0.2", "b:0.3..0.8"]
    short = mixture(arguments, lengths, n_rows=2000)
    line = short.repeats_beyond_limit(short.plan(0))
    found = re.fullmatch(r"b needs \d+\.\d\d passes and is allowed 1 \(x(\d+) is enough\)", line)
    enough = mixture([arguments[0], f"{arguments[1]}:x{found[1]}"], lengths, n_rows=2000)
    assert enough.repeats_beyond_limit(enough.plan(0)) == ""
    with pytest.raises(DataError, match="b has a share but no document to draw"):
        mixture(arguments, [[5, 6], [1, 1]])


@pytest.mark.parametrize("n_sources", [2, 6])
@pytest.mark.parametrize("n_rows", [1, 2, 3])
def test_a_run_of_few_rows_takes_few(n_sources, n_rows, monkeypatch):
    """Where no source comes to the middle of its first row."""
    lay_out = module.SourceRows.lay_out

    def bounded(source, targets):
        assert targets < 1e5
        lay_out(source, targets)

    monkeypatch.setattr(module.SourceRows, "lay_out", bounded)
    others = n_sources - 1
    arguments = ["a:0.9..0.1", *(f"{name}:{0.1 / others}..{0.9 / others}" for name in "bcdef"[:others])]
    planned = mixture(arguments, random_lengths(5, (40,) * n_sources), n_rows=n_rows)
    assert planned.plan(0).n_rows == n_rows


def test_a_run_of_too_many_passes_is_refused():
    arguments = ["a:0.7..0.2:x1000", "b:0.3..0.8:x1000"]
    for length in ({"n_rows": 10**6}, {"epochs": 2}):
        with pytest.raises(DataError, match=r"about \d,\d{3} passes over [ab], and at most 1,000 are possible"):
            mixture(arguments, random_lengths(7, (300, 200)), **length)


def naive_draw(documents, targets, quota, epoch):
    """The documents whose first target is met on the epoch's way round the circle, target by target."""
    begin_at = [[] for _ in range(sum(targets))]
    at = 0
    for document, count in zip(documents, targets, strict=True):
        begin_at[at % len(begin_at)].append(document)
        at += count
    steps = range(epoch * quota, (epoch + 1) * quota)
    return sorted(document for step in steps for document in begin_at[step % len(begin_at)])


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 3, 16)])
def test_an_epoch_of_fixed_shares_draws_what_a_walk_round_each_source_meets(weights, pack):
    """As many epochs as are wanted, each as large as the scarcest source allows, and no document again before all have come."""
    lengths = random_lengths(7, (70, 150, 40), 2, 45)
    fixed = mixture([f"{name}:{weight}" for name, weight in zip("abc", weights, strict=True)], lengths, pack=pack)
    assert not fixed.is_one_plan
    targets = [[min(n - 1, n if pack else T - 1) for n in of_source] for of_source in lengths]
    size = min(sum(counts) * sum(weights) / weight for counts, weight in zip(targets, weights, strict=True))
    before = np.zeros(3, int)
    for epoch in range(8):
        plan = fixed.plan(epoch)
        _, document, start, _ = plan.pieces(range(plan.n_rows))
        drawn = document[start == 0]
        assert fixed.trained_before(epoch) == before.tolist()
        before += of_rows(fixed, 0, plan.n_rows, epoch).astype(int)
        for i, counts in enumerate(targets):
            draws = np.random.PCG64([3, MIXTURE_STREAM, i]).random_raw(len(counts)).tolist()
            order = [document for _, document in sorted((draw >> 32, document) for document, draw in enumerate(draws))]
            quota = min(round(size * weights[i] / sum(weights)), sum(counts))
            expected = naive_draw(order, [counts[number] for number in order], quota, epoch)
            first, end = fixed.store.bounds[i : i + 2]
            assert sorted(drawn[(drawn >= first) & (drawn < end)] - first) == expected
