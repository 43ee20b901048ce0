"""Fine-tuning of a model that ranks have together (`--shard`). References: one rank, whole models, and what transformers loads."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests import helpers
from tests.encoders.glue.glue_helpers import arguments, make_place
from tests.helpers import new_port, run_ranks
from trainer import train_glue

pytestmark = pytest.mark.slow
# Micro-batches of 3 on 2 ranks: of 20 examples rank 1 has none in the last update, nor has it a third batch of the 9 to evaluate.
RUN = {
    "batch_size": 3, "dropout": 0.0, "do_predict": 1, "evaluate_during_training": 1, "save_steps": 3,
    "eval_all_checkpoints": 1, "log_interval": 1, "dist_timeout": 60,
}  # fmt: skip


def two_ranks(place, folder):
    for shard in ("full", "none"):
        new_port(shard)
        assert train_glue.main(arguments(place, folder / shard, shard=shard, **RUN)) == 0


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="module")
def folder(place, tmp_path_factory):
    """Where two ranks have fine-tuned, sharded and with whole models."""
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(two_ranks, place, folder)
    return folder


def results(folder):
    return json.loads((folder / "eval_results.json").read_text())["cola"]


def model_file(folder, name="model"):
    return folder / "cola" / "seed_42" / name / "model.safetensors"


def test_a_run_is_that_of_whole_models(folder):
    full, none = (helpers.losses(*(folder / shard).rglob("*.metrics.jsonl")) for shard in ("full", "none"))
    assert len(none) == 8 and full == pytest.approx(none, rel=1e-5)
    sharded, whole = (results(folder / shard)["seeds"]["42"] for shard in ("full", "none"))
    assert sharded["results"] == whole["results"] and sharded["checkpoints"] == whole["checkpoints"]
    assert sharded["checkpoints"].keys() == {"3", "6"}
    assert len({next((folder / shard).rglob("CoLA.tsv")).read_text() for shard in ("full", "none")}) == 1
    # As the run with whole models saves them, under the name of the class that transformers knows
    for name in ("model", "checkpoint-3"):
        weights, expected = (load_file(model_file(folder / shard, name)) for shard in ("full", "none"))
        assert weights.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=1e-5)
        AutoModelForSequenceClassification.from_pretrained(model_file(folder / "full", name).parent)
    configs = [model_file(folder / shard).with_name("config.json").read_text() for shard in ("full", "none")]
    assert configs[0] == configs[1] and '"ElectraForSequenceClassification"' in configs[0]


def test_two_ranks_train_as_one_with_their_batches_together(place, folder):
    assert train_glue.main(arguments(place, folder / "one", **{**RUN, "batch_size": 6})) == 0
    assert results(folder / "one")["metrics"] == results(folder / "none")["metrics"]
    one, two = (load_file(model_file(folder / name)) for name in ("one", "none"))
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)
