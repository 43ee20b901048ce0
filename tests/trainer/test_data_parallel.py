"""Two ranks in Gloo processes, started once for all tests. References: one rank, and tests/updates.py (each document alone)."""

import os
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dataset.corpus import Corpus
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from tests.helpers import ROOT, new_port, process_group, records, run_ranks, tiny_model, train, write_corpus
from tests.trainer.test_engine import batch_of, make_engine, poisoned
from tests.trainer.test_verify import faulty_rank
from tests.updates import gradients, reference_gradients, relative_difference
from trainer import launch
from trainer.evaluation import evaluate
from trainer.loop import Trainer
from trainer.machine.command_line import StopSignals
from trainer.machine.ranks import Ranks, init_distributed_mode
from trainer.optim.muon import Muon, divided_orthogonalise, orthogonalise
from trainer.pretrain.loss import pretrain_loss
from trainer.reducer import DistributedReducer
from trainer.saving.saver import SaveTimer

KINDS = ("dense padded", "moe packed")
CUTS = [(1, 4), (2, 2), (4, 1)]  # of a rank: 8 rows in all. The tail leaves the second rank short or without rows
RUN = {"epochs": 2, "log_interval": 3, "val_fraction": 0.2, "eval_interval": 4, "sampled_softmax": 300}


def rank(folder):
    new_port("run")
    with mock.patch.object(launch, "init_distributed_mode", wraps=init_distributed_mode) as joined:
        result = {"run": whole_run(folder), "joined": joined.call_count, "left": not dist.is_initialized()}
    with process_group("engine") as ranks:
        result["gradients"] = {kind: [gradients(kind, *cut, ranks) for cut in CUTS] for kind in KINDS}
        result["evaluation"] = evaluation(folder, ranks)
        result["poison"] = poisoned_rank(ranks)
        result["muon"] = divided_muon(ranks)
    new_port("clock")
    result["saves"] = saves_by_the_clock(folder)
    result["faults"] = faulty_rank(Path(folder))
    return result


def whole_run(folder):
    """A run's parameters, and the metrics file, which only rank 0 writes."""
    run = train(data_path=f"{folder}/data.jsonl", out_dir=f"{folder}/two", batch_size=2, use_moe=1, **RUN)
    file = run.reporter.file and run.reporter.file.name
    return {"parameters": [p.detach() for p in run.engine.parameters], "file": file}


def evaluation(folder, ranks):
    """The validation figures of a model that is the same everywhere."""
    encoder = DocumentEncoder(load_tokenizer(ROOT / "model"))
    corpus = Corpus([f"{folder}/data.jsonl"], encoder, max_seq_len=6, seed=0, val_path=f"{folder}/valid.jsonl")
    engine = make_engine(tiny_model(vocab_size=encoder.vocab_size), ranks=ranks)
    batches = corpus.validation()
    assert len(batches) > 2
    values, stop_request = evaluate(engine, batches, StopSignals())
    engine.close()
    assert not stop_request
    return values


def poisoned_rank(ranks):
    """Rank 1's loss is not finite in the second update: the outcome and whether the parameters moved, update by update."""
    model, now = tiny_model(), {"now": ""}
    engine = make_engine(model, torch.float16, poisoned(model, now), ranks=ranks)
    seen = []
    for what in ("", "gradient", "loss", ""):
        now["now"] = what if ranks.rank == 1 else ""
        before = [p.detach().clone() for p in engine.parameters]
        engine.micro_batch(*batch_of(), last=True)
        engine.update(1e-3)
        moved = any(not torch.equal(p, q) for p, q in zip(engine.parameters, before, strict=True))
        seen.append([engine.poll()[-1].skipped, moved, engine.scaler.get_scale()])
    return seen


def divided_muon(ranks):
    """The parameters after three updates of Muon, alone and with two, three and one matrix of a shape divided among the ranks."""
    shapes = [(6, 10)] * 2 + [(10, 6)] * 3 + [(4, 4)]
    ended = []
    for how in (orthogonalise, partial(divided_orthogonalise, ranks, False)):
        generator = torch.Generator().manual_seed(0)
        matrices = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        muon = Muon(matrices, lr=0.1, orthogonalise=how)
        for _ in range(3):
            for matrix in matrices:
                matrix.grad = torch.randn(matrix.shape, generator=generator)
            muon.step()
        ended.append([matrix.detach() for matrix in matrices])
    return ended


def saves_by_the_clock(folder):
    """The updates that this rank saves, where the clock of rank 0 asks before updates 2 and 5, and that of rank 1 always."""
    saved, asked = [], []
    is_of_rank_1 = os.environ["RANK"] == "1"

    def take_request(clock):
        asked.append(None)
        return is_of_rank_1 or len(asked) in (2, 5)

    def save(trainer):
        saved.append(trainer.progress.update)

    with mock.patch.object(SaveTimer, "take_request", take_request), mock.patch.object(Trainer, "save", save):
        train(data_path=f"{folder}/data.jsonl", out_dir=f"{folder}/clock", save_interval=10**6)
    return saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    write_corpus(folder / "data.jsonl", 53)
    write_corpus(folder / "valid.jsonl", 20, seed=1)
    return folder


@pytest.fixture(scope="module")
def both(folder):
    return run_ranks(rank, str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_one_big_batch(both, kind):
    """1e-6 in fp32 against the formula; the last update of the epoch leaves rank 1 short (1x4, 2x2) or empty (4x1)."""
    reference = reference_gradients(kind)
    one_rank = gradients(kind, 8, 1)
    for result in both:
        for ours in result["gradients"][kind]:
            assert relative_difference(ours, reference) < 1e-6
            assert relative_difference(ours, one_rank) < 1e-6


def three_ranks():
    """The gradients of the first update of a new process group, and of two later ones."""
    with process_group("three") as ranks:
        model = tiny_model(use_moe=True)
        parameters = list(model.parameters())
        reducer = DistributedReducer(parameters, bucket_bytes=3000)
        batch, totals = batch_of(rows=[ranks.rank])
        found = []
        for _ in range(3):
            for parameter in parameters:
                parameter.grad.zero_()
            reducer.begin_micro_batch(last=True)
            loss, _ = pretrain_loss(model, batch, totals)
            loss.backward()
            reducer.finish(torch.zeros(1))
            found.append([parameter.grad.clone() for parameter in parameters])
    return found


@pytest.mark.slow
def test_sums_of_three_ranks_have_the_same_bits_at_a_start_and_later():
    """Else a resumed run would not be the one that was never stopped: how three numbers are rounded depends on the buckets."""
    for first, second, third in run_ranks(three_ranks, world_size=3):
        assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
        assert all(torch.equal(p, q) for p, q in zip(first, third, strict=True))


def test_muon_with_divided_matrices_equals_muon_alone_bitwise(both):
    for result in both:
        alone, divided = result["muon"]
        assert all(torch.equal(p, q) for p, q in zip(alone, divided, strict=True))


def test_one_rank_with_the_same_global_batch_ends_alike(both, folder):
    """Reference: one rank with twice the micro-batch. AdamW enlarges rounding, so the parameters agree less closely."""
    run = train(data_path=folder / "data.jsonl", out_dir=folder / "one", batch_size=4, use_moe=1, **RUN)
    for ours, theirs in zip(run.engine.parameters, both[0]["run"]["parameters"], strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-3, atol=2e-5)
    # The other rank has the same to the last bit, writes nothing, and has left its group of processes.
    for ours, theirs in zip(*(result["run"]["parameters"] for result in both), strict=True):
        assert torch.equal(ours, theirs)
    assert both[1]["run"]["file"] is None
    assert all(result["left"] and result["joined"] == 1 for result in both)
    # What is logged is the mean over all ranks.
    lines = records(both[0]["run"]["file"])
    for name in ("loss", "aux_loss", "expert_load_max"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in records(run)], rel=1e-3)


def test_the_clock_of_rank_0_alone_says_when_all_ranks_save(both):
    ours, theirs = (result["saves"] for result in both)
    assert ours == theirs and ours[:2] == [2, 5] and len(ours) == 3  # and at the end


def test_a_rank_with_flipped_bits_is_named_and_ends_as_the_undisturbed_one(both):
    """--verify_every; its wrong gradients give both ranks wrong weights."""
    for result in both:
        assert result["faults"]["same"]
    ours, theirs = (result["faults"] for result in both)
    assert ours["named"] == ["1"] and "a row with a fault on rank 1" in ours["error"] and theirs["error"] == ""


def test_evaluation_is_identical_on_one_and_two_ranks(both, folder):
    assert both[0]["evaluation"] == both[1]["evaluation"] == evaluation(folder, Ranks())


def test_what_one_rank_breaks_no_rank_applies(both):
    """Updates: good, NaN gradients on rank 1 (fp16: the scale is halved), infinite loss on rank 1, good."""
    assert both[0]["poison"] == both[1]["poison"]
    assert [skipped for skipped, _, _ in both[0]["poison"]] == [0, 1, 2, 2]
    assert [moved for _, moved, _ in both[0]["poison"]] == [True, False, False, True]
    assert [scale for _, _, scale in both[0]["poison"]] == [2048, 1024, 1024, 1024]
