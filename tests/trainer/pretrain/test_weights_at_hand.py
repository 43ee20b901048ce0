"""What is said where weights are missing: the flags that it names are taken by the trainer that said it."""

import json
import os
import re
import shlex

import pytest

from common.errors import UserError
from scripts import evaluate, export_gguf, export_hf, generate, play
from tests import chats
from tests.helpers import flags, train
from trainer import train_sft
from trainer.pretrain.weights_at_hand import flags_of_trainer, weights_in, weights_instead


def test_a_fine_tuning_without_its_weights_names_the_flags_of_those_that_are_there(data, tmp_path):
    """They differ from the defaults in every way that flags have."""
    shape = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "use_moe": 1,
        "generation": "minimind3",
    }
    train(data_path=data, out_dir=tmp_path, **shape)
    conversations = chats.write_chats(tmp_path / "chats.jsonl", 8)
    # As a user calls it, who says nothing of the model.
    plain = {
        "hidden_size": None,
        "num_hidden_layers": None,
        "num_attention_heads": None,
        "data_path": conversations,
        "max_seq_len": 64,
    }
    with pytest.raises(UserError, match="--from_weight pretrain: .*pretrain_512.pth; there is ") as missing:
        train_sft.main(flags(**plain, out_dir=tmp_path))
    (named,) = re.findall(r"\((--from_weight .*)\)", str(missing.value))
    words = shlex.split(named)
    assert words[0] == "--from_weight" and words[1].endswith("pretrain_24_moe.pth")
    assert {f"--{name}" for name in shape} <= set(words[2::2])
    assert train_sft.main([*flags(**plain, out_dir=tmp_path, max_updates=1), *words]) == 0
    assert (tmp_path / "full_sft_24_moe.pth").exists()


def weight(folder, name, seconds=0, **fields):
    path = folder / name
    path.write_bytes(b"")
    os.utime(path, (seconds, seconds))
    if fields:
        path.with_suffix(".json").write_text(json.dumps(fields), encoding="utf-8")
    return path


def test_the_wanted_kind_comes_first_then_the_newest(tmp_path):
    """Checkpoints of MiniMind's own trainer, folders and other files are no weights."""
    for name, seconds in (("full_sft_256.pth", 9), ("pretrain_256.pth", 1), ("pretrain_64.pth", 2), ("b.pth", 8)):
        weight(tmp_path, name, seconds)
    weight(tmp_path, "pretrain_512_resume.pth", 99)
    weight(tmp_path, "pretrain_512.json", 99)
    (tmp_path / "folder.pth").mkdir()
    names = [path.name for path in weights_in(tmp_path, "pretrain")]
    assert names == ["pretrain_64.pth", "pretrain_256.pth", "full_sft_256.pth", "b.pth"]
    assert [path.name for path in weights_in(tmp_path, "pretrian_256")] == names
    said = weights_instead(tmp_path / "nowhere", tmp_path, first="pretrain")
    assert said.startswith("there are ") and said.endswith("full_sft_256.pth, and 1 more")


def test_paths_are_told_as_one_would_type_them(tmp_path, monkeypatch):
    (tmp_path / "out dir").mkdir()
    path = weight(tmp_path / "out dir", "pretrain_256_moe.pth")
    monkeypatch.chdir(tmp_path)
    said = weights_instead(tmp_path / "out dir", flags_of=lambda path: flags_of_trainer(path, {"hidden_size": 512}))
    inside = os.path.join("out dir", "pretrain_256_moe.pth")
    assert said == f"there is {inside} (--from_weight {shlex.quote(inside)} --hidden_size 256 --use_moe 1)"
    path.unlink()
    assert weights_instead(tmp_path / "out dir").startswith("out dir has no weights yet: make pretrain")
    assert "no weights yet" in weights_instead(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "7" * 50},
        {"hidden_size": [256]},
        {"hidden_size": 10**40},
        {"generation": "\u202e" * 30},
        "x",
        None,
    ],
    ids=repr,
)
def test_a_json_that_says_anything_makes_no_long_line(tmp_path, fields):
    path = weight(tmp_path, "pretrain.pth")
    if fields is not None:
        path.with_suffix(".json").write_text(json.dumps(fields), encoding="utf-8")
    assert shlex.split(flags_of_trainer(path, {})) == ["--from_weight", str(path)]


SCRIPTS = {
    generate: [],
    evaluate: ["perplexity", "--data_path", "TEXT"],
    export_hf: ["--out_dir", "out"],
    export_gguf: ["--out", "a.gguf"],
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_each_script_names_the_weights_that_are_there(script, data, tmp_path, monkeypatch):
    if script is export_gguf:
        pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    weight(tmp_path, "pretrain_256.pth")
    places = {"CHATS": str(chats.write_chats(tmp_path / "chats.jsonl", 8)), "TEXT": str(data)}
    arguments = [places.get(word, word) for word in SCRIPTS[script]]
    with pytest.raises(UserError, match=r"^pretrain_512.pth: no such file; there is pretrain_256.pth$"):
        script.main([*arguments, "--weight", "pretrain_512.pth"])


def test_the_page_without_its_default_weight_names_those_that_are_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(play, "DEFAULT_WEIGHT", tmp_path / "pretrain_512.pth")
    weight(tmp_path, "pretrain_256.pth")
    play.open_server(play.play_parser().parse_args(["--port", "0", "--out_dir", str(tmp_path)])).server_close()
    assert "is not there: only runs are shown; there is pretrain_256.pth" in capsys.readouterr().out
