"""benchmarks/time_to_loss.py. References: minutes and rates counted by hand, the other trainers' own settings, and the command
lines of bench.py and of the trainer."""

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer

from benchmarks import time_to_loss
from benchmarks.arguments import bench_parser, time_to_loss_parser
from benchmarks.sides import plain_steps, step_context, train_hf
from benchmarks.time_to_loss import RIVALS, ROWS, T, rival_flags
from benchmarks.trained import Outcome, flag_words
from benchmarks.training import LEARNING_RATE
from dataset.lm_dataset import PretrainDataset
from dataset.tokenizing.encoder import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.helpers import ROOT, write_corpus
from trainer.optim.schedules import SCHEDULES
from trainer.pretrain.settings import PretrainSettings


def turns(updates, seconds):
    """What bench.py keeps of a side."""
    return {"slices": [{"updates": updates, "seconds": seconds}]}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_the_flags_are_those_of_the_plain_loop(device, tmp_path, monkeypatch):
    """Reference: the rates and the optimiser of three of its updates, and the context that bench.py measures them in."""
    rival = RIVALS["plain"]
    settings = PretrainSettings.parse(
        flag_words(rival_flags(rival, "float32" if device == "cpu" else "bfloat16", LEARNING_RATE, 3))
    )
    made = []

    class Kept(torch.optim.AdamW):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(torch.optim, "AdamW", Kept)
    text = write_corpus(tmp_path / "text.jsonl", n_documents=4)
    tokenizer = load_tokenizer(ROOT / "model")
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=1, vocab_size=len(tokenizer)))
    rates = []
    for _ in plain_steps(model, PretrainDataset(text, tokenizer, 16), 2, 3, LEARNING_RATE):
        rates.append(made[0].param_groups[0]["lr"])
    (optimizer,) = made
    schedule = SCHEDULES[settings.lr_schedule]
    assert rates == pytest.approx([settings.learning_rate * schedule(update / 3) for update in range(3)])
    assert settings.optimizer == "adamw" and settings.weight_decay == optimizer.defaults["weight_decay"]
    assert not settings.pack and settings.warmup_iters == 0 and settings.max_updates == 3
    context = step_context(torch.device(device))
    dtype = context.fast_dtype if isinstance(context, torch.autocast) else torch.float32
    assert dtype is getattr(torch, settings.dtype)


def test_the_flags_are_those_of_the_hugging_face_trainer(tmp_path, monkeypatch):
    """Reference: the TrainingArguments of bench.py's side."""
    rival = RIVALS["hf"]
    settings = PretrainSettings.parse(flag_words(rival_flags(rival, rival.cpu_dtype, LEARNING_RATE, 20)))
    seen = []

    def train(trainer):
        seen.append((trainer.args, trainer.train_dataset))

    monkeypatch.setattr(Trainer, "train", train)
    text = write_corpus(tmp_path / "text.jsonl", n_documents=60)
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=1)
    train_hf(
        Namespace(max_seq_len=T, rows=ROWS, documents_file=text),
        config,
        torch.device("cpu"),
        SimpleNamespace(begin=lambda model: None),
    )
    ((theirs, rows),) = seen
    assert settings.batch_size * settings.accumulation_steps == theirs.per_device_train_batch_size
    assert theirs.gradient_accumulation_steps == 1
    assert settings.max_seq_len == len(rows[0]["input_ids"]) and settings.pack
    assert (
        settings.lr_schedule == theirs.lr_scheduler_type.value == "linear" and settings.learning_rate == LEARNING_RATE
    )
    assert settings.warmup_iters == theirs.warmup_steps == 0
    assert settings.weight_decay == theirs.weight_decay and settings.grad_clip == theirs.max_grad_norm
    assert settings.optimizer == "adamw" and theirs.optim == "adamw_torch_fused"
    assert theirs.bf16 == (settings.dtype == "bfloat16")


RUNS = ["hf_60_updates_bfloat16_rate_0.0005", "hf_60_updates_bfloat16_rate_0.001", "budget_90s"]


@pytest.fixture
def start(monkeypatch, tmp_path):
    """A function that calls the program and returns the settings of its three runs, whose bits per byte it is given.

    The other trainer makes an update a second in one form, and cannot start in the other.
    """

    def call(*bits, more=()):
        seen = {}

        def instead(work, name, flags):
            seen[name] = PretrainSettings.parse(list(flags))
            return Outcome(1_000_000, bits[len(seen) - 1], 3.0, 60, 240_000)

        monkeypatch.setattr(time_to_loss, "trained", instead)
        flags = ["--rival", "hf", "--minutes", "1", "--budget", "90s", "--rates", "5e-4", "1e-3", "--seed", "7"]
        flags += ["--data_path", "a", "b", "--val_path", "v", "--work", str(tmp_path), *more]
        time_to_loss.main(time_to_loss_parser().parse_args(flags))
        return seen

    def measure(words, check):
        asked = bench_parser().parse_args(words[2:])
        assert asked.sides == "hf,hf-compiled" and (asked.rows, asked.max_seq_len) == (ROWS, T)
        record = {"device": "cpu", "sides": {"hf": turns(3, 3.0)}}
        with open(asked.out, "w", encoding="utf-8") as file:
            json.dump([record], file)
        # A second start finds it.
        monkeypatch.setattr(time_to_loss, "subprocess", None)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(time_to_loss, "subprocess", SimpleNamespace(run=measure))
    return call


def test_the_best_rate_counts(start, tmp_path, capsys):
    """A budget between the losses of both rates does not reach the better one."""
    start(2.2, 2.1, 2.15)
    said = capsys.readouterr().out
    assert said.endswith("--budget 90s does not reach the loss that hf has after 1 minutes.\n")
    start(2.2, 2.1, 2.1)
    said = capsys.readouterr().out
    assert f"hf-compiled could not start and is left out; to measure again remove {tmp_path}/hf_bench.json" in said
    assert "hf: 1.00 updates/s, 60 in 1 minutes" in said
    assert "| --budget 90s | 1.5 | 1.00 M | 60 | 0.24 M | 3.000 | 2.1000 |" in said
    assert said.endswith("reaches the loss that hf has after 1 minutes: 0.7 times as fast, or faster.\n")


def test_the_runs_have_the_same_text_and_seed_and_the_budget_starts_afresh(start):
    runs = start(2.2, 2.1, 2.1)
    assert list(runs) == RUNS
    for settings in runs.values():
        assert (settings.data_path, settings.val_path, settings.seed) == (["a", "b"], ["v"], 7)
    *rivals, ours = runs.values()
    assert [settings.learning_rate for settings in rivals] == [5e-4, 1e-3]
    assert {settings.max_updates for settings in rivals} == {60}
    assert {settings.dtype for settings in rivals} == {"bfloat16"}
    assert ours.budget == "90s" and not ours.max_updates and ours.from_weight == "none"
