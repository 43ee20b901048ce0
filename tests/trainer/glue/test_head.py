"""trainer/glue/head.py: the original head, and the form in which transformers loads it. Reference: its formula."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.helpers import trainers_that_fit
from tests.trainer.glue.glue_helpers import arguments, complaint, fine_tune, make_place
from trainer import train_glue
from trainer.glue.head import PlainHead, differences, for_transformers, from_transformers


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("place"))


def test_the_head_is_dropout_and_a_matrix_on_the_first_position():
    torch.manual_seed(0)
    head = PlainHead(16, 3, 0.25)
    features = torch.randn(5, 7, 16)
    by_hand = features[:, 0] @ head.out_proj.weight.T + head.out_proj.bias
    assert torch.allclose(head.eval()(features), by_hand, atol=1e-6)
    # One output that adds up 10,000 ones: a quarter is dropped, and the others are 1 / (1 - 0.25).
    wide = PlainHead(10_000, 1, 0.25).train()
    torch.nn.init.ones_(wide.out_proj.weight)
    kept = wide(torch.ones(1, 1, 10_000)).item() * 0.75 / 10_000
    assert kept == pytest.approx(0.75, abs=0.02)


def test_its_weights_begin_as_those_of_tensorflow():
    """Reference: Glorot's uniform distribution, whose bound is sqrt(6 / (in + out)), and biases of 0."""
    torch.manual_seed(0)
    head = PlainHead(5000, 3, 0.1)
    bound = math.sqrt(6 / 5003)
    assert head.out_proj.bias.abs().max() == 0
    assert 0.99 * bound < head.out_proj.weight.abs().max() <= bound
    assert head.out_proj.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_a_hugging_face_head_gives_the_same_outputs_and_the_weights_come_back_bitwise(outputs):
    """gelu(x) - gelu(-x) = x. Reference: the plain head."""
    torch.manual_seed(0)
    head = PlainHead(16, outputs, 0.1).eval()
    torch.nn.init.normal_(head.out_proj.weight, std=2)
    torch.nn.init.normal_(head.out_proj.bias)
    weights = for_transformers(head.state_dict())
    x = torch.randn(50, 1, 16)
    hidden = torch.nn.functional.gelu(x[:, 0] @ weights["dense.weight"].T + weights["dense.bias"])
    assert torch.allclose(hidden @ weights["out_proj.weight"].T + weights["out_proj.bias"], head(x), atol=1e-5)
    back = from_transformers(weights)
    assert back is not None and all(torch.equal(back[name], value) for name, value in head.state_dict().items())
    other = {**weights, "dense.bias": torch.full((16,), 1e-6)}
    assert from_transformers(other) is None
    assert differences(2, 5).tolist() == [[1, -1, 0, 0, 0], [0, 0, 1, -1, 0]]


def test_what_is_saved_gives_the_outputs_of_the_run_in_transformers(place, tmp_path):
    """Reference: the trained network in memory; then the saved one, evaluated by the command."""
    with trainers_that_fit() as trainers:
        assert train_glue.main(arguments(place, tmp_path / "a", head="plain", do_predict=1)) == 0
    (run,) = trainers
    folder = tmp_path / "a" / "cola" / "seed_42"
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    assert set(load_file(folder / "model" / "model.safetensors")) == set(model.state_dict())
    batch = run.job.assembler[run.job.plan(0).recipe(range(6))]
    inputs = {"input_ids": batch.ids, "attention_mask": batch.mask, "token_type_ids": batch.types}
    assert torch.allclose(model(**inputs).logits, run.job.model.eval()(**inputs).logits, atol=1e-5)
    results = json.loads((tmp_path / "a" / "eval_results.json").read_text())
    for head in ("plain", "huggingface"):
        again = fine_tune(
            place, tmp_path / head, head=head, do_train=0, model_path=folder / "model", epochs=None, learning_rate=None
        )
        assert again["cola"]["metrics"]["matthews"]["mean"] == results["cola"]["metrics"]["matthews"]["mean"]


def test_models_that_were_saved_on_the_way_are_evaluated(place, tmp_path):
    """Reference: the evaluation while training, after the same update."""
    options = {"head": "plain", "save_steps": 5, "eval_all_checkpoints": 1, "evaluate_during_training": 1}
    fine_tune(place, tmp_path, **options, log_interval=1)
    folder = tmp_path / "cola" / "seed_42"
    checkpoints = json.loads((folder / "eval_results.json").read_text())["checkpoints"]
    lines = [json.loads(line) for line in (folder / "cola_seed_42.metrics.jsonl").read_text().splitlines()]
    while_training = {str(line["update"]): line["matthews"] for line in lines if "matthews" in line}
    assert set(checkpoints) == {"5", "10"} == set(while_training)
    for update, values in checkpoints.items():
        assert values["matthews"] == pytest.approx(while_training[update])


def test_a_head_that_was_not_plain_is_not_taken_for_one(place, tmp_path, capsys):
    fine_tune(place, tmp_path / "a", max_steps=2)
    trained = tmp_path / "a" / "cola" / "seed_42" / "model"
    line = complaint(
        capsys, place, tmp_path / "b", head="plain", do_train=0, model_path=trained, epochs=None, learning_rate=None
    )
    assert "was not saved with --head plain" in line


def test_scores_are_divided_to_train_and_multiplied_to_predict(place, tmp_path):
    """Reference: five times the saved model's outputs, which its config tells of; no flag says so when it is evaluated."""
    with trainers_that_fit() as trainers:
        fine_tune(place, tmp_path / "a", task="stsb", score_divisor=5, do_predict=1)
    (run,) = trainers
    folder = tmp_path / "a" / "stsb" / "seed_42"
    assert json.loads((folder / "model" / "config.json").read_text())["score_divisor"] == 5.0
    first = (folder / "predictions" / "STS-B.tsv").read_text()
    changes = {"do_train": 0, "do_predict": 1, "epochs": None, "learning_rate": None, "model_path": folder / "model"}
    fine_tune(place, tmp_path / "b", task="stsb", **changes)
    assert (tmp_path / "b" / "stsb" / "seed_42" / "predictions" / "STS-B.tsv").read_text() == first
    test_file = run.job.data.test["STS-B"]
    batch = test_file[torch.arange(5).numpy()]
    model = run.job.model.eval()
    outputs = model(batch.ids, attention_mask=batch.mask, token_type_ids=batch.types).logits[:, 0]
    wanted = [f"{score:.3f}" for score in (5 * outputs).clip(0, 5).tolist()]
    assert [line.split("\t")[1] for line in first.splitlines()[1:]] == wanted
    # A task with classes knows nothing of it.
    fine_tune(place, tmp_path / "c", score_divisor=5, model_path=folder / "model", max_steps=1)
    assert "score_divisor" not in json.loads((tmp_path / "c/cola/seed_42/model/config.json").read_text())
