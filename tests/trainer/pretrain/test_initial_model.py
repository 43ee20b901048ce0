"""First weights, and what is said where weights are missing. References: zeros, and the weights that are there."""

import os

import pytest

from common.errors import UserError
from model.weight_record import existing_weights_hint
from scripts import arguments, generate
from tests import chats
from tests.helpers import flags, train
from trainer import train_sft


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
