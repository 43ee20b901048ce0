"""The formula of memory, and `--batch_size auto`. References: measured peaks, and runs with the flags that it comes to."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from model.config import ModelConfig
from model.model_minimind import MiniMindLM
from tests.helpers import assert_same_weights, losses, train, write_corpus
from tests.trainer.machine.simulated_cuda import simulated_cuda
from trainer import command, train_pretrain
from trainer.machine.ranks import Ranks
from trainer.pretrain import memory
from trainer.pretrain.memory import recorded_rows, resolve_batch_size, training_bytes
from trainer.pretrain.settings import PretrainSettings

SIZE = ModelConfig()
MANY_ROWS = 100_000
USUAL_ROWS = PretrainSettings().batch_size
AUTO_RUN = {"batch_size": "auto", "accumulation_steps": 2, "log_interval": 2, "eval_interval": 2}
AUTO_RUN |= {"warmup_iters": 4, "val_fraction": 0.1}


def test_the_formula_is_near_the_measured_peaks():
    """26 M parameters on a CPU: the table of docs/performance.md."""
    # (compiled, recomputes, bytes of 32 rows, bytes of 8 rows)
    for compiled, recomputes, *peaks in ((1, 0, 4.4e9, 1.9e9), (1, 1, 2.1e9, 1.2e9), (0, 0, 6.7e9, 2.4e9)):
        settings = PretrainSettings(gradient_checkpointing=recomputes)
        for rows, peak in zip((32, 8), peaks, strict=True):
            needed = training_bytes(SIZE, rows, 512, settings, torch.bfloat16, torch.device("cpu"), compiled)
            assert needed == pytest.approx(peak, rel=0.1)
    # 102,400 entries: only an evaluation computes all of them, a few rows at once.
    size = ModelConfig(hidden_size=128, num_hidden_layers=2, vocab_size=102_400, num_attention_heads=2)
    settings = PretrainSettings(sampled_softmax=768)
    needed = training_bytes(size, 8, 512, settings, torch.float32, torch.device("cpu"), False)
    assert needed == pytest.approx(1.17e9, rel=0.3)


@pytest.mark.parametrize(
    ("argv", "rows_of_epoch", "fit", "tried", "wanted"),
    [
        ((), MANY_ROWS, 256, [256], (256, 1)),
        ((), MANY_ROWS, 100, [256, 128, 64], (64, 4)),
        # 224 rows an update: odd numbers of rows divide them.
        (("--accumulation_steps", "7"), MANY_ROWS, 100, [224, 112, 56], (56, 4)),
        # 100 micro-batches of 32 are 25 of 128, but no number of 256.
        (("--warmup_iters", "100"), MANY_ROWS, 100, [128, 64], (64, 4)),
        # An epoch of 100 rows never fills more.
        ((), 100, 256, [64], (64, 4)),
        # Where nothing fits, the run itself ends with a line.
        ((), MANY_ROWS, 0, [256, 128, 64, 32, 16, 8, 4, 2, 1], (1, 256)),
    ],
)
def test_an_update_keeps_its_rows_and_what_does_not_fit_is_halved(monkeypatch, argv, rows_of_epoch, fit, tried, wanted):
    trials = []
    # Batches are their numbers of rows.
    plan = SimpleNamespace(n_rows=rows_of_epoch, T=512, recipe=len, totals=lambda lo, hi: None)
    corpus = SimpleNamespace(plan=lambda epoch: plan, assembler=lambda rows: range(MANY_ROWS))
    model, gpu = SimpleNamespace(config=SIZE), torch.device("cuda")
    monkeypatch.setattr(memory, "fits_gpu", lambda model, rows, *_: trials.append(rows) or rows <= fit)
    asked = PretrainSettings.parse(["--batch_size", "auto", *argv])
    settings, (line,) = resolve_batch_size(asked, Path(), model, corpus, torch.bfloat16, gpu, Ranks(), None)
    assert trials == tried and (settings.batch_size, settings.accumulation_steps) == wanted
    assert math.prod(wanted) == USUAL_ROWS * asked.accumulation_steps
    assert settings.warmup_iters * wanted[0] == USUAL_ROWS * asked.warmup_iters
    assert (f"since {tried[0]} rows do not fit" in line) == (len(tried) > 1)


@pytest.fixture
def data(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl", 400)


def fails_beyond(monkeypatch, most_rows):
    """A GPU whose memory ends with the backward pass of more rows than these; gives the rows of each micro-batch."""
    seen = []
    losses_of = MiniMindLM.training_losses

    def limited(model, input_ids, *arguments):
        seen.append(len(input_ids))
        loss, aux_loss = losses_of(model, input_ids, *arguments)
        if len(input_ids) > most_rows:
            loss.register_hook(out_of_memory)
        return loss, aux_loss

    def out_of_memory(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(MiniMindLM, "training_losses", limited)
    return seen


@pytest.mark.parametrize("recomputed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_takes_as_many_rows_at_once_as_fit(tmp_path, data, monkeypatch, capsys, recomputed):
    """Reference: the run with the flags that it comes to, bit for bit: a trial leaves weights and random state as they were."""
    given = {**AUTO_RUN, "data_path": data, "device": None, "max_updates": 4, "accumulation_steps": 4}
    given |= {"gradient_checkpointing": recomputed, "dropout": 0.2}
    with simulated_cuda():
        seen = fails_beyond(monkeypatch, 32)
        auto = train(out_dir=tmp_path / "auto", **given)
        said = capsys.readouterr().out
        assert seen[:3] == [128, 64, 32] and max(seen[3:]) <= 32
        explicit = train(out_dir=tmp_path / "explicit", **{**given, "batch_size": 32})
    line = "--batch_size auto: an update is 4 micro-batches of 32 rows, since 128 rows do not fit"
    assert said.splitlines().count(line) == 1
    assert (auto.settings.batch_size, auto.settings.accumulation_steps) == (32, 4)
    assert losses(auto) == losses(explicit)
    assert_same_weights(auto, explicit)


@pytest.mark.slow
def test_a_resume_keeps_the_micro_batches_bit_for_bit(tmp_path, data, monkeypatch):
    """Reference: the run that was not stopped. In between other programs take the memory of the GPU."""
    changes = {"data_path": data, "device": None, **AUTO_RUN, "lr_schedule": "constant"}
    with simulated_cuda():
        whole = train(out_dir=tmp_path / "whole", **changes, epochs=2)
        train(out_dir=tmp_path / "parts", **changes, epochs=1)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 20, 24 << 30))
        resumed = train(out_dir=tmp_path / "parts", **changes, epochs=2, from_resume=1)
    assert resumed.settings.batch_size == whole.settings.batch_size == 64
    assert resumed.settings.warmup_iters == whole.settings.warmup_iters == 2
    kept = Path(tmp_path / "parts/pretrain_16.settings.yaml").read_text()
    assert "batch_size: 64\n" in kept and "accumulation_steps: 1\n" in kept
    assert resumed.progress.update == whole.progress.update
    assert_same_weights(resumed, whole)


def test_a_run_that_has_saved_nothing_chooses_its_micro_batches_anew(tmp_path):
    """It may have run out of memory in its first update: a launcher that starts it again must not repeat that."""
    settings = PretrainSettings.parse(["--batch_size", "auto", "--from_resume", "1"])
    (tmp_path / "run.settings.yaml").write_text("batch_size: 256\naccumulation_steps: 1\n")
    assert recorded_rows(settings, tmp_path / "run") is None
    (tmp_path / "run_resume").mkdir()
    (tmp_path / "run_resume" / "update_00000001.pt").write_bytes(b"")
    assert recorded_rows(settings, tmp_path / "run") == 256


def test_a_budget_leaves_the_batch_to_its_plan(monkeypatch, data):
    """`auto` beside it is as if nothing had been said."""
    asked = []

    def plan_run(settings, *_):
        asked.append(settings.user_set)
        return settings

    monkeypatch.setattr(command, "plan_run", plan_run)
    argv = ["--device", "cpu", "--data_path", str(data), "--budget_tokens", "3e5", "--seed", "1", "--dry_run"]
    for batch_size, expected in (("auto", set()), ("16", {"batch_size"})):
        assert train_pretrain.main([*argv, "--batch_size", batch_size]) == 0
        assert asked.pop() == {"device", "data_path", "budget_tokens", "seed", "dry_run", *expected}
