"""Options of train_glue.py in whole runs. References: formulas, and the same run with other flags."""

import json
import re

import pytest
from transformers import BertTokenizer

from dataset.glue.glue_tasks import TASKS, task_list, task_name
from tests.dataset.glue.test_glue_dataset import WORDS
from tests.helpers import trainers_that_fit
from tests.trainer.glue.glue_helpers import arguments, complaint, fine_tune, make_place
from tests.trainer.glue.test_runs import same, stopped, weights_of
from trainer import train_glue


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("place"))


def log_lines(out, task="cola"):
    text = (out / task / "seed_42" / f"{task}_seed_42.metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def run_of(place, out, **changes):
    with trainers_that_fit() as trainers:
        assert train_glue.main(arguments(place, out, **changes)) == 0
    return trainers[0]


# --------------------------------------------------------------------------------------------------- tasks


@pytest.mark.parametrize("name", TASKS)
def test_tasks_have_the_names_of_the_benchmark(name):
    """Reference: the folders that it ships."""
    assert task_name(TASKS[name].folder) == name
    assert task_name(TASKS[name].folder.lower()) == name
    assert task_name(TASKS[name].folder.replace("-", "_")) == name


def test_a_list_of_tasks_has_each_once():
    assert task_list("SST-2, mrpc,sst2,STS-B") == "sst2,mrpc,stsb"
    # Of the original code's.
    assert task_list("sts,sst") == "stsb,sst2"
    assert task_list("all") == "all" and task_list("colla") == "colla"


def test_several_tasks_of_the_benchmark_in_their_order(place, tmp_path):
    results = fine_tune(place, tmp_path, task="STS-B,CoLA", max_steps=2)
    assert set(results) == {"stsb", "cola"}
    by_key = fine_tune(place, tmp_path / "key", task="cola", max_steps=2)
    assert results["cola"]["metrics"] == by_key["cola"]["metrics"]


def test_tasks_that_are_not_there_are_told_before_anything_is_trained(place, tmp_path, capsys):
    assert "--task colla: not one of cola, sst2" in complaint(capsys, place, tmp_path, task="cola,colla")
    assert "all is every task; give it alone" in complaint(capsys, place, tmp_path, task="all,cola")
    assert "neither a folder MRPC" in complaint(capsys, place, tmp_path, task="cola,mrpc")
    assert not (tmp_path / "cola").exists()


# ------------------------------------------------------------------------------------------------ training


def test_a_part_of_an_epoch(place, tmp_path):
    """20 examples in batches of 4 are 5 updates an epoch: 1.5 of them end in the 8th, and the rate falls over these."""
    run = run_of(place, tmp_path / "a", epochs=1.5, log_interval=1, warmup_steps=0)
    assert run.progress.update == 8
    rates = [line["lr"] for line in log_lines(tmp_path / "a") if "lr" in line]
    assert rates == pytest.approx([3e-3 * (8 - update) / 8 for update in range(8)])
    assert run_of(place, tmp_path / "b", epochs=0.4).progress.update == 2
    whole = run_of(place, tmp_path / "c", epochs=2.0)
    assert whole.progress.update == 10
    assert run_of(place, tmp_path / "d", epochs=2).progress.update == 10
    assert same(weights_of(tmp_path / "c"), weights_of(tmp_path / "d"))


def test_a_part_of_an_epoch_ends_there_too_with_batches_of_another_size(place, tmp_path):
    """1.5 epochs of 20 examples: one epoch in 5 updates of 4, and 10 rows in 5 updates of 2."""
    stopped(place, tmp_path, 5, epochs=1.5)
    resumed = run_of(place, tmp_path, epochs=1.5, batch_size=2, from_resume=1)
    assert (resumed.progress.update, resumed.progress.epoch, resumed.progress.row) == (10, 1, 10)


@pytest.mark.parametrize("schedule", ["separate_linear", "original_linear"])
@pytest.mark.parametrize("changes", [{"epochs": 2}, {"epochs": None, "max_steps": 10}])
def test_warm_up_in_updates(place, tmp_path, schedule, changes):
    """Reference: the schedules' formulas with w = 4 of T = 10."""
    train_glue.main(arguments(place, tmp_path, lr_schedule=schedule, log_interval=1, warmup_steps=4, **changes))
    rates = [line["lr"] for line in log_lines(tmp_path) if "lr" in line]
    wanted = []
    for t in range(10):
        if schedule == "original_linear":
            wanted.append(3e-3 * (1 - t / 10) * min(1, t / 4))
        else:
            wanted.append(3e-3 * (t / 4 if t < 4 else (10 - t) / 6))
    assert rates == pytest.approx(wanted)


def test_the_report_has_the_metrics_of_each_development_file(place, tmp_path):
    """Reference: eval_results.json."""
    found = fine_tune(place, tmp_path, task="mnli", epochs=1, evaluate_during_training=1, eval_interval=2, report=1)
    page = (tmp_path / "mnli" / "seed_42" / "mnli_seed_42.report.html").read_text(encoding="utf-8")
    assert "Metrics on the development data" in page
    cells = re.sub(r"\s*<[^>]*>\s*", "|", page)
    assert len(found["mnli"]["metrics"]) == 2
    for name, figures in found["mnli"]["metrics"].items():
        assert f"|{name}|" in cells.replace("||", "|") and f"{figures['mean']:.4f}" in cells


def test_max_steps_override_epochs(place, tmp_path, capsys):
    run = run_of(place, tmp_path, epochs=9, max_steps=3)
    assert run.progress.update == 3
    assert "--epochs 9.0 has no effect: --max_steps 3 overrides it" in capsys.readouterr().out


def test_flags_that_do_nothing_are_named(place, tmp_path, capsys):
    """Without training those of the training, without an evaluation its batch; a resume replaces nothing."""
    unread = {
        "grad_clip": 2.0,
        "accumulation_steps": 2,
        "max_bad_updates": 7,
        "use_compile": 0,
        "gradient_checkpointing": 1,
    }
    fine_tune(place, tmp_path / "a", max_steps=1)
    model = tmp_path / "a" / "cola" / "seed_42" / "model"
    evaluation = {"epochs": None, "learning_rate": None, "do_train": 0, "model_path": model}
    capsys.readouterr()
    fine_tune(place, tmp_path / "b", **evaluation, **unread)
    out = capsys.readouterr().out
    for name in unread:
        assert f"warning: --{name} " in out and out.count(f"--{name} ") == 1, name
    assert out.count("has no effect: --do_train is 0") == len(unread)
    fine_tune(place, tmp_path / "b", **evaluation, rows_per_update=8, from_resume=1, overwrite_output_dir=1)
    out = capsys.readouterr().out
    assert "--rows_per_update 8 has no effect: --do_train is 0" in out
    assert "--overwrite_output_dir True has no effect: --from_resume 1 goes on with the results that are there" in out
    fine_tune(place, tmp_path / "c", max_steps=1, do_eval=0, eval_batch_size=3)
    assert "--eval_batch_size 3 has no effect: nothing is evaluated" in capsys.readouterr().out


def test_epsilon_reaches_the_optimiser(place, tmp_path):
    run = run_of(place, tmp_path, max_steps=1, adam_epsilon=0.5)
    assert {group["eps"] for group in run.job.engine.optimizer.param_groups} == {0.5}


def test_intervals_count_updates(place, tmp_path):
    """Reference: the same run with one micro-batch an update. An epoch of 20 examples is 5 updates of 4."""
    found = []
    for parts in (1, 2):
        out = tmp_path / str(parts)
        options = {"accumulation_steps": parts, "batch_size": 4 // parts, "log_interval": 2, "eval_interval": 3}
        fine_tune(place, out, **options, evaluate_during_training=1)
        lines = log_lines(out)
        logged = [line["update"] for line in lines if "lr" in line]
        found.append((logged, [line["update"] for line in lines if "matthews" in line]))
    assert found[0] == found[1]
    # A log line with the first, third ... update of an epoch, and with its last.
    assert found[0] == ([1, 3, 5, 6, 8, 10], [3, 6, 9, 10])


# ---------------------------------------------------------------------------------------------- evaluation


def test_examples_that_are_evaluated_at_once(place, tmp_path, monkeypatch):
    """Another number gives the same figures. Reference: the sizes of the batches, and the run without it."""
    from trainer.glue import scores

    sizes = []
    forward = scores.forward

    def counted(model, batch):
        sizes.append(len(batch.ids))
        return forward(model, batch)

    monkeypatch.setattr(scores, "forward", counted)
    usual = fine_tune(place, tmp_path / "a", max_steps=2)
    assert set(sizes) == {4, 1}
    sizes.clear()
    other = fine_tune(place, tmp_path / "b", max_steps=2, eval_batch_size=7)
    assert set(sizes) == {7, 2}
    assert usual["cola"]["metrics"] == other["cola"]["metrics"]


# ----------------------------------------------------------------------------------------------- tokenizer


def test_the_vocabulary_may_lie_elsewhere(place, tmp_path, capsys):
    """Reference: the run with the tokenizer in the model's folder."""
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(WORDS) + "\n")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((place / "tiny" / name).read_bytes())
    own = fine_tune(place, tmp_path / "a", max_steps=3)
    for number, path in enumerate((vocabulary, place / "tiny")):
        out = tmp_path / f"b{number}"
        assert (
            fine_tune(place, out, max_steps=3, model_path=bare, vocab_path=path)["cola"]["metrics"]
            == own["cola"]["metrics"]
        )
        assert same(weights_of(tmp_path / "a"), weights_of(out))
    # The model is saved with it.
    assert BertTokenizer.from_pretrained(tmp_path / "b0" / "cola" / "seed_42" / "model").vocab_size == len(WORDS)
    capsys.readouterr()
    assert "tokenizer" in complaint(capsys, place, tmp_path / "c", model_path=bare)
    assert "no such vocab.txt" in complaint(capsys, place, tmp_path / "c", vocab_path=tmp_path / "nothing")


def test_lower_case_is_for_a_vocab_txt(place, tmp_path, capsys):
    fine_tune(place, tmp_path, max_steps=1, lower_case=0)
    assert "--lower_case False has no effect: the tokenizer folder says it" in capsys.readouterr().out
