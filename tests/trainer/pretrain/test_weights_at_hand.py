"""What is said where weights are missing: the flags that it names are taken by the trainer that said it."""

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


def test_a_fine_tuning_without_its_weights_names_those_that_are_there(data, tmp_path):
    """The trainer reads their shape in the .json beside them: no further flag is needed. MiniMind's own have none."""
    shape = {"hidden_size": 24, "num_attention_heads": 4, "use_moe": 1, "generation": "minimind3"}
    train(data_path=data, out_dir=tmp_path, **shape)
    # As a user calls it, who says nothing of the model.
    nothing_said = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"))
    plain = flags(
        **nothing_said, data_path=chats.write_chats(tmp_path / "c.jsonl", 8), max_seq_len=64, out_dir=tmp_path
    )

    def words_named() -> list[str]:
        with pytest.raises(UserError, match="--from_weight pretrain: .*pretrain_512.pth; there is ") as missing:
            train_sft.main(plain)
        (named,) = re.findall(r"\((--from_weight .*)\)", str(missing.value))
        return shlex.split(named)

    words = words_named()
    assert words == ["--from_weight", str(tmp_path / "pretrain_24_moe.pth")]
    assert train_sft.main([*plain, *words, "--max_updates", "1", "--save_weight", "new"]) == 0
    (tmp_path / "new_24_moe.pth").unlink()
    (tmp_path / "pretrain_24_moe.json").unlink()
    assert words_named()[2:] == ["--hidden_size", "24", "--use_moe", "1"]


def weight(folder, name, seconds=0):
    path = folder / name
    path.write_bytes(b"")
    os.utime(path, (seconds, seconds))
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
