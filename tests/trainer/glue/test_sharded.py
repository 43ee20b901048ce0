"""Fine-tuning of a model that ranks have together (`--shard`). References: one rank, whole models, and what transformers loads.

One start of two processes serves all runs: importing torch takes longer than all that they do.
"""

import gc
import json
import os
import signal
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from dataset.glue.glue_dataset import Batch, Totals
from dataset.glue.glue_tasks import TASKS
from model.electra.compiled_encoder import compiled_shape
from tests.dataset.glue.test_glue_dataset import WORDS
from tests.helpers import new_port, run_ranks
from tests.trainer.glue.glue_helpers import arguments, fine_tune, flags, make_place
from tests.updates import Recorder, relative_difference
from trainer import train_glue
from trainer.engine import Engine
from trainer.glue.job import GlueJob
from trainer.glue.loss import glue_loss
from trainer.glue.model import init_model
from trainer.machine.ranks import Ranks, init_distributed_mode
from trainer.sharding import Shards

CPU = torch.device("cpu")
# Micro-batches of 3 on 2 ranks: of 20 examples rank 1 has none in the last update, nor has it a third batch of the 9 to evaluate.
RUN = {
    "batch_size": 3,
    "dropout": 0.0,
    "do_predict": 1,
    "evaluate_during_training": 1,
    "save_steps": 3,
    "eval_all_checkpoints": 1,
    "log_interval": 1,
    "dist_timeout": 60,
}
N_ROWS = 6


def rows_of(first, end):
    """A Batch of made-up rows of several lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([8, 3, 6, 8, 5, 4])
    ids = torch.randint(5, len(WORDS), (N_ROWS, 8), generator=generator)
    mask = (torch.arange(8) < lengths[:, None]).long()
    labels = torch.arange(N_ROWS) % 2
    return Batch(*(tensor[first:end] for tensor in (ids * mask, mask, torch.zeros_like(ids), labels)))


def gradients(place, ranks=None):
    """Of three updates of six rows: in one micro-batch of each rank, in several, and with a rank without rows. Without ranks: one
    process computes all."""
    torch.manual_seed(0)
    model, _ = init_model(flags(place, dropout=0.0), TASKS["cola"], place / "tiny", len(WORDS))
    shards = Shards(model, ranks.world_size, ranks, CPU) if ranks else None
    ranks = ranks or Ranks()
    engine = Engine(
        model,
        Recorder(model.parameters()),
        partial(glue_loss, TASKS["cola"], model),
        device=CPU,
        dtype=torch.float32,
        ranks=ranks,
        grad_clip=0,
        n_sums=4,
        shards=shards,
    )
    totals = Totals(0, N_ROWS)
    # Of each update the micro-batches, of each the rows of both ranks; None: it has none.
    updates = [[((0, 3), (3, 6))], [((0, 2), (2, 4)), ((4, 5), (5, 6))], [((0, 6), None)]]
    for micro_batches in updates:
        for number, of_ranks in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            if shards is None:
                given = [rows for rows in of_ranks if rows]
            else:
                given = [of_ranks[ranks.rank]]
            for rows in given:
                batch = rows_of(*(rows or (0, 1)))
                engine.micro_batch(batch, totals, last=is_last, counts=rows is not None)
        engine.update(1.0)
    return engine.optimizer.updates


def stopped(place, out, at):
    """Ask for a stop in an update, the first one of this start being 1; names of the checkpoints then. The update after it ends
    the run, or an evaluation between them."""
    update, calls = Engine.update, []

    def stop(engine, *given):
        calls.append(None)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(engine, *given)

    new_port(f"stopped at {at}")
    with mock.patch.object(Engine, "update", stop):
        code = train_glue.main(arguments(place, out, shard="full", from_resume=1, **RUN))
    assert code == 128 + signal.SIGTERM
    return sorted(path.name for path in out.rglob("update_*"))


def two_ranks(place, folder):
    new_port("gradients")
    ranks, _ = init_distributed_mode("cpu", timeout_s=60)
    try:
        found = {"sharded": gradients(place, ranks), "alone": gradients(place)}
    finally:
        Shards.close()
        gc.collect()
        dist.destroy_process_group()
    new_port("full")
    with mock.patch.object(dist, "destroy_process_group", wraps=dist.destroy_process_group) as left:
        assert train_glue.main(arguments(place, folder / "full", shard="full", **RUN)) == 0
    # Of the model, and then all.
    found["groups left"] = [bool(call.args) for call in left.call_args_list]
    new_port("none")
    assert train_glue.main(arguments(place, folder / "none", shard="none", **RUN)) == 0
    # Within an epoch; and, gone on with, before an evaluation.
    found["stopped"] = [stopped(place, folder / "stopped", at) for at in (1, 2)]
    new_port("resumed")
    assert train_glue.main(arguments(place, folder / "stopped", shard="full", from_resume=1, **RUN)) == 0
    gc.collect()
    found["left"] = sum(type(thing).__name__ == "DeviceMesh" for thing in gc.get_objects())
    return found


def compiled_runs(place, folder):
    """Whether the layers of each run were compiled."""
    compiled = []
    make_fast = GlueJob._make_fast

    def seen(job, epochs):
        said = make_fast(job, epochs)
        compiled.append(bool(compiled_shape(job.model)))
        return said

    with mock.patch.object(GlueJob, "_make_fast", seen):
        for shard in ("full", "none"):
            new_port(f"compiled {shard}")
            out = folder / f"compiled_{shard}"
            assert train_glue.main(arguments(place, out, shard=shard, use_compile=1, **RUN)) == 0
    return compiled


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def both(place, folder):
    return run_ranks(two_ranks, place, folder)


def results(folder):
    return json.loads((folder / "eval_results.json").read_text())["cola"]


def losses(folder):
    lines = (folder / "cola" / "seed_42" / "cola_seed_42.metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def model_file(folder, name="model"):
    return folder / "cola" / "seed_42" / name / "model.safetensors"


@pytest.mark.slow
def test_gradients_equal_those_of_one_rank(both):
    """Two numbers have the same sum in either order."""
    for result in both:
        for sharded, alone in zip(result["sharded"], result["alone"], strict=True):
            assert relative_difference([sharded], [alone]) < 1e-6


@pytest.mark.slow
def test_a_run_is_that_of_whole_models(both, folder):
    """Losses, evaluations on the way and at the end, predictions, kept models."""
    assert len(losses(folder / "none")) == 8
    assert losses(folder / "full") == pytest.approx(losses(folder / "none"), rel=1e-5)
    sharded, whole = (results(folder / shard)["seeds"]["42"] for shard in ("full", "none"))
    assert sharded["results"] == whole["results"] and sharded["checkpoints"] == whole["checkpoints"]
    assert sharded["checkpoints"].keys() == {"3", "6"}
    predictions = [next((folder / shard).rglob("CoLA.tsv")).read_text() for shard in ("full", "none")]
    assert predictions[0] == predictions[1]


@pytest.mark.slow
def test_a_run_leaves_the_process_groups_that_its_model_had(both):
    """Another seed makes its own."""
    assert [result["groups left"] for result in both] == [[True, False]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model", "checkpoint-3"])
def test_models_are_saved_whole(both, folder, name):
    """As the run with whole models saves them, under the name of the class that transformers knows."""
    weights, expected = (load_file(model_file(folder / shard, name)) for shard in ("full", "none"))
    assert weights.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=1e-5)
    configs = [model_file(folder / shard, name).with_name("config.json").read_text() for shard in ("full", "none")]
    assert configs[0] == configs[1] and '"ElectraForSequenceClassification"' in configs[0]
    AutoModelForSequenceClassification.from_pretrained(model_file(folder / "full", name).parent)


@pytest.mark.slow
def test_a_stopped_run_goes_on_bitwise(both, folder):
    """Its checkpoints are folders of parts."""
    assert both[0]["stopped"] == [["update_00000002"], ["update_00000003", "update_00000004"]]
    whole, resumed = (load_file(model_file(folder / name)) for name in ("full", "stopped"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert results(folder / "stopped") == results(folder / "full")
    assert losses(folder / "stopped") == losses(folder / "full")


@pytest.mark.slow
def test_nothing_of_a_sharded_run_outlives_its_process_group(both):
    """Though the run is evaluated behind its end. Else the process may abort when the interpreter ends."""
    assert [result["left"] for result in both] == [0, 0]


def test_one_process_has_nothing_to_shard(place, tmp_path, capsys):
    fine_tune(place, tmp_path, shard="full", max_steps=1)
    assert "--shard full has no effect: there is one process" in capsys.readouterr().out


@pytest.mark.slow
def test_a_compiled_run_is_that_of_whole_models(place, folder):
    assert run_ranks(compiled_runs, place, folder, timeout_s=500) == [[True, True]] * 2
    assert len(losses(folder / "compiled_none")) == 8
    assert losses(folder / "compiled_full") == pytest.approx(losses(folder / "compiled_none"), rel=1e-5)
