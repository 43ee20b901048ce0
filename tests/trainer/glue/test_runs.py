"""What fine-tuning does with stops, earlier results, compilers and encoders of other kinds."""

import json
import os
import shutil
import signal
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertTokenizer,
    DistilBertConfig,
    DistilBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from dataset.glue.features import Features
from dataset.glue.glue_dataset import Batch, GlueAssembler, GluePlan, Totals
from dataset.glue.glue_tasks import TASKS
from model.electra.compiled_encoder import QUICK_ON_CPU
from tests.dataset.glue.test_glue_dataset import WORDS, encoder
from tests.operators import Operators
from tests.trainer.glue.glue_helpers import arguments, complaint, fine_tune, flags, make_place
from trainer import train_glue
from trainer.engine import Engine
from trainer.glue.job import GlueJob, updates_of_epochs
from trainer.glue.loss import forward, glue_loss
from trainer.glue.model import Layers, init_model
from trainer.machine.compiling import compiler_missing


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("glue"))


def stop_at(update):
    """A patch of the engine: SIGTERM comes before this update, which is the last one then."""
    plain, calls = Engine.update, []

    def stop(engine, *arguments):
        calls.append(None)
        if len(calls) == update - 1:  # it has been asked for signals already
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(engine, *arguments)

    return mock.patch.object(Engine, "update", stop)


def stopped(place, out, update, **changes):
    with stop_at(update):
        assert train_glue.main(arguments(place, out, **changes)) == 128 + signal.SIGTERM


def rates_of(out, task="cola"):
    lines = (out / task / "seed_42" / f"{task}_seed_42.metrics.jsonl").read_text().splitlines()
    return [line["lr"] for line in map(json.loads, lines) if "lr" in line]


def weights_of(out, seed=42):
    return load_file(out / "cola" / f"seed_{seed}" / "model" / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize("batch_size", [2, 8])
def test_another_batch_size_after_a_resume_leads_to_the_same_end(place, tmp_path, batch_size):
    """20 examples, 8 epochs, 40 updates of 4; stopped at 31. Reference: (rows left) / (rows without warm-up)."""
    options = {"epochs": 8, "log_interval": 1, "save_interval": 5}
    stopped(place, tmp_path, 31, **options)
    found = fine_tune(place, tmp_path, from_resume=1, **{**options, "batch_size": batch_size})
    assert found["cola"]["seeds"]["42"]["updates"] == 31 + {2: 8 + 10, 8: 2 + 3}[batch_size]  # 16 rows and 20 are left
    rows, wanted = list(range(0, 124, 4)), []
    for epoch, first in ((6, 4), (7, 0)):
        rows += range(20 * epoch + first, 20 * epoch + 20, batch_size)
    for row in rows:
        wanted.append(3e-3 * (row / 16 if row < 16 else (160 - row) / 144))
    assert rates_of(tmp_path) == pytest.approx(wanted) and min(wanted[1:]) > 0
    assert weights_of(tmp_path)


def test_max_steps_ends_a_run_that_was_resumed_with_other_batches(place, tmp_path):
    """Counted in updates, whatever their size: 25 of 4 rows and then of 2 within 8 epochs, 38 of 4 and then of 8 beyond."""
    options = {"epochs": 8, "log_interval": 1}
    stopped(place, tmp_path / "a", 10, max_steps=25, **options)
    found = fine_tune(place, tmp_path / "a", max_steps=25, from_resume=1, **{**options, "batch_size": 2})
    assert found["cola"]["seeds"]["42"]["updates"] == 25
    rates = rates_of(tmp_path / "a")
    assert rates == pytest.approx([3e-3 * (t / 2 if t < 2 else (25 - t) / 23) for t in range(25)])
    assert weights_of(tmp_path / "a")
    stopped(place, tmp_path / "b", 30, max_steps=38, **options)
    found = fine_tune(place, tmp_path / "b", max_steps=38, from_resume=1, **{**options, "batch_size": 8})
    assert found["cola"]["seeds"]["42"]["updates"] == 38  # after 36 the eight epochs are over
    rates = rates_of(tmp_path / "b")
    assert rates == pytest.approx([3e-3 * (t / 3 if t < 3 else (38 - t) / 35) for t in range(38)])
    assert weights_of(tmp_path / "b")


@pytest.mark.parametrize("hundredths", [55, 57, 110, 207, 250])
def test_a_part_of_an_epoch_has_no_update_too_many(hundredths):
    """Reference: whole numbers. 0.55 * 100 is a little more than 55 in binary numbers."""
    for n_updates in (1, 7, 100, 12_271):
        assert updates_of_epochs(hundredths / 100, n_updates) == -(-hundredths * n_updates // 100)


def test_max_steps_overrides_the_epochs(place, tmp_path, capsys):
    """As in the benchmark's own script: 20 examples are 5 updates an epoch; one epoch is asked for, 13 updates are made,
    and the rate falls to 0 over these 13."""
    found = fine_tune(place, tmp_path, epochs=1, max_steps=13, log_interval=1)
    assert found["cola"]["seeds"]["42"]["updates"] == 13
    assert rates_of(tmp_path) == pytest.approx([3e-3 * (t if t < 1 else (13 - t) / 12) for t in range(13)])
    out = capsys.readouterr().out
    assert "run: 13 updates in 3 epochs" in out
    assert "warning: --epochs 1.0 has no effect: --max_steps 13 overrides it" in out


def test_a_run_that_only_lacks_its_evaluation_writes_its_model_again(place, tmp_path):
    stopped(place, tmp_path, 10, do_eval=0)
    folder = tmp_path / "cola" / "seed_42"
    before = weights_of(tmp_path)
    shutil.rmtree(folder / "model")
    (folder / "eval_results.json").unlink(missing_ok=True)
    fine_tune(place, tmp_path, do_eval=0, from_resume=1)
    assert same(weights_of(tmp_path), before)


def test_a_finished_seed_is_trained_again_on_other_data(tmp_path, capsys):
    """Its figures are of the files that it was trained on, though all flags are the same."""
    place = make_place(tmp_path / "place")
    first = fine_tune(place, tmp_path / "out", epochs=1)
    train_file = next(place.rglob("CoLA/train.tsv"))
    lines = train_file.read_text(encoding="utf-8").splitlines(keepends=True)
    train_file.write_text("".join(lines[:-4]), encoding="utf-8")
    capsys.readouterr()
    again = fine_tune(place, tmp_path / "out", epochs=1, from_resume=1)
    assert (
        "done before with another data: a finished run has no checkpoint, so it begins anew" in capsys.readouterr().out
    )
    seeds = again["cola"]["seeds"]["42"], first["cola"]["seeds"]["42"]
    assert seeds[0]["data"] != seeds[1]["data"]


def test_a_finished_seed_is_trained_again_from_another_model_in_the_same_folder(place, tmp_path, capsys):
    """One that was pretrained again. With random weights its config alone counts."""
    shutil.copytree(place / "tiny", tmp_path / "model")
    options = {"epochs": 1, "model_path": tmp_path / "model"}
    fine_tune(place, tmp_path / "a", **options)
    fine_tune(place, tmp_path / "b", **options, from_scratch=1)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    save_file(
        {name: weight + 0.1 for name, weight in weights.items()},
        tmp_path / "model" / "model.safetensors",
        {"format": "pt"},
    )
    capsys.readouterr()
    again = fine_tune(place, tmp_path / "a", **options, from_resume=1)
    assert "done before with another model: a finished run has no checkpoint" in capsys.readouterr().out
    assert again["cola"]["seeds"] == fine_tune(place, tmp_path / "c", **options)["cola"]["seeds"]
    capsys.readouterr()
    fine_tune(place, tmp_path / "b", **options, from_scratch=1, from_resume=1)
    assert "done before, " in capsys.readouterr().out


def test_a_finished_seed_is_trained_again_in_another_precision(place, tmp_path, capsys, monkeypatch):
    """The one that is computed in counts: a machine without bfloat16 has done what --dtype float32 asks for."""
    fine_tune(place, tmp_path / "a", epochs=1, dtype="float32")
    path = tmp_path / "a" / "cola" / "seed_42" / "eval_results.json"
    assert json.loads(path.read_text())["dtype"] == "float32"
    monkeypatch.setattr("trainer.machine.devices.cpu_has_bfloat16", lambda: False)
    capsys.readouterr()
    fine_tune(place, tmp_path / "a", epochs=1, dtype="bfloat16", from_resume=1)
    assert "done before, " in capsys.readouterr().out
    monkeypatch.setattr("trainer.machine.devices.cpu_has_bfloat16", lambda: True)
    fine_tune(place, tmp_path / "a", epochs=1, dtype="bfloat16", from_resume=1)
    assert "done before with another dtype: a finished run has no checkpoint" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found.pop("dtype") == "bfloat16"
    # Those of an earlier version do not say it, and are taken as they are.
    path.write_text(json.dumps(found))
    fine_tune(place, tmp_path / "a", epochs=1, dtype="float32", from_resume=1)
    assert "done before, " in capsys.readouterr().out


def shorten(path, n_lines):
    """Leave out the last lines of a file."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:-n_lines]), encoding="utf-8")


def test_another_development_or_test_file_is_evaluated_again(tmp_path, capsys):
    """Reference: the saved model, evaluated and predicting as it is. Nothing is trained."""
    place = make_place(tmp_path / "place")
    options = {"epochs": 2, "learning_rate": 1e-2, "num_seeds": 2, "do_predict": 1}
    first = fine_tune(place, tmp_path / "out", **options)
    glue = place / "glue" / "CoLA"
    shorten(glue / "dev.tsv", 4)
    # As many lines as before: nothing but the words says that it is another file.
    (glue / "test.tsv").write_text((glue / "test.tsv").read_text().replace("h", "i"))
    capsys.readouterr()
    with mock.patch.object(Engine, "update", side_effect=AssertionError("it trains")):
        again = fine_tune(place, tmp_path / "out", **options, from_resume=1)
    wanted = "done before with another development or test file: what is trained is evaluated again"
    assert capsys.readouterr().out.count(wanted) == 2
    assert again != first and again["cola"]["ensemble"] is not None
    folder = tmp_path / "out" / "cola" / "seed_43"
    alone = {"do_train": 0, "do_predict": 1, "model_path": folder / "model", "epochs": None, "learning_rate": None}
    plain = fine_tune(place, tmp_path / "alone", **alone)["cola"]["seeds"]["42"]
    assert again["cola"]["seeds"]["43"]["results"] == plain["results"]
    predictions = [path / "predictions" / "CoLA.tsv" for path in (folder, tmp_path / "alone" / "cola" / "seed_42")]
    assert predictions[0].read_text() == predictions[1].read_text()
    # And now it is done.
    capsys.readouterr()
    fine_tune(place, tmp_path / "out", **options, from_resume=1)
    assert capsys.readouterr().out.count("done before, ") == 2


def test_results_that_do_not_say_of_which_files_they_are_are_made_again(place, tmp_path, capsys):
    """Those of an earlier version, where its model is there; without it they are taken as they are."""
    fine_tune(place, tmp_path, epochs=1)
    path = tmp_path / "cola" / "seed_42" / "eval_results.json"
    for has_model, wanted in ((True, "what is trained is evaluated again"), (False, "done before, ")):
        found = json.loads(path.read_text())
        del found["evaluated"]
        path.write_text(json.dumps(found))
        if not has_model:
            shutil.rmtree(path.parent / "model")
        capsys.readouterr()
        fine_tune(place, tmp_path, epochs=1, from_resume=1)
        assert wanted in capsys.readouterr().out


def test_an_evaluation_alone_does_not_replace_a_trained_seed(place, tmp_path, capsys):
    """Also where the trained seed is another one: the table of the task would be lost."""
    first = fine_tune(place, tmp_path, epochs=1, seed=43, do_predict=1)
    for seed in (42, 43):
        alone = {"do_train": 0, "epochs": None, "learning_rate": None, "seed": seed}
        error = complaint(capsys, place, tmp_path, **alone, from_resume=1)
        assert "holds a trained seed, which --do_train 0 would replace" in error and "seed_43" in error
    assert json.loads((tmp_path / "eval_results.json").read_text()) == first
    assert (tmp_path / "cola" / "seed_43" / "predictions" / "CoLA.tsv").exists()
    # An evaluation goes on with one.
    for _ in range(2):
        fine_tune(place, tmp_path / "alone", do_train=0, epochs=None, learning_rate=None,
                  model_path=tmp_path / "cola" / "seed_43" / "model", from_resume=1)  # fmt: skip
    assert "done before, " in capsys.readouterr().out


def test_predictions_of_weights_that_are_gone_are_not_left(place, tmp_path):
    """The second command trains anew, and predicts nothing."""
    fine_tune(place, tmp_path, epochs=1, do_predict=1, num_seeds=2)
    assert len(list(tmp_path.rglob("CoLA.tsv"))) == 3
    fine_tune(place, tmp_path, epochs=2, num_seeds=2, from_resume=1)
    assert not list(tmp_path.rglob("CoLA.tsv"))


def test_checkpoints_go_with_the_evaluation_and_a_finished_seed_is_not_trained_again(place, tmp_path, capsys):
    first = fine_tune(place, tmp_path, epochs=1)
    folder, printed = tmp_path / "cola" / "seed_42", capsys.readouterr().out
    assert not (folder / "cola_seed_42_resume").exists() and "--- cola" in printed

    def again(**changes):
        found = fine_tune(place, tmp_path, from_resume=1, **{"epochs": 1, **changes})
        return found, capsys.readouterr().out

    with mock.patch.object(Engine, "update", side_effect=AssertionError("it trains")):
        found, printed = again()
        assert found == first and "cola, seed 42: done before" in printed
        found, printed = again(do_predict=1)  # the same training, so its model is read
    assert found["cola"]["metrics"] == first["cola"]["metrics"] and "what is trained is evaluated again" in printed
    assert (folder / "predictions" / "CoLA.tsv").exists() and found["cola"]["seeds"]["42"]["updates"] == 5
    found, printed = again(epochs=2)
    assert "done before with another --epochs, --do_predict: a finished run has no checkpoint" in printed
    assert found["cola"]["seeds"]["42"]["updates"] == 10
    assert fine_tune(place, tmp_path / "whole") == found and same(weights_of(tmp_path), weights_of(tmp_path / "whole"))
    assert not (folder / "cola_seed_42_resume").exists()


def test_checkpoints_stay_where_the_evaluation_was_stopped(place, tmp_path):
    stopped(place, tmp_path, 11)
    folder = tmp_path / "cola" / "seed_42"
    assert list((folder / "cola_seed_42_resume").glob("*.pt")) and not (folder / "eval_results.json").exists()


@pytest.mark.parametrize(
    "content",
    ["[1]", "{}", '{"settings": 1, "results": {}}', '{"settings": {}, "results": {"f1": "1"}}', "3", "{", '"a"'],
)
def test_a_foreign_result_counts_as_none(place, tmp_path, content):
    for folder in (tmp_path / "cola" / "seed_42", tmp_path / "rte"):
        folder.mkdir(parents=True)
        (folder / "eval_results.json").write_text(content)
    assert fine_tune(place, tmp_path, from_resume=1, max_steps=1).keys() == {"cola"}


def test_a_changed_dropout_is_announced(place, tmp_path, capsys):
    stopped(place, tmp_path, 3)
    fine_tune(place, tmp_path, from_resume=1, dropout=0.3)
    assert "--dropout is 0.3, was None before the resume" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- earlier results


def test_the_model_to_load_is_not_replaced(place, tmp_path, capsys):
    fine_tune(place, tmp_path, epochs=1)
    model = tmp_path / "cola" / "seed_42" / "model"
    for changes in ({"overwrite_output_dir": 1}, {"overwrite_output_dir": 1, "seed": 7}, {"from_resume": 1}):
        assert "which this command replaces" in complaint(capsys, place, tmp_path, model_path=model, **changes)
    (tmp_path / "link").symlink_to(model)
    error = complaint(capsys, place, tmp_path, model_path=tmp_path / "link", overwrite_output_dir=1)
    assert "which this command replaces" in error and (model / "model.safetensors").exists()


def test_a_model_that_does_not_load_leaves_earlier_results(place, tmp_path, capsys):
    """One that fits no task, and one that fits the first task alone: evaluated only, with a head for CoLA."""
    fine_tune(place, tmp_path, epochs=1)
    results = tmp_path / "cola" / "seed_42" / "eval_results.json"
    shutil.copytree(place / "tiny", tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no weights")
    options = {"epochs": 1, "overwrite_output_dir": 1}
    assert "no model can be loaded" in complaint(capsys, place, tmp_path, model_path=tmp_path / "broken", **options)
    shutil.copytree(tmp_path / "cola" / "seed_42" / "model", tmp_path / "own")
    options |= {"task": "all", "do_train": 0, "model_path": tmp_path / "own"}
    assert "no classification head for" in complaint(capsys, place, tmp_path, **options)
    assert json.loads(results.read_text())["updates"] == 5


# ------------------------------------------------------------------------------------------ a step, compiling


def random_batch(R, T, labels=2):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, len(WORDS), (R, T), generator=generator)
    types, mask = torch.zeros_like(ids), torch.ones_like(ids)
    return Batch(ids, mask, types, torch.randint(labels, (R,), generator=generator))


def test_an_objective_waits_for_nothing(place):
    """Neither a number from the host (lift_fresh is torch.tensor's) nor one to it: either stops a GPU's queue."""
    model = init_model(flags(place), TASKS["cola"], place / "tiny", len(WORDS))[0].train()
    with Operators() as operators:
        loss, sums = glue_loss(TASKS["cola"], model, random_batch(4, 8), Totals(32, 4))
    assert sums.tolist()[1] == 4 and sums[3] == 32 and loss.requires_grad
    waiting = {"lift_fresh", "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}
    assert "_log_softmax" in operators.names and not operators.names & waiting


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_objective_waits_for_nothing_on_a_gpu(place):
    model = init_model(flags(place), TASKS["cola"], place / "tiny", len(WORDS))[0].train().cuda()
    batch, losses = random_batch(4, 8).to("cuda"), partial(glue_loss, TASKS["cola"], model)
    losses(batch, Totals(32, 4))[0].backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses(batch, Totals(32, 4))[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_update_that_is_not_finite_is_skipped(place, tmp_path, capsys):
    plain, calls = GlueJob.loss, []

    def poisoned_once(job, batch, totals):
        calls.append(None)
        loss, sums = plain(job, batch, totals)
        return loss * (float("nan") if len(calls) == 3 else 1.0), sums

    with mock.patch.object(GlueJob, "loss", poisoned_once):
        found = fine_tune(place, tmp_path)
    printed = capsys.readouterr().out
    assert "update 3 is not applied (1 so far)" in printed and found["cola"]["seeds"]["42"]["updates"] == 10
    assert all(torch.isfinite(weights).all() for weights in weights_of(tmp_path).values())


def test_batches_of_one_width_for_a_compiler():
    """Reference: the longest length of each batch by hand."""
    lengths = np.array([3, 9, 1, 2, 2, 1, 7])
    begin, none = np.cumsum(lengths) - lengths, np.zeros_like(lengths)
    tokens = np.full(lengths.sum(), 10, dtype=np.uint16)
    features = Features(tokens, begin, lengths, none, none, np.array(False), np.array(0))
    full, plain = (GlueAssembler(features, encoder(), 128, full=full) for full in (True, False))
    plan = GluePlan(features, 1, 0)
    order = plan.recipe(range(7))
    assert plan.width(2) == pytest.approx(np.mean([lengths[order[i : i + 2]].max() + 2 for i in range(0, 7, 2)]))
    assert full.width == 16 == full[order[:2]].ids.shape[1] and plain[np.array([0, 2])].ids.shape == (2, 8)
    a, b = full[np.array([0, 2])], plain[np.array([0, 2])]
    assert torch.equal(a.ids[:, :8], b.ids) and not a.mask[:, 8:].any() and torch.equal(a.labels, b.labels)


def test_only_full_training_batches_are_compiled(place):
    """Reference: the stance that the model is called in."""
    model = init_model(flags(place), TASKS["cola"], place / "tiny", len(WORDS))[0].train()
    with mock.patch.object(torch.nn.Module, "compile"):
        Layers(model).compile_training((4, 8))
    stances = []
    model.register_forward_pre_hook(lambda *_: stances.append(torch._dynamo.eval_frame._stance.stance))
    for R, T in ((4, 8), (3, 8), (4, 16)):
        forward(model, random_batch(R, T))
    forward(model.eval(), random_batch(4, 8))
    assert stances == ["default", "force_eager", "force_eager", "force_eager"]


@pytest.mark.slow
@pytest.mark.skipif(compiler_missing(torch.device("cpu")) is not None, reason="no compiler")
def test_a_compiled_command_goes_on_bitwise(place, tmp_path):
    """Two tasks and two seeds; stopped in the second seed of the second. 21 and 20 examples: the last batch of MNLI's
    epochs has one row."""
    options = {"task": "all", "num_seeds": 2, "use_compile": 1, "epochs": 1, "save_interval": 3}
    options["data_dir"] = tmp_path / "glue"
    for name in ("CoLA", "MNLI"):
        shutil.copytree(place / "glue" / name, tmp_path / "glue" / name)
    whole = fine_tune(place, tmp_path / "whole", **options)
    stopped(place, tmp_path / "part", 5 + 5 + 6 + 4, **options)
    assert fine_tune(place, tmp_path / "part", from_resume=1, **options) == whole
    for path in sorted((tmp_path / "whole").rglob("model.safetensors")):
        other = tmp_path / "part" / path.relative_to(tmp_path / "whole")
        assert same(load_file(path), load_file(other)), path
    config = json.loads((tmp_path / "whole" / "cola" / "seed_42" / "model" / "config.json").read_text())
    assert QUICK_ON_CPU not in json.dumps(config)


# --------------------------------------------------------------------------------------- encoders of other kinds


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Folders of a RoBERTa, whose table of positions has two more than it uses, and a DistilBERT."""
    top = tmp_path_factory.mktemp("others")
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "max_position_embeddings": 18, "initializer_range": 0.2}
    bert = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    roberta = RobertaConfig(**sizes, **bert, type_vocab_size=1, pad_token_id=1)
    distilbert = DistilBertConfig(**sizes, dim=16, n_layers=2, n_heads=2, hidden_dim=32)
    words = {"roberta": ["[UNK]", "[PAD]", *WORDS[2:]], "distilbert": WORDS}
    for model in (RobertaForMaskedLM(roberta), DistilBertForMaskedLM(distilbert)):
        name = model.config.model_type
        model.save_pretrained(top / name)
        BertTokenizer(vocab={word: i for i, word in enumerate(words[name])}).save_pretrained(top / name)
    return top


@pytest.mark.parametrize("name", ["roberta", "distilbert"])
def test_encoders_without_segments(place, others, tmp_path, capsys, name):
    """They train, with the --dropout that is asked for, and their own forward gives what ours does."""
    found = fine_tune(place, tmp_path / "a", task="mnli", model_path=others / name, dropout=0.2, epochs=1)
    printed = capsys.readouterr().out
    assert "has no segments: two sentences are told apart by the separator" in printed and "embeddings 3" in printed
    model = tmp_path / "a" / "mnli" / "seed_42" / "model"
    options = {"task": "mnli", "do_train": 0, "model_path": model}
    assert fine_tune(place, tmp_path / "b", **options)["mnli"]["metrics"] == found["mnli"]["metrics"]
    config = json.loads((model / "config.json").read_text())
    fields = ["hidden_dropout_prob", "attention_probs_dropout_prob"]
    assert [config[field] for field in (fields if name == "roberta" else ["dropout", "attention_dropout"])] == [0.2] * 2
    capsys.readouterr()
    fine_tune(place, tmp_path / "c", model_path=others / name, max_steps=1)
    assert "has no segments" not in capsys.readouterr().out  # CoLA has one sentence

    plain = init_model(flags(place, model_path=model), TASKS["mnli"], model, len(WORDS))[0].eval()
    batch = random_batch(2, 8)
    batch.types[:, 4:] = 1
    assert torch.allclose(forward(plain, batch), plain(input_ids=batch.ids).logits, atol=1e-5)


def test_roberta_counts_positions_from_behind_its_padding(place, others, tmp_path, capsys):
    """All 16 work, a row that is full included; of 17 the user hears before anything is written."""
    plain = init_model(flags(place, model_path=others / "roberta"), TASKS["cola"], others / "roberta", len(WORDS))[0]
    assert forward(plain, random_batch(2, 16)).isfinite().all()
    error = complaint(capsys, place, tmp_path / "out", model_path=others / "roberta", max_seq_len=17)
    assert "16 of its 18 positions can be used, not 17" in error and not (tmp_path / "out").exists()
