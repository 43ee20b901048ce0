"""How special tokens inside a text were read is part of a weight: whoever reads the weight follows, or is refused."""

import json

import pytest

from common.errors import UserError
from scripts import evaluate, export_hf
from scripts.common import load
from tests.helpers import records, train, write_texts

MARKED = [f"<|im_start|>How much is {i} and one?<|im_end|> <|im_start|>It is {i + 1}.<|im_end|>" for i in range(60)]


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """(the data, validation data, the folder of a run with --parse_special_tokens 1, that run)"""
    folder = tmp_path_factory.mktemp("marked")
    data, val = write_texts(folder / "t.jsonl", MARKED[:40]), write_texts(folder / "v.jsonl", MARKED[40:])
    run = train(data_path=data, val_path=val, out_dir=folder / "out", parse_special_tokens=1, learning_rate=0.01)
    return data, val, folder / "out", run


@pytest.mark.slow
def test_scripts_read_a_text_as_the_weight_was_trained(marked, tmp_path):
    """The same documents have the same loss in evaluate.py as in the trainer, from an export and on the way back too."""
    _, val, out, run = marked
    weight = out / "pretrain_16.pth"
    assert json.loads(weight.with_suffix(".json").read_text())["parse_special_tokens"] is True
    export_hf.main(["--weight", str(weight), "--out_dir", str(tmp_path / "hf")])
    export_hf.main(["--weight", str(tmp_path / "hf"), "--to_pth", str(tmp_path / "back.pth")])
    trained = records(run, "val_loss")[-1]["val_loss"]
    for path in (weight, tmp_path / "hf", tmp_path / "back.pth"):
        named = ["--weight", str(path), "--out", str(tmp_path / path.name), "--device", "cpu", "--dtype", "float32"]
        assert evaluate.main(["perplexity", *named, "--data_path", val]) == 0
        result = json.loads((tmp_path / f"{path.name}.json").read_text())
        # The window is that of training, too.
        assert result["max_length"] == run.job.settings.max_seq_len
        assert result["metrics"]["loss"]["value"] == pytest.approx(trained, abs=2e-3)


def test_a_run_from_a_weight_follows_it_and_what_would_read_otherwise_names_the_flag(marked, tmp_path, capsys):
    data, val, out, _ = marked
    weight = out / "pretrain_16.pth"
    assert train(data_path=data, out_dir=tmp_path, from_weight=weight).job.parts.encoder.parse_special_tokens
    assert load(str(tmp_path / "pretrain_16.pth"))[2].parse_special_tokens
    with pytest.raises(SystemExit) as ended:
        train(data_path=data, out_dir=tmp_path, from_weight=weight, parse_special_tokens=0)
    assert ended.value.code == 2 and "--parse_special_tokens 0" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"\(--parse_special_tokens\): True there, False in this run"):
        train(data_path=data, val_path=val, out_dir=out, from_resume=1, epochs=2, learning_rate=0.01)


def test_spelt_tokens_are_told_where_nobody_chose_to_read_them_as_text(marked, tmp_path, capsys):
    data, *_ = marked
    few = write_texts(tmp_path / "few.jsonl", MARKED[:2] + ["plain text"] * 38)
    for folder, changes, is_told in (
        ("not asked", {"data_path": data}, True),
        ("chosen", {"data_path": data, "parse_special_tokens": 0}, False),
        ("few", {"data_path": few}, False),
        # A weight that was read without them cannot be given the flag.
        ("by a weight", {"data_path": data, "from_weight": tmp_path / "few" / "pretrain_16.pth"}, True),
    ):
        train(out_dir=tmp_path / folder, **changes)
        told = "40 of the first 40 documents spell <|im_start|>" in capsys.readouterr().out
        assert told == is_told, folder
