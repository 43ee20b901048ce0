"""First weights, and what is said where weights are missing. References: zeros, and the weights that are there; of
induction heads what two heads with the textbook's patterns do to a text that is said twice."""

import os

import pytest
import torch
from torch.nn.functional import cross_entropy

from common.errors import UserError
from model.config import ModelConfig
from model.model_minimind import MiniMindForCausalLM
from model.weight_record import existing_weights_hint
from scripts import arguments, generate
from tests import chats
from tests.helpers import flags, train
from trainer import train_sft
from trainer.pretrain.initial_model import init_model


def weight(folder, name, seconds=0):
    path = folder / name
    path.write_bytes(b"")
    os.utime(path, (seconds, seconds))
    return path


def test_a_fine_tuning_starts_from_the_newest_weights_unless_it_is_told_others(data, tmp_path, capsys):
    """The trainer reads their shape in the .json beside them: no further flag is needed."""
    shape = {"hidden_size": 24, "num_attention_heads": 4, "use_moe": 1, "generation": "minimind3"}
    train(data_path=data, out_dir=tmp_path, **shape)
    # As a user calls it, who says nothing of the model.
    nothing_said = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"))
    text = chats.write_chats(tmp_path / "c.jsonl", 8)
    plain = flags(**nothing_said, data_path=text, max_seq_len=64, out_dir=tmp_path)
    there = tmp_path / "pretrain_24_moe.pth"
    with pytest.raises(UserError, match=f"--from_weight pretrain: .*pretrain_512.pth; there is {there}$"):
        train_sft.main([*plain, "--from_weight", "pretrain"])
    # By its path, or by the name that MiniMind gives it, or without a name
    for named in (["--from_weight", str(there)], ["--hidden_size", "24", "--use_moe", "1"], []):
        assert train_sft.main([*plain, *named, "--max_updates", "1", "--save_weight", "new"]) == 0
        assert (f"weights: {there} (--from_weight" in capsys.readouterr().out) == ("--from_weight" not in named)
    # A resume goes on with the weights that its run began with, though newer ones have come.
    weight(tmp_path, "pretrain_99.pth", 2**31)
    assert train_sft.main([*plain, "--max_updates", "1", "--save_weight", "new", "--from_resume", "1"]) == 0
    assert f"weights: {there} (--from_weight" in capsys.readouterr().out


def test_the_newest_weights_are_named_and_are_the_default_of_the_scripts(tmp_path, monkeypatch, capsys):
    """Checkpoints of MiniMind's own trainer, copies of the lowest loss, folders and other files do not count."""
    monkeypatch.chdir(tmp_path)
    assert existing_weights_hint(tmp_path / "nowhere").startswith("nowhere has no weights yet: make pretrain")
    for name, seconds in (("a_256.pth", 9), ("pretrain_256.pth", 1), ("pretrain_64.pth", 2), ("b.pth", 8)):
        weight(tmp_path, name, seconds)
    for name in ("pretrain_512_resume.pth", "pretrain_512.json", "a_256.best.pth"):
        weight(tmp_path, name, 99)
    (tmp_path / "folder.pth").mkdir()
    assert existing_weights_hint(tmp_path / "nowhere", tmp_path) == "there is a_256.pth"
    with pytest.raises(UserError, match=r"^pretrain_512.pth: no such file; there is a_256.pth$"):
        generate.main(["--weight", "pretrain_512.pth"])
    monkeypatch.setattr(arguments, "DEFAULT_WEIGHT", tmp_path / "pretrain_512.pth")
    weight(tmp_path, "full_sft_64.pth", 3)
    # For questions the newest that was fine-tuned.
    for prefix, name in (("", "a_256.pth"), (arguments.FINE_TUNED, "full_sft_64.pth"), ("unknown", "a_256.pth")):
        assert arguments.weight_of(None, prefix) == name
        assert capsys.readouterr().err == f"weights: {name} (--weight names others)\n"


def test_the_first_weights_are_those_of_the_flag(data, tmp_path):
    """Every block starts as the identity; one update of nearly no rate."""
    run = train(data_path=data, out_dir=tmp_path, init_scheme="zero_out", max_updates=1, learning_rate=1e-12)
    assert run.job.model.model.layers[0].self_attn.o_proj.weight.abs().max() < 1e-9


@pytest.mark.parametrize("shape", [(64, 2, 1, 1), (96, 2, 1, 1), (128, 4, 2, 1), (256, 3, 4, 2)])
def test_a_text_said_twice_is_expected_the_second_time(shape):
    """And only by these initial weights: other ones know nothing of it."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = ModelConfig(**dict(zip(names, shape, strict=True)))
    once = torch.randint(3, config.vocab_size, (2, 100), generator=torch.Generator().manual_seed(1))
    twice = torch.cat([once, once], dim=1)
    gained = {}
    for scheme in ("zero_out", "induction"):
        torch.manual_seed(1)
        model = init_model(MiniMindForCausalLM, config, "none", "out", scheme).eval()
        with torch.no_grad():
            # as large as embeddings are after a few updates
            model.lm_head.weight[:, :-1] *= 5
            losses = cross_entropy(model(twice).logits[:, :-1].mT, twice[:, 1:], reduction="none")
        gained[scheme] = losses[:, :99].mean() - losses[:, 100:].mean()
    assert gained["induction"] > 1 and abs(gained["zero_out"]) < 0.3


@pytest.mark.parametrize(("width", "entries", "factor"), [(128, 12_800, 1), (128, 51_200, 2), (64, 12_800, 2)])
def test_induction_heads_tell_many_entries_apart_by_larger_embeddings(width, entries, factor):
    """Reference: a uniform distribution within 1 / sqrt(width)."""
    config = ModelConfig(hidden_size=width, num_hidden_layers=2, num_attention_heads=2, vocab_size=entries)
    embeddings = init_model(MiniMindForCausalLM, config, "none", "out", "induction").lm_head.weight[:, :-1]
    assert embeddings.std().item() == pytest.approx(factor / (3 * width) ** 0.5, rel=0.01)
