"""Fine-tuning. References: formulas written out, the same run without a stop, and what the leaderboard asks for."""

import json
import math
import os
import re
import signal
import statistics
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from dataset.glue.glue_dataset import Batch
from dataset.glue.glue_tasks import TASKS
from tests.dataset.glue.test_glue_dataset import WORDS
from tests.helpers import new_port, run_ranks
from tests.trainer.glue.glue_helpers import arguments, complaint, fine_tune, flags, make_place
from trainer import train_glue
from trainer.engine import Engine
from trainer.glue import job
from trainer.glue.layer_rates import depths, layer_groups, rates
from trainer.glue.loss import forward
from trainer.glue.measures import metrics_of_predicted
from trainer.glue.model import init_model
from trainer.glue.results import summary


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("glue"))


# ------------------------------------------------------------------------------------------ metrics, groups


def test_metrics_are_their_formulas():
    """Reference: counts of a confusion table, and correlations by numpy; precision and recall differ here."""
    logits = torch.tensor([[0.0, 1], [0, 1], [1, 0], [0, 1], [1, 0], [0, 1], [1, 0]])
    labels = np.array([1, 0, 1, 0, 0, 1, 0])
    tp, fp, fn, tn = 2, 2, 1, 2
    assert metrics_of_predicted(TASKS["sst2"], logits, labels) == {"accuracy": (tp + tn) / 7}
    assert metrics_of_predicted(TASKS["qqp"], logits, labels) == pytest.approx(
        {"accuracy": 4 / 7, "f1": 2 * tp / (2 * tp + fp + fn)}
    )
    matthews = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert metrics_of_predicted(TASKS["cola"], logits, labels) == pytest.approx({"matthews": matthews})

    generator = np.random.default_rng(0)
    x, y = generator.normal(size=50).astype(np.float32), generator.normal(size=50).astype(np.float32)
    ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
    wanted = {"pearson": np.corrcoef(x, y)[0, 1], "spearman": np.corrcoef(*ranks)[0, 1]}
    assert metrics_of_predicted(TASKS["stsb"], torch.from_numpy(x)[:, None], y) == pytest.approx(wanted, abs=1e-6)
    constant = metrics_of_predicted(TASKS["stsb"], torch.ones(50, 1), y)
    assert math.isnan(constant["pearson"]) and math.isnan(constant["spearman"])


def test_layers_have_their_exponents_and_every_parameter_one_group(place, capsys):
    args = flags(place, learning_rate=1e-4)
    model, new = init_model(args, TASKS["rte"], place / "tiny", len(WORDS))
    assert new == {f"classifier.{part}.{kind}" for part in ("dense", "out_proj") for kind in ("weight", "bias")}
    groups = layer_groups(model, depths(model, args.max_seq_len), 0.01, 0.5)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters()) and len(set(grouped)) == len(grouped)
    found = {id(p): group for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        group = found[id(parameter)]
        layer = re.search(r"layer\.(\d)", name)
        exponent = {"0": 2, "1": 1}[layer[1]] if layer else 3 if "embeddings" in name else 0
        assert group["exponent"] == exponent and group["lr_scale"] == 0.5**exponent, name
        assert group["weight_decay"] == (0.0 if "LayerNorm" in name or name.endswith("bias") else 0.01), name
    args.layer_decay = 0.5
    assert "head 0 1.00e-04, layer 1 1 5.00e-05, layer 0 2 2.50e-05, embeddings 3 1.25e-05" in rates(groups, args)


def test_padding_changes_no_logit(place):
    """Reference: Hugging Face's own forward of each row alone, without padding and mask."""
    args = flags(place)
    model = init_model(args, TASKS["rte"], place / "tiny", len(WORDS))[0].eval()
    lengths, T = (3, 8, 5), 8
    ids = torch.randint(5, len(WORDS), (3, T))
    mask = (torch.arange(T) < torch.tensor(lengths)[:, None]).long()
    types = torch.tensor([[0] * 2 + [1] * 6] * 3)
    found = forward(model, Batch(ids, mask, types, None))
    for row, n in enumerate(lengths):
        alone = model(input_ids=ids[row : row + 1, :n], token_type_ids=types[row : row + 1, :n]).logits[0]
        assert torch.allclose(found[row], alone, atol=1e-5)


def test_statistics_over_seeds():
    results = [{"f1": 0.1, "accuracy": 1.0}, {"f1": 0.2, "accuracy": 1.0}, {"f1": 0.6, "accuracy": None}]
    found = summary(results)
    assert found["f1"] == pytest.approx({"mean": 0.3, "median": 0.2, "deviation": statistics.stdev([0.1, 0.2, 0.6])})
    assert math.isnan(found["accuracy"]["mean"])
    assert summary(results[:1])["f1"] == {"mean": 0.1, "median": 0.1, "deviation": None}


# --------------------------------------------------------------------------------------------------- runs


def test_all_tasks_with_seeds_and_predictions(place, tmp_path, capsys):
    found = fine_tune(place, tmp_path, task="all", num_seeds=2, epochs=1, do_predict=1)
    printed = capsys.readouterr().out
    assert "left out: SST-2, MRPC, QQP, QNLI, RTE, WNLI" in printed
    lines = [line for line in printed.splitlines() if line.startswith("Epoch:[")]
    assert lines and all(re.search(r" updates/s:\d\S* tokens/s:\d", line) for line in lines)
    assert found.keys() == {"cola", "stsb", "mnli"}
    assert found["mnli"]["metrics"].keys() == {"accuracy", "accuracy-mm"}  # both splits
    for name, of_task in found.items():
        for metric, values in of_task["metrics"].items():
            of_seeds = [of_task["seeds"][seed]["results"][metric] for seed in ("42", "43")]
            if None not in of_seeds:
                assert values["mean"] == pytest.approx(sum(of_seeds) / 2)
                assert values["deviation"] == pytest.approx(abs(of_seeds[0] - of_seeds[1]) / math.sqrt(2))
                assert f"| {name} | {metric} | {100 * values['mean']:.2f} |" in printed

    def predictions(name):
        lines = (
            (tmp_path / name.split("/")[0] / "seed_43" / "predictions" / name.split("/")[1]).read_text().splitlines()
        )
        assert lines[0] == "index\tprediction"
        return [line.split("\t")[1] for line in lines[1:] if line.split("\t")[0].isdecimal()]

    words = {"contradiction", "entailment", "neutral"}
    assert len(predictions("mnli/MNLI-m.tsv")) == 4 and set(predictions("mnli/MNLI-m.tsv")) <= words
    assert len(predictions("mnli/MNLI-mm.tsv")) == 3
    assert len(predictions("cola/CoLA.tsv")) == 5 and set(predictions("cola/CoLA.tsv")) <= {"0", "1"}
    assert all(0 <= float(value) <= 5 for value in predictions("stsb/STS-B.tsv"))

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "mnli" / "seed_42" / "model")
    assert model.config.id2label == {0: "contradiction", 1: "entailment", 2: "neutral"}


def test_it_learns_and_a_trained_model_is_evaluated_as_it_is(place, tmp_path):
    """The label is in the text, so that a classifier can learn it; evaluated again it gives the same figures."""
    first = fine_tune(place, tmp_path / "a", epochs=40, learning_rate=1e-2)["cola"]["metrics"]
    assert first["matthews"]["mean"] > 0.9
    again = fine_tune(place, tmp_path / "b", do_train=0, model_path=tmp_path / "a" / "cola" / "seed_42" / "model")
    assert again["cola"]["metrics"] == first and not (tmp_path / "b" / "cola" / "seed_42" / "model").exists()


def test_checkpoints_are_kept_and_evaluated_and_the_rate_is_the_schedule(place, tmp_path):
    """References: the evaluations of the training itself; rise to the rate in int(share * updates), linear fall to 0."""
    options = {"max_steps": 7, "save_steps": 3, "eval_all_checkpoints": 1, "evaluate_during_training": 1}
    found = fine_tune(place, tmp_path, task="stsb", eval_interval=3, warmup_share=0.3, **options)["stsb"]["seeds"]["42"]
    folder = tmp_path / "stsb" / "seed_42"
    assert found["updates"] == 7 and found["checkpoints"].keys() == {"3", "6"}
    lines = list(map(json.loads, (folder / "stsb_seed_42.metrics.jsonl").read_text().splitlines()))
    evaluated = {line["update"]: line["pearson"] for line in lines if "val_loss" in line}
    assert evaluated.keys() == {3, 6, 7} and len(set(evaluated.values())) == 3
    assert {int(u): values["pearson"] for u, values in found["checkpoints"].items()} == {
        u: evaluated[u] for u in (3, 6)
    }
    for line in lines:
        if "lr" in line:
            t = line["update"] - 1
            assert line["lr"] == pytest.approx(3e-3 * (t / 2 if t < 2 else (7 - t) / 5))
    assert not list(tmp_path.rglob("*.tmp"))


class Killed(Exception):
    pass


@pytest.mark.parametrize(("how", "at"), [("signal", 15), ("kill", 15), ("signal", 20)])
def test_a_stopped_command_goes_on_bitwise(place, tmp_path, how, at, capsys):
    """Stopped in the second seed, in the middle (update 15 of all) or before its evaluation (20), with --from_resume 1 it
    ends as the command that was left alone. 20 examples make 5 updates, twice."""
    options = {"num_seeds": 2, "save_interval": 3, "do_predict": 1}
    whole = fine_tune(place, tmp_path / "whole", **options)
    update, calls = Engine.update, []

    def stop(engine, *arguments):
        calls.append(None)
        if len(calls) == at:
            if how == "kill":
                raise Killed
            os.kill(os.getpid(), signal.SIGTERM)
        return update(engine, *arguments)

    with mock.patch.object(Engine, "update", stop):
        if how == "kill":
            with pytest.raises(Killed):
                fine_tune(place, tmp_path / "part", **options)
        else:
            assert train_glue.main(arguments(place, tmp_path / "part", **options)) == 128 + signal.SIGTERM
    capsys.readouterr()
    part = fine_tune(place, tmp_path / "part", from_resume=1, **options)
    printed = capsys.readouterr().out
    assert "cola, seed 42: done before" in printed and "resumed from" in printed
    assert part == whole
    for seed in (42, 43):
        a, b = (
            load_file(tmp_path / run / "cola" / f"seed_{seed}" / "model" / "model.safetensors")
            for run in ("whole", "part")
        )
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_model_of_another_task_gets_a_new_head(place, tmp_path, capsys):
    fine_tune(place, tmp_path, task="mnli", epochs=1)
    model = tmp_path / "mnli" / "seed_42" / "model"
    fine_tune(place, tmp_path, epochs=1, model_path=model)
    head = load_file(tmp_path / "cola" / "seed_42" / "model" / "model.safetensors")["classifier.out_proj.weight"]
    assert head.shape == (2, 16)
    error = complaint(capsys, place, tmp_path / "other", do_train=0, model_path=model)
    assert "has no classification head for CoLA" in error


def test_from_scratch_draws_all_weights_by_the_seed(place, tmp_path):
    """Reference: the embeddings at a rate that changes next to nothing; no two seeds and no folder give them."""
    fine_tune(place, tmp_path, from_scratch=1, max_steps=1, num_seeds=2, learning_rate=1e-12)
    files = [tmp_path / "cola" / f"seed_{seed}" / "model" / "model.safetensors" for seed in (42, 43)]
    name = "electra.embeddings.word_embeddings.weight"
    drawn = [load_file(file)[name] for file in (*files, place / "tiny" / "model.safetensors")]
    assert not any(torch.allclose(drawn[i], drawn[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_from_scratch_begins_the_positions_as_pretraining_did(place, tmp_path):
    """Reference: the same sinusoids whatever the seed, as the config's `position_init` wants them."""
    model = AutoModelForSequenceClassification.from_pretrained(place / "tiny")
    model.config.position_init = "sinusoidal"
    model.save_pretrained(tmp_path)
    args = flags(place, model_path=tmp_path, from_scratch=True)
    first, second = (init_model(args, TASKS["rte"], tmp_path, len(WORDS))[0].electra.embeddings for _ in range(2))
    assert torch.equal(first.position_embeddings.weight, second.position_embeddings.weight)
    assert first.position_embeddings.weight[0, :4].tolist() == pytest.approx([0, 0.2 * 2**0.5, 0, 0.2 * 2**0.5])
    assert not torch.allclose(first.word_embeddings.weight, second.word_embeddings.weight)


def test_the_rule_for_compiling_is_told_the_width(place, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(job, "compile_blocks", lambda *_, width: seen.append(width))
    fine_tune(place, tmp_path, max_steps=1)
    assert seen == [16]


def test_results_are_not_overwritten_unasked(place, tmp_path, capsys):
    fine_tune(place, tmp_path, epochs=1)
    old = (tmp_path / "cola" / "seed_42" / "eval_results.json").read_text()
    assert json.loads(old)["seed"] == 42
    assert "holds results already" in complaint(capsys, place, tmp_path, epochs=1)
    assert (tmp_path / "cola" / "seed_42" / "eval_results.json").read_text() == old
    # The folder of a single seed has a file of the same name as the folder of all tasks.
    inside = tmp_path / "cola" / "seed_42"
    assert "holds the results of a single seed" in complaint(capsys, place, inside, task="stsb", epochs=1)
    assert (inside / "eval_results.json").read_text() == old
    found = fine_tune(place, tmp_path, epochs=1, overwrite_output_dir=1, seed=7)
    assert not (tmp_path / "cola" / "seed_42").exists() and found["cola"]["seeds"].keys() == {"7"}


def test_what_a_user_can_mend_is_one_line(place, tmp_path, capsys):
    def line(**changes):
        return complaint(capsys, place, tmp_path / "out", **changes)

    assert "--data_dir" in line(data_dir=tmp_path / "nowhere") and "no folder of a task" in line(
        task="all", data_dir=tmp_path
    )
    assert "--model_path" in line(model_path=tmp_path / "nowhere")
    assert "has no classification head for CoLA" in line(do_train=0)
    assert "--from_scratch 1 draws random weights" in line(do_train=0, from_scratch=1)
    assert "--shard 2: 1 rank cannot be divided" in line(shard=2)
    assert "max_position_embeddings is 32" in line(max_seq_len=64)
    assert "--eval_all_checkpoints 1 needs --save_steps" in line(eval_all_checkpoints=1)
    assert "--eval_all_checkpoints 1 needs a training" in line(eval_all_checkpoints=1, save_steps=1, do_train=0)
    assert "--max_seq_len: 4 must be at least 5" in line(max_seq_len=4)
    assert "leave nothing to do" in line(do_train=0, do_eval=0)
    (tmp_path / "CoLA").mkdir()
    (tmp_path / "CoLA" / "train.tsv").write_text("gj04\t2\t\tThey.\n")
    assert "train.tsv:1: label '2' is not one of 0, 1" in line(data_dir=tmp_path)
    (tmp_path / "CoLA" / "train.tsv").write_text("gj04\t1\t\tThey.\n")
    assert "dev.tsv: cannot be read" in line(data_dir=tmp_path / "CoLA")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "empty" in line(model_path=tmp_path / "empty")
    assert not (tmp_path / "out" / "cola" / "seed_42").exists()


def one_of_two(place, out):
    new_port("glue")
    torch.set_num_threads(1)
    assert train_glue.main(arguments(place, out, epochs=1, batch_size=2)) == 0
    return 0


@pytest.mark.slow
def test_two_ranks_train_as_one_with_their_batches_together(place, tmp_path):
    """Without dropout the weights agree up to the order of sums; only the first rank writes."""
    config = place / "tiny" / "config.json"
    before = config.read_text()
    fields = {**json.loads(before), "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config.write_text(json.dumps({**fields, "summary_last_dropout": 0.0, "classifier_dropout": 0.0}))
    try:
        run_ranks(one_of_two, place, tmp_path / "two")
        one = fine_tune(place, tmp_path / "one", epochs=1, batch_size=4)
    finally:
        config.write_text(before)
    assert json.loads((tmp_path / "two" / "eval_results.json").read_text())["cola"]["metrics"] == one["cola"]["metrics"]
    a, b = (load_file(tmp_path / run / "cola" / "seed_42" / "model" / "model.safetensors") for run in ("one", "two"))
    assert all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)
