"""Batches, update schedule, loader, mixture and validation split against naive loops and a token ledger."""

import multiprocessing

import numpy as np
import pytest
import torch

from common.errors import LoaderError
from dataset.batches import Assembler, UpdateSchedule
from dataset.corpus import split_of
from dataset.loader import Loader
from dataset.packing import EpochPlan
from dataset.store.build import open_or_build
from dataset.store.token_store import ConcatStore
from dataset.tokenizing.encoder import DocumentEncoder
from model.config import IGNORE
from tests.dataset.test_packing import make_store, random_lengths
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import batches_of, run_program, write_texts


def naive_batch(store, plan, rows):
    """The four arrays of a packed batch, token by token."""
    ids, targets, documents, positions = ([[fill] * plan.T for _ in rows] for fill in (0, IGNORE, -1, 0))
    for i, r in enumerate(rows):
        at = 0
        for number, (document, start, pairs) in enumerate(plan.pieces_of_row(r)):
            text = store.tokens[store.offsets[document] : store.offsets[document + 1]].tolist()
            for k in range(pairs):
                ids[i][at], targets[i][at] = text[start + k], text[start + k + 1]
                documents[i][at], positions[i][at] = number, k
                at += 1
    return ids, targets, documents, positions


@pytest.mark.parametrize("long_documents", ["split", "truncate"])
def test_packed_batch_equals_a_naive_loop(long_documents):
    store = make_store(random_lengths(200))
    plan = EpochPlan(store.offsets, 32, 5, 0, long_documents=long_documents)
    for rows in (range(3), range(plan.n_rows), [4, 1, 9]):
        batch = Assembler(store)[plan.recipe(rows)]
        for tensor, naive in zip(batch[:4], naive_batch(store, plan, rows), strict=True):
            assert tensor.dtype == torch.int64 and tensor.tolist() == naive
        n_pieces = sum(len(plan.pieces_of_row(r)) for r in rows)
        assert (batch.n_targets, batch.n_documents) == ((batch.targets != IGNORE).sum(), n_pieces)


def test_a_padded_batch_has_the_rows_of_the_dataset():
    """Reference: X, Y, loss_mask of the public dataset by lists. Masked by length; the texts hold the pad id."""
    lengths = [2, 5, 10, 11, 30, 1, 7]
    tokens = np.random.default_rng(0).integers(0, 3, sum(lengths)).astype(np.uint16)
    store, L = make_store(lengths, tokens), 10
    plan = EpochPlan(store.offsets, L, 0, 0, pack=False)
    batch = Assembler(store)[plan.recipe(range(plan.n_rows))]
    assert plan.n_rows == 6
    for r in range(plan.n_rows):
        document = plan.pieces_of_row(r)[0][0]
        text = store.tokens[store.offsets[document] : store.offsets[document + 1]].tolist()[:L]
        padded = text + [0] * (L - len(text))
        kept = [k < len(text) - 1 for k in range(L - 1)]
        assert batch.input_ids[r].tolist() == padded[:-1]
        assert batch.targets[r].tolist() == [y if k else IGNORE for y, k in zip(padded[1:], kept, strict=True)]
        assert batch.document_ids[r].tolist() == [0 if k else -1 for k in kept]
        assert batch.position_ids[r].tolist() == [i if k else 0 for i, k in enumerate(kept)]


@pytest.mark.parametrize("world, workers, batch, pack", [(1, 0, 3, 1), (2, 0, 3, 0), (2, 2, 3, 1), (3, 1, 5, 1)])
def test_ledger_each_token_exactly_once_an_epoch(world, workers, batch, pack):
    """Every token of the store is different, so the sorted targets are the whole ledger."""
    lengths = random_lengths(90, top=30 if not pack else 100)
    store = make_store(lengths)
    expected = np.setdiff1d(store.tokens, store.tokens[store.offsets[:-1][lengths > 0]])  # all but first tokens
    orders = set()
    for epoch in range(3):
        plan = EpochPlan(store.offsets, 32, 11, epoch, pack=pack)
        schedule = UpdateSchedule(plan.n_rows, 2 * batch * world, batch, world)
        targets, totals = [], np.zeros((schedule.n_updates, 2), dtype=int)
        for rank in range(world):
            steps = 0
            for update, _, part in batches_of(Assembler(store), plan, schedule, rank, workers):
                steps += 1
                if part is not None:
                    kept = part.targets != IGNORE
                    assert torch.equal(part.input_ids[kept] + 1, part.targets[kept])
                    targets.append(part.targets[kept].numpy())
                    totals[update] += part.n_targets, part.n_documents
            assert steps == schedule.n_steps
        targets = np.concatenate(targets)
        orders.add(targets.tobytes())
        assert np.array_equal(np.sort(targets), expected)
        for update in range(schedule.n_updates):
            rows = schedule.rows(update)
            assert totals[update].tolist() == list(plan.totals(*rows))
    assert len(orders) == 3


@pytest.mark.slow
def test_a_crash_of_the_main_process_ends_the_workers():
    """The traceback keeps the iterator alive and workers ignore SIGTERM: without care the exit waits for them for ever."""
    code = """
from common.errors import LoaderError
from dataset.batches import Assembler, UpdateSchedule
from dataset.packing import EpochPlan
from tests.dataset.test_packing import make_store
from tests.helpers import batches_of
store = make_store([9] * 500)
plan = EpochPlan(store.offsets, 16, 0, 0)
loader = batches_of(Assembler(store), plan, UpdateSchedule(plan.n_rows, 2, 2), num_workers=2)
for i, _ in enumerate(loader):
    if i == 5:
        raise RuntimeError("crash")
"""
    run = run_program(code)
    assert run.returncode == 1 and run.stderr.rstrip().endswith("RuntimeError: crash")


def test_hash_split_keeps_the_same_documents_out_whatever_the_order():
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, 5000, dtype=np.uint64)
    hashes[100:200] = hashes[:100]  # copies of a text

    def held_out_of(hashes):
        one_source = np.zeros(len(hashes), int)
        is_held_out, divided = split_of(hashes, one_source + 2, one_source, 0.1, True)
        assert divided is None
        return set(hashes[is_held_out]), set(hashes[~is_held_out])

    held_out, trained = held_out_of(hashes)
    assert held_out == {hashed for hashed in hashes if int(hashed) / 2**64 < 0.1}
    assert not trained & held_out, "copies stay together"
    order = rng.permutation(5000)[:4000]
    assert held_out_of(hashes[order])[0] == held_out & set(hashes[order])


def test_joined_stores_read_like_one():
    """Reference: the arrays of one store. A batch picks tokens of several stores."""
    lengths = [random_lengths(n, seed=n) for n in (700, 1500, 400)]
    one = make_store(np.concatenate(lengths))
    ends = np.cumsum([of_store.sum() for of_store in lengths])
    joined = ConcatStore([make_store(*part) for part in zip(lengths, np.split(one.tokens, ends[:-1]), strict=True)])
    assert len(joined) == len(joined.offsets) - 1 == 2600
    for name in ("tokens", "offsets", "text_bytes"):
        array, copy = getattr(joined, name), getattr(one, name)
        for part in (slice(None), slice(690, 2250), slice(ends[0] - 3, ends[1] + 3)):
            assert np.array_equal(array[part], copy[part]) and array[part].dtype == copy.dtype


@pytest.mark.parametrize("method", sorted({"spawn", multiprocessing.get_start_method()}))
def test_a_worker_is_started_once_for_all_epochs(tmp_path, monkeypatch, method):
    """Spawn is what macOS and Windows have. Reference: the batches that are made in this process."""
    default = multiprocessing.context._default_context
    monkeypatch.setattr(default, "_actual_context", multiprocessing.get_context(method))
    started = set()
    path = write_texts(tmp_path / "a.jsonl", [f"the cat {i} sat on a mat" for i in range(40)])
    store = open_or_build(path, DocumentEncoder(small_tokenizer()), progress=False)
    made = []
    for num_workers in (0, 1):
        loader, batches = Loader(Assembler(store), num_workers=num_workers), []
        for epoch in range(3):
            plan = EpochPlan(store.offsets, 16, 0, epoch)
            for _, of_update in loader.updates(plan.recipe, UpdateSchedule(plan.n_rows, 4, 2)):
                batches += of_update
                started.update(child.pid for child in multiprocessing.active_children())
        loader.close()
        made.append(batches)
    assert len(started) == 1 and len(made[0]) > 3
    for of_worker, of_this_process in zip(*made, strict=True):
        torch.testing.assert_close(of_worker, of_this_process, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failure_is_known_before_its_update(ranks):
    """At once if it is in the first update, on several ranks in any of the next two: these ask each other before they begin one."""

    class Failing:
        def __getitem__(self, recipe):
            return (torch.zeros(1),) if recipe.start < 4 else recipe.nothing

    for start_row, is_known in ((4, True), (0, ranks > 1)):
        loader = Loader(Failing())
        updates = loader.updates(lambda rows: rows, UpdateSchedule(6, 2, 1, ranks, start_row))
        assert (loader.failure is not None) == is_known
        with pytest.raises(LoaderError):
            list(updates)
