"""train_sft.py. References: an undisturbed run, one with padded rows, one process, and the loss of the answers by hand."""

import math
import re

import pytest
import torch

from dataset.tokenizing.encoder import load_tokenizer
from model.model_minimind import MiniMindForCausalLM
from tests.chats import ids_and_mask, train, turn, write_chats
from tests.helpers import ROOT, flags, losses, records, write_corpus, write_records
from tests.helpers import train as pretrain
from trainer import train_sft
from trainer.sft import job
from trainer.sft.settings import SftSettings


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 40)


def answers_loss(weight, path):
    """Mean cross-entropy of the tokens that the assistant wrote, one conversation after the other."""
    model = MiniMindForCausalLM.from_pth(weight)
    tokenizer = load_tokenizer(ROOT / "model")
    total, count = 0.0, 0
    for record in records(path, None):
        ids, mask = ids_and_mask(tokenizer, {"messages": record["conversations"]})
        with torch.no_grad():
            log_probabilities = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
        for at, (target, is_trained) in enumerate(zip(ids[1:], mask[1:], strict=True)):
            total -= float(log_probabilities[at, target]) * is_trained
            count += is_trained
    return total / count


def test_it_goes_on_from_the_pretrained_weights_and_leaves_minimind_s_files(tmp_path, chats):
    """The loss of the first update, which holds all conversations, is that of the pretrained model on the answers."""
    pretrain(data_path=write_corpus(tmp_path / "text.jsonl", 20), out_dir=tmp_path, dropout=0.1)
    options = {"from_weight": None, "batch_size": 64, "accumulation_steps": 1, "report": 1}
    run = train(data_path=chats, out_dir=tmp_path, epochs=2, **options)
    assert losses(run)[0] == pytest.approx(answers_loss(tmp_path / "pretrain_16.pth", chats), rel=1e-3)
    for ending in (".pth", ".json", ".settings.yaml", ".metrics.jsonl", ".report.html", ".loss.png", "_resume"):
        assert (tmp_path / f"full_sft_16{ending}").exists()
    assert MiniMindForCausalLM.from_pth(tmp_path / "full_sft_16.pth").config.hidden_size == 16
    assert train_sft.main(["--config", str(tmp_path / "full_sft_16.settings.yaml"), "--from_resume", "1"]) == 0
    assert run.settings.learning_rate == 1e-5 and run.progress.epoch == 2 and run.engine.model.config.dropout == 0
    page = (tmp_path / "full_sft_16.report.html").read_text(encoding="utf-8")
    assert "--chat" in page and "scripts/play.py --weight" in page and "bits per byte" not in page.lower()
    assert "40 conversations in rows" in page and not re.search(r"\d documents?\b", page)


def test_validation_is_the_loss_of_the_answers_that_are_held_out(tmp_path, chats):
    held_out = write_chats(tmp_path / "val.jsonl", 20, seed=9, most_words=4)
    run = train(data_path=chats, val_path=held_out, out_dir=tmp_path, epochs=1)
    (record,) = records(run, "val_loss")
    wanted = answers_loss(tmp_path / "full_sft_16.pth", held_out)
    assert record["val_loss"] == pytest.approx(wanted, rel=1e-5)
    assert record["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-4) and "bits_per_byte" not in record


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"dry_run": 1}, {}])
def test_a_budget_plans_the_updates_and_the_rate(tmp_path, chats, capsys, more):
    pretrain(data_path=write_corpus(tmp_path / "text.jsonl", 20), out_dir=tmp_path)
    capsys.readouterr()
    arguments = flags(
        data_path=chats, out_dir=tmp_path, budget_tokens=20_000, max_seq_len=64, batch_size=None, accumulation_steps=None,
        log_interval=None, **more,
    )  # fmt: skip
    assert train_sft.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "python trainer/train_sft.py" in shown and "not known for such a run" in shown
    assert "--optimizer muon" in shown and "--learning_rate 0.002" in shown
    assert (tmp_path / "full_sft_16.pth").exists() is not bool(more)


@pytest.mark.slow
def test_little_text_is_learned_by_the_defaults(tmp_path, capsys):
    """Six conversations, which MiniMind's two updates at 1e-5 would leave as they were."""
    pairs = [("Who are you?", "I am a tiny model."), ("What is up?", "The sky."), ("What is down?", "The ground."),
             ("Who made you?", "A student."), ("你好", "你好！"), ("Bye", "See you.")]  # fmt: skip
    lines = [{"messages": [turn("user", asked), turn("assistant", said)]} for asked, said in pairs]
    chats = write_records(tmp_path / "chats.jsonl", lines)
    run = train(
        data_path=chats, out_dir=tmp_path, hidden_size=128, num_hidden_layers=2, batch_size=None, accumulation_steps=None,
        sample_prompts="Who are you?",
    )  # fmt: skip
    chosen = "--optimizer muon --learning_rate 0.002 --lr_schedule linear --batch_size 8 --epochs 40"
    assert chosen in capsys.readouterr().out
    assert losses(run)[-1] < 0.5 and records(run, "prompt")[-1]["text"] == "I am a tiny model."


def settings_for(path, n_bytes, *words):
    with open(path, "wb") as file:
        file.truncate(n_bytes)
    return SftSettings.parse(["--data_path", str(path), "--from_weight", "none", *words])


def test_big_data_keeps_minimind_settings(tmp_path):
    settings = settings_for(tmp_path / "sft.jsonl", job.LARGE_BYTES)
    assert job.defaults_for_data_size(settings) == (settings, None)
    assert (settings.learning_rate, settings.epochs, settings.batch_size, settings.optimizer) == (1e-5, 2, 16, "adamw")


def test_auto_batches_have_as_many_passes_as_the_usual_ones(tmp_path):
    """Reference: the same text with the rows of an update said."""
    path = tmp_path / "sft.jsonl"
    of_rows = [settings_for(path, 1_200_000, "--batch_size", rows) for rows in ("auto", "16")]
    (auto, line), (said, _) = map(job.defaults_for_data_size, of_rows)
    assert auto.epochs == said.epochs == 13 and auto.batch_size == 0 and "--batch_size auto --epochs 13" in line
