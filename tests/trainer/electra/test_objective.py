"""--objective mlm and --budget_flops in whole runs. References: an uninterrupted run, a pass over the examples one by one,
formulas, transformers."""

import json
import math

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from common.errors import UserError
from model.electra.masking import IGNORE
from model.electra.sizes import SIZES
from tests.dataset.electra.test_electra_dataset import write_lines, write_vocab
from tests.helpers import new_port, run_ranks
from tests.trainer.electra.test_network_files import DISCRIMINATOR, WITHOUT_SIZES
from tests.trainer.glue.glue_helpers import write_task
from tests.trainer.test_train_electra import TIMES, equal, interrupted, train, weights
from trainer import train_glue
from trainer.electra.micro_batch import micro_batch_of
from trainer.electra.settings import parse_args
from trainer.encoder_folder import find_model
from trainer.machine.signals import StopSignals

MLM = {"objective": "mlm"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("electra")
    return {"data_path": write_lines(folder / "data.jsonl")[0], "vocab_path": write_vocab(folder / "vocab.txt")}


def log_lines(folder):
    """What was logged and evaluated, without times."""
    lines = (folder / "mlm_small" / "mlm_small.metrics.jsonl").read_text().splitlines()
    records = [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]
    return [record for record in records if {"loss", "val_loss"} & record.keys()]


def test_what_a_run_leaves(data, tmp_path, capsys):
    """The encoder at the end and on the way, for transformers and for train_glue.py; the metrics of one network."""
    run = train(**data, **MLM, out_dir=tmp_path, save_percents="50", val_fraction=0.2, report=1)
    folder = tmp_path / "mlm_small"
    assert {path.name for path in folder.iterdir()} == {
        "encoder", "percent_50", "mlm_small_resume", "mlm_small.metrics.jsonl", "mlm_small.report.html",
        "mlm_small.loss.png", ".mlm_small.lock", "mlm_small.settings.yaml",
    }  # fmt: skip
    saved = AutoModelForMaskedLM.from_pretrained(folder / "encoder").state_dict()
    assert equal(saved, run.job.model.encoder.state_dict())
    assert AutoTokenizer.from_pretrained(folder / "percent_50" / "encoder").mask_token_id == 4
    *_, last, evaluated = log_lines(tmp_path)
    assert {"loss", "mlm_acc"} <= last.keys() and not {"disc_loss", "mlm_loss"} & last.keys()
    assert {"val_loss", "val_mlm_acc"} <= evaluated.keys()
    page = (folder / "mlm_small.report.html").read_text()
    assert "Accuracy at the masked positions" in page and "Discriminator" not in page
    out = capsys.readouterr().out
    assert "model: masked language model small" in out and "generator" not in out and f"{folder}/encoder" in out

    write_task(tmp_path / "glue", "CoLA", {"train.tsv": 8, "dev.tsv": 4})
    fine_tune = f"--task cola --data_dir {tmp_path}/glue --model_path {folder}/encoder --out_dir {tmp_path}/tuned"
    assert train_glue.main([*fine_tune.split(), "--max_steps", "1", "--device", "cpu", "--max_seq_len", "24"]) == 0
    assert (tmp_path / "tuned" / "cola" / "seed_42" / "eval_results.json").exists()
    with pytest.raises(UserError, match="no config.json there; .*/encoder has one"):
        find_model("--model_path", str(folder))


@pytest.mark.slow
def test_it_learns(data, tmp_path):
    """Fifteen words, of which it knows nothing at the beginning."""
    sizes = {"max_steps": 40, "batch_size": 16, "learning_rate": 1e-2, "dropout": 0, "log_interval": 10}
    train(**data, **MLM, **sizes, out_dir=tmp_path, save_interval=1000)
    first, *_, last = log_lines(tmp_path)
    assert first["loss"] == pytest.approx(math.log(len(data["vocab_path"].read_text().split())), rel=0.1)
    assert last["loss"] < first["loss"] - 0.5 and last["mlm_acc"] > first["mlm_acc"] + 0.05


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_bitwise(data, tmp_path, dtype):
    same = {**data, **MLM, "dtype": dtype, "accumulation_steps": 2, "val_fraction": 0.2, "eval_interval": 5}
    whole = train(**same, out_dir=tmp_path / "whole")
    interrupted(8, **same, out_dir=tmp_path / "cut")
    resumed = train(**same, out_dir=tmp_path / "cut", from_resume=1)
    assert equal(weights(whole), weights(resumed))
    assert log_lines(tmp_path / "whole") == log_lines(tmp_path / "cut")


def test_it_reads_the_examples_and_masks_of_electra(data, tmp_path):
    ours = train(**data, **MLM, out_dir=tmp_path, max_steps=1, val_fraction=0.2).job
    theirs = train(**data, out_dir=tmp_path, max_steps=1, val_fraction=0.2).job
    rows = range(5)
    for job in (ours, theirs):
        assert job.folder.name == ("mlm_small" if job is ours else "electra_small")
    for mine, other in zip(
        ours.assembler[ours.plan(0).recipe(rows)], theirs.assembler[theirs.plan(0).recipe(rows)], strict=True
    ):
        assert torch.equal(mine, other)
    for mine, other in zip(ours.validation[0], theirs.validation[0], strict=True):
        assert torch.equal(mine, other)
    shape = {name: tensor.shape for name, tensor in ours.model.encoder.electra.state_dict().items()}
    assert shape == {name: tensor.shape for name, tensor in theirs.model.discriminator.electra.state_dict().items()}


def test_the_figures_of_an_evaluation(data, tmp_path):
    """Reference: each example by itself, cross-entropies of Hugging Face's logits."""
    run = train(**data, **MLM, out_dir=tmp_path, max_steps=3, val_fraction=0.2)
    model = run.job.model.eval()
    loss = correct = masked = 0
    for number in range(len(run.job.validation)):
        batch = run.job.validation[number]
        for row in range(len(batch.ids)):
            n = int(batch.lengths[row])
            used = batch.labels[row] != IGNORE
            types = batch.token_type_ids[row : row + 1, :n]
            with torch.no_grad():
                logits = model.encoder(batch.masked_ids[row : row + 1, :n], token_type_ids=types).logits[0]
            logits = logits[batch.positions[row, used]]
            labels = batch.labels[row, used]
            loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            correct += int((logits.argmax(-1) == labels).sum())
            masked += int(used.sum())
    model.train()
    values, _ = run.job.evaluate(run.engine, StopSignals(), 3)
    assert values == {"val_loss": pytest.approx(loss / masked, rel=1e-5), "val_mlm_acc": correct / masked}


def test_two_processes_train_what_one_does(data, tmp_path):
    n_threads = torch.get_num_threads()
    for processes in (1, 2):
        train(**data, **MLM, out_dir=tmp_path / str(processes), dropout=0.0, cpu_processes=processes)
    torch.set_num_threads(n_threads)
    for one, two in zip(log_lines(tmp_path / "1"), log_lines(tmp_path / "2"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6) and two["mlm_acc"] == one["mlm_acc"]


def sharded_runs(folder):
    """The losses of a run whose model two ranks have together, and of one with whole models."""
    found = {}
    for shard in ("full", "none"):
        new_port(shard)
        place = {"data_path": f"{folder}/data.jsonl", "vocab_path": f"{folder}/vocab.txt"}
        train(**place, **MLM, out_dir=folder / shard, shard=shard, batch_size=2, val_fraction=0.2)
        found[shard] = [line.get("loss", line.get("val_loss")) for line in log_lines(folder / shard)]
    return found


@pytest.mark.slow
def test_a_sharded_model_has_the_losses_of_a_whole_one(tmp_path):
    write_lines(tmp_path / "data.jsonl")
    write_vocab(tmp_path / "vocab.txt")
    found, _ = run_ranks(sharded_runs, tmp_path)
    assert len(found["none"]) > 10 and found["full"] == pytest.approx(found["none"], rel=1e-4)


def test_it_goes_on_from_the_encoder_of_a_folder(data, tmp_path):
    first = train(**data, **MLM, out_dir=tmp_path / "a", max_steps=2)
    place = {**data, **MLM, **WITHOUT_SIZES, "model_path": tmp_path / "a" / "mlm_small", "out_dir": tmp_path / "b"}
    second = train(**place, max_seq_len=40, max_steps=1, warmup_steps=0, learning_rate=1e-12)
    for before, after in zip(first.job.model.parameters(), second.job.model.parameters(), strict=True):
        assert torch.allclose(before, after, atol=1e-6)
    with pytest.raises(UserError, match="no generator/config.json there; .* --objective electra leaves a folder"):
        train(**{**place, "objective": "electra"})
    with pytest.raises(
        UserError, match="no encoder/config.json there; .* --objective mlm leaves a folder with encoder"
    ):
        train(**{**place, "model_path": tmp_path})


def test_its_network_may_be_that_of_a_file(data, tmp_path, capsys):
    path = tmp_path / "discriminator.json"
    path.write_text(json.dumps(DISCRIMINATOR))
    run = train(**data, **MLM, **WITHOUT_SIZES, out_dir=tmp_path, max_steps=1, discriminator_config=path)
    for name, value in DISCRIMINATOR.items():
        assert getattr(run.job.model.encoder.config, name) == value, name
    with pytest.raises(SystemExit):
        train(**data, **MLM, **WITHOUT_SIZES, out_dir=tmp_path, discriminator_config=path, generator_config=path)
    assert "--objective mlm has no generator: drop --generator_config" in capsys.readouterr().err


def test_flags_of_the_other_network_are_told(data, tmp_path, capsys):
    of_two = {
        "disc_weight": 10,
        "temperature": 2,
        "generator_divisor": 3,
        "example_interval": 1,
        "sampling": "fp32_gumbel",
    }
    # 32 is no multiple of 3: no generator must divide it.
    train(**data, **MLM, **of_two, out_dir=tmp_path, max_steps=1)
    out = capsys.readouterr().out
    for name in of_two:
        assert f"--{name} " in out and "has no effect: --objective mlm has one network" in out


def test_one_network_is_sharded_as_one():
    """Reference: the published size with and without a generator of the same depth."""
    published = SIZES["small"]
    layers = published.layers * (4 * published.width**2 + 2 * published.width * published.ffn)
    both = micro_batch_of(parse_args([]))
    alone = micro_batch_of(parse_args(["--objective", "mlm"]))
    assert both.parameters - alone.parameters == layers


# ------------------------------------------------------------------------------------------- equal work


def test_two_objectives_get_the_same_work(data, tmp_path, capsys):
    """The number that a run prints gives another one as much, to half an update. Reference: positions times the formula."""
    first = train(**data, out_dir=tmp_path, max_steps=4, accumulation_steps=2)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("work: "))
    flops = line.split("--budget_flops ")[1].split()[0]
    second = train(**data, **MLM, out_dir=tmp_path, budget_flops=flops, max_steps=None)
    of_update = []
    for run in (first, second):
        settings = run.job.settings
        positions = settings.batch_size * settings.accumulation_steps * settings.max_seq_len
        of_update.append(positions * run.job.objective.flops_per_position(settings.max_seq_len, settings.mask_share))
    assert float(flops) == pytest.approx(4 * of_update[0], rel=1e-5)
    assert second.progress.update == round(4 * of_update[0] / of_update[1]) != 4
    assert abs(second.progress.update * of_update[1] - float(flops)) <= of_update[1] / 2 * 1.001
    # The rate falls to 0 at that update, and what is written beside the weights begins the same run.
    kept = (tmp_path / "mlm_small" / "mlm_small.settings.yaml").read_text()
    assert f"max_steps: {second.progress.update}\n" in kept
    again = parse_args(["--config", str(tmp_path / "mlm_small" / "mlm_small.settings.yaml")])
    assert (again.max_steps, again.budget_flops) == (second.progress.update, None)


def test_a_budget_and_a_number_of_updates_exclude_each_other(data, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train(**data, out_dir=tmp_path, budget_flops=1e9, max_steps=12)
    assert "--budget_flops and --max_steps exclude each other" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train(**data, out_dir=tmp_path, budget="1h", budget_flops=1e9, max_steps=None)
    assert "--budget and --budget_flops exclude each other" in capsys.readouterr().err
