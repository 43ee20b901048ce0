"""Fine-tuning. References: formulas written out, the same run without a stop, and what the leaderboard asks for."""

import itertools
import json
import math
import os
import random
import re
import signal
import sys
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

from common.files import remove
from encoders.glue import command, job
from encoders.glue.job import layer_groups, metrics_of
from encoders.glue.settings import GlueSettings
from encoders.glue.tasks import METRICS, TASKS
from tests.encoders.glue.glue_helpers import arguments, complaint, fine_tune, make_place
from tests.helpers import ROOT, before_calls, before_update, change_json, records, write_records
from tests.trainer.machine.simulated_cuda import simulated_cuda
from tests.trainer.reporting.test_html_report import add
from trainer import train_glue
from trainer.engine import Engine
from trainer.job import Identity
from trainer.reporting.records import METRICS as METRICS_CHART
from trainer.reporting.records import RunRecords


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("glue"))


def test_metrics_are_their_formulas():
    """Reference: counts of a confusion table, and correlations by numpy; precision and recall differ here."""
    logits = torch.tensor([[0.0, 1], [0, 1], [1, 0], [0, 1], [1, 0], [0, 1], [1, 0]])
    labels = np.array([1, 0, 1, 0, 0, 1, 0])
    tp, fp, fn, tn = 2, 2, 1, 2
    assert metrics_of(TASKS["sst2"], logits, labels) == {"accuracy": (tp + tn) / 7}
    wanted = {"accuracy": 4 / 7, "f1": 2 * tp / (2 * tp + fp + fn)}
    assert metrics_of(TASKS["qqp"], logits, labels) == pytest.approx(wanted)
    matthews = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert metrics_of(TASKS["cola"], logits, labels) == pytest.approx({"matthews": matthews})

    x, y = np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32)
    ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
    wanted = {"pearson": np.corrcoef(x, y)[0, 1], "spearman": np.corrcoef(*ranks)[0, 1]}
    assert metrics_of(TASKS["stsb"], torch.from_numpy(x)[:, None], y) == pytest.approx(wanted, abs=1e-6)
    assert all(map(math.isnan, metrics_of(TASKS["stsb"], torch.ones(50, 1), y).values()))


def test_all_tasks_with_seeds_and_predictions(place, tmp_path, capsys):
    diagnostic = place / "glue" / "diagnostic"
    diagnostic.mkdir()
    (diagnostic / "diagnostic.tsv").write_text("index\tsentence1\tsentence2\n0\ta b\tc\n1\th\td\n")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "eval_results.json").write_text("another program's")
    found = fine_tune(place, tmp_path, task="all", num_seeds=2, epochs=1, do_predict=1, text="b")
    printed = capsys.readouterr().out
    assert "left out: SST-2, MRPC, QQP, QNLI, RTE, WNLI" in printed and "--text ['b'] has no effect" in printed
    lines = [line for line in printed.splitlines() if line.startswith("Epoch:[")]
    assert lines and all(re.search(r" updates/s:\d\S* tokens/s:\d", line) for line in lines)
    assert found.keys() == {"cola", "stsb", "mnli"}
    assert found["mnli"]["metrics"].keys() == {"accuracy", "accuracy-mm"}  # both splits
    for name, metric in (("cola", "matthews"), ("mnli", "accuracy-mm")):
        one, two = (found[name]["seeds"][seed]["results"][metric] for seed in ("42", "43"))
        values = found[name]["metrics"][metric]
        assert values["mean"] == values["median"] == pytest.approx((one + two) / 2)
        assert values["deviation"] == pytest.approx(abs(one - two) / math.sqrt(2))
        assert f"| {name} | {metric} | {100 * values['mean']:.2f} |" in printed

    words = {"contradiction", "entailment", "neutral"}
    wanted = {"mnli/MNLI-m": (4, words), "mnli/MNLI-mm": (3, words), "mnli/AX": (2, words)}
    for name, (n, known) in {**wanted, "cola/CoLA": (5, {"0", "1"}), "stsb/STS-B": (5, None)}.items():
        task, file = name.split("/")
        head, *lines = (tmp_path / task / "seed_43" / "predictions" / f"{file}.tsv").read_text().splitlines()
        numbers, values = zip(*(line.split("\t") for line in lines), strict=True)
        assert head == "index\tprediction" and list(numbers) == [str(i) for i in range(n)]
        assert set(values) <= known if known else all(0 <= float(value) <= 5 for value in values)

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "mnli" / "seed_42" / "model")
    assert model.config.id2label == {0: "contradiction", 1: "entailment", 2: "neutral"}

    # The settings that a seed of a task leaves start it again, and it alone.
    kept = tmp_path / "cola" / "seed_43" / "cola_seed_43.settings.yaml"
    assert train_glue.main(["--config", str(kept), "--out_dir", str(tmp_path / "again")]) == 0
    again = json.loads((tmp_path / "again" / "eval_results.json").read_text())
    assert again.keys() == {"cola"} and again["cola"]["seeds"] == {"43": found["cola"]["seeds"]["43"]}


def test_it_learns_and_a_trained_model_is_evaluated_as_it_is(place, tmp_path):
    """The label is in the text, so that a classifier can learn it; evaluated again it gives the same figures."""
    first = fine_tune(place, tmp_path / "a", epochs=20, learning_rate=2e-2)["cola"]["metrics"]
    assert first["matthews"]["mean"] > 0.9
    again = fine_tune(place, tmp_path / "b", do_train=0, model_path=tmp_path / "a" / "cola" / "seed_42" / "model")
    assert again["cola"]["metrics"] == first and not (tmp_path / "b" / "cola" / "seed_42" / "model").exists()


def test_it_starts_and_ends_on_a_machine_with_one_gpu(place, tmp_path):
    with simulated_cuda() as cuda:
        fine_tune(place, tmp_path, device="cuda", epochs=1)
    assert cuda.chosen[0] == 0 and cuda.mode.asked > 0


def test_a_run_has_the_epochs_of_its_task_or_a_part_of_one(place, tmp_path):
    """20 examples make 5 updates. 10 epochs of STS-B, 3 of other tasks."""
    for task, epochs, updates in (("cola", 0.5, 3), ("cola", None, 15), ("stsb", None, 50)):
        with mock.patch("encoders.glue.job.layer_groups", wraps=layer_groups) as groups:
            found = fine_tune(place, tmp_path / f"{task} {updates}", task=task, epochs=epochs, layer_decay=0.7)
        assert found[task]["seeds"]["42"]["updates"] == updates
        assert groups.call_args.args[2] == 0.7


def test_checkpoints_are_kept_and_evaluated(place, tmp_path):
    """Reference: the evaluations of the training itself."""
    options = {"max_steps": 7, "save_steps": 3, "eval_all_checkpoints": 1, "evaluate_during_training": 1}
    found = fine_tune(place, tmp_path, task="stsb", eval_interval=3, **options)["stsb"]["seeds"]["42"]
    assert found["updates"] == 7 and found["checkpoints"].keys() == {"3", "6"}
    evaluations = records(tmp_path / "stsb" / "seed_42" / "stsb_seed_42.metrics.jsonl", "val_loss")
    evaluated = {line["update"]: line["pearson"] for line in evaluations}
    assert evaluated.keys() == {3, 6, 7} and len(set(evaluated.values())) == 3
    assert all(values["pearson"] == evaluated[int(update)] for update, values in found["checkpoints"].items())
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(("how", "at"), [("kill", 15), ("signal", 20), ("late signal, lost model", None)])
def test_a_stopped_command_goes_on_bitwise(place, tmp_path, how, at, capsys):
    """In the second seed, in the middle (update 15 of all), before its evaluation (20) or after it: 20 examples make 5 updates, twice."""
    options = {"num_seeds": 2, "save_interval": 3, "do_predict": 1}
    whole = fine_tune(place, tmp_path / "whole", **options)
    part = arguments(place, tmp_path / "part", **options)
    if how == "kill":
        # what a checkpoint of version 1.0.0 has of it
        names = ("tokenizer", "data", "model (--model_path, --from_scratch)", "row layout", "optimizer")
        of_1_0 = mock.patch.object(job, "Identity", lambda now, **_: Identity({name: now[name] for name in names}))
        with of_1_0, before_update(at, mock.Mock(side_effect=ArithmeticError)), pytest.raises(ArithmeticError):
            train_glue.main(part)
    elif how == "signal":
        with before_update(at, lambda: os.kill(os.getpid(), signal.SIGTERM)):
            assert train_glue.main(part) == 128 + signal.SIGTERM
    else:
        # All is saved, so it ends the process at once.
        numbers = itertools.count()
        late = before_calls(
            command, "write_predictions", lambda *_: next(numbers) and os.kill(os.getpid(), signal.SIGTERM)
        )
        with late, mock.patch.object(os, "_exit", sys.exit), pytest.raises(SystemExit, match="143"):
            train_glue.main(part)
        remove(tmp_path / "part" / "cola" / "seed_43" / "model")
    capsys.readouterr()
    part = fine_tune(place, tmp_path / "part", from_resume=1, **options)
    printed = capsys.readouterr().out
    assert "cola, seed 42: done before" in printed and "resumed from" in printed
    assert part == whole
    for file in (f"cola/seed_{seed}/model/model.safetensors" for seed in (42, 43)):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "part" / file).read_bytes()


def test_results_are_not_overwritten_unasked(place, tmp_path, capsys):
    fine_tune(place, tmp_path, epochs=1)
    old = (tmp_path / "cola" / "seed_42" / "eval_results.json").read_text()
    assert "already holds results" in complaint(capsys, place, tmp_path, epochs=1)
    assert (tmp_path / "cola" / "seed_42" / "eval_results.json").read_text() == old
    found = fine_tune(place, tmp_path, epochs=1, overwrite_output_dir=1, seed=7)
    assert not (tmp_path / "cola" / "seed_42").exists() and found["cola"]["seeds"].keys() == {"7"}
    model = tmp_path / "cola" / "seed_7" / "model"
    for changes in ({"overwrite_output_dir": 1}, {"from_resume": 1, "seed": 7}):
        assert "which this command replaces" in complaint(capsys, place, tmp_path, model_path=model, **changes)


def test_what_a_user_can_mend_is_one_line(place, tmp_path, capsys):
    line = partial(complaint, capsys, place, tmp_path / "out")
    assert "--data_dir" in line(data_dir=tmp_path / "nowhere")
    assert "neither a folder CoLA" in line(task="all", data_dir=tmp_path)
    assert "--task colla: not one of cola, sst2" in line(task="cola,colla")
    assert "--model_path" in line(model_path=tmp_path / "nowhere")
    AutoTokenizer.from_pretrained(ROOT / "model", pad_token=None).save_pretrained(tmp_path / "no_padding")
    assert "has no padding token" in line(vocab_path=tmp_path / "no_padding")
    assert "has no classification head for CoLA" in line(do_train=0)
    assert "random weights would be evaluated" in line(do_train=0, from_scratch=1)
    assert "32 positions can be used; lower --max_seq_len" in line(max_seq_len=64)
    (tmp_path / "a.tsv").write_text("text\tlabel\na\tx\nb\tx\n")
    own = {"task": "mine", "kind": "classification", "data_dir": None, "train_file": tmp_path / "a.tsv"}
    assert "all labels are 'x'; expected two or more" in line(**own, do_eval=0)
    assert "--dev_file is needed" in line(**own, do_eval=1)
    assert "a task of your own needs --kind" in line(**{**own, "kind": None}, do_eval=0)
    assert not (tmp_path / "out" / "cola" / "seed_42").exists()


def test_the_flag_line_of_the_published_script_is_taken(place, tmp_path, capsys):
    """Every flag of run.py, with its defaults where a tiny model on a CPU can have them."""
    line = f"""--data_dir {place / "glue" / "CoLA"} --model_type bert --model_name_or_path {place / "tiny"} --task_name CoLA
        --output_dir {tmp_path} --cache_dir {tmp_path / "cache"} --max_seq_length 16 --do_train --do_eval
        --evaluate_during_training --do_lower_case --per_gpu_train_batch_size 5 --per_gpu_eval_batch_size 8
        --gradient_accumulation_steps 2 --learning_rate 2e-5 --weight_decay 0.0 --adam_epsilon 1e-8 --max_grad_norm 1.0
        --num_train_epochs 3.0 --max_steps -1 --warmup_steps 0 --logging_steps 500 --save_steps 500 --eval_all_checkpoints
        --no_cuda --overwrite_output_dir --overwrite_cache --seed 42 --fp16_opt_level O1 --local_rank -1 --server_ip x
        --server_port x"""
    assert train_glue.main(line.split()) == 0
    printed = capsys.readouterr().out
    for ignored in ("model_type bert", "fp16_opt_level O1", "server_ip x", "server_port x"):
        assert f"warning: --{ignored} has no effect: run.py needed it\n" in printed
    found = json.loads((tmp_path / "cola" / "seed_42" / "eval_results.json").read_text())
    # 20 examples are two updates of 2 x 5, three times.
    assert found["updates"] == 6 and found["results"].keys() == {"matthews"}
    assert found["made_with"]["examples of an update"] == 10 and found["made_with"]["grad_clip"] == 1
    assert list((tmp_path / "cache").glob("CoLA-train-*.npz"))


def test_the_rate_counts_updates_as_in_the_published_script(place, tmp_path, capsys):
    """Reference: transformers' schedule, which run.py takes. 20 examples are updates of 8, 8 and 4, twice."""
    options = {"learning_rate": 0.01, "log_interval": 1, "warmup_share": 0.4}
    fine_tune(place, tmp_path, batch_size=8, **options)
    lines = records(tmp_path / "cola" / "seed_42" / "cola_seed_42.metrics.jsonl")
    optimizer = torch.optim.SGD([torch.zeros(1)])
    (factor,) = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=6).lr_lambdas
    assert [line["lr"] for line in lines] == pytest.approx([0.01 * factor(update) for update in range(6)])
    assert "another examples of an update" in complaint(capsys, place, tmp_path, from_resume=1, **options)


def test_flags_of_the_published_script_mean_what_they_meant():
    line = "--task_name MRPC --data_dir d --no_cuda --fp16 --per_gpu_train_batch_size 8 --max_grad_norm 0.5 --do_lower_case False"
    settings = GlueSettings.parse([*line.split(), "--eval_all_checkpoints", "--logging_steps", "7", "--server_ip", ""])
    assert (settings.task, settings.device, settings.dtype, settings.batch_size) == ("mrpc", "cpu", "float16", 8)
    assert (settings.grad_clip, settings.lower_case, settings.log_interval) == (0.5, False, 7)
    # Alone, as it was published: the models of every 500 updates.
    assert settings.save_steps == 500 and settings.server_ip == ""
    assert GlueSettings.parse(["--task", "cola", "--data_dir", "d", "--max_steps", "-1"]).max_steps == -1


@pytest.mark.parametrize("kind", ["classification", pytest.param("regression", marks=pytest.mark.slow)])
def test_a_task_of_ones_own_learns_and_predicts(place, tmp_path, kind):
    """What is wanted stands in the text. References: the labels, and scikit-learn's figure of the written predictions."""
    generator = random.Random(0)
    labels, files = {}, {}
    for part, n in (("train", 24), ("dev", 10), ("test", 10)):
        records, labels[part] = [], []
        for _ in range(n):
            i = generator.randrange(3)
            text = " ".join(["hij"[i], *generator.choices("abcdefg", k=generator.randint(0, 9))])
            labels[part].append(["bad", "fair", "good"][i] if kind == "classification" else 2.5 * i - 7)
            records.append({"title": text, "body": "g", "stars": labels[part][-1]})
        files[f"{part}_file"] = write_records(tmp_path / f"{part}.jsonl", records)
    options = {"task": "reviews", "kind": kind, "data_dir": None, "text": ["title", "body"], "label": "stars", **files}
    found = fine_tune(place, tmp_path / "out", **options, epochs=15, learning_rate=2e-2, do_predict=1, dropout=0)
    metrics = {"classification": {"accuracy", "macro_f1"}, "regression": {"pearson", "spearman"}}[kind]
    assert found["reviews"]["metrics"].keys() == metrics
    assert found["reviews"]["metrics"]["accuracy" if kind == "classification" else "pearson"]["mean"] > 0.9
    folder = tmp_path / "out" / "reviews" / "seed_42"
    written = [line.split("\t")[1] for line in (folder / "predictions" / "reviews.tsv").read_text().splitlines()[1:]]
    if kind == "classification":
        assert accuracy_score(labels["test"], written) > 0.8
    else:
        assert np.corrcoef(labels["test"], np.array(written, dtype=float))[0, 1] > 0.9


def test_a_finished_seed_is_passed_over_and_one_of_other_flags_or_data_refused(tmp_path, capsys):
    place = make_place(tmp_path / "place")
    out = tmp_path / "out"
    first = fine_tune(place, out, epochs=1)
    checkpoints = out / "cola" / "seed_42" / "cola_seed_42_resume"
    assert not checkpoints.exists()
    # As version 1.0.0 left it, and as after a kill between the results and the end
    made_with = first["cola"]["seeds"]["42"]["made_with"]
    del made_with["examples of an update"]
    change_json(checkpoints.with_name("eval_results.json"), made_with=made_with)
    checkpoints.mkdir()
    (checkpoints / "update_9.pt").touch()
    with mock.patch.object(Engine, "update", side_effect=AssertionError("it trains")):
        assert fine_tune(place, out, epochs=1, from_resume=1) == first and not checkpoints.exists()
        assert "cola, seed 42: done before, matthews" in capsys.readouterr().out
        error = complaint(capsys, place, out, epochs=2, layer_decay=0.7, from_resume=1)
        assert "seed_42 was finished with another epochs, another layer_decay" in error
        train_file = place / "glue" / "CoLA" / "train.tsv"
        train_file.write_text(train_file.read_text().replace("h", "i"))
        assert "another data" in complaint(capsys, place, out, epochs=1, from_resume=1)
    # A further seed is trained beside it.
    train_file.write_text((make_place(tmp_path / "again") / "glue" / "CoLA" / "train.tsv").read_text())
    assert fine_tune(place, out, epochs=1, num_seeds=2, from_resume=1)["cola"]["seeds"].keys() == {"42", "43"}


def test_the_metrics_of_every_task_have_a_chart_and_a_figure(tmp_path):
    names = {name for metrics in (*(task.metrics for task in TASKS.values()), *METRICS.values()) for name in metrics}
    line = {"tokens": 1, "loss": 2.0, **dict.fromkeys(names, 0.25), "accuracy-mm": 0.125}
    run = RunRecords.read(add(tmp_path / "a.metrics.jsonl", line))
    assert {curve.field for curve in run.curves(METRICS_CHART)} == {*names, "accuracy-mm"}
    figures = dict(run.figures())
    assert figures["accuracy-mm"] == "0.1250" and all(figures[name] == "0.2500" for name in names)
