"""Checkpoints with a digest that holds and a content that is none: each is named, and the one before is taken."""

import hashlib
import io
import zipfile
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from tests.helpers import flags, train, write_corpus
from trainer import train_pretrain
from trainer.saving.checkpoint import load_checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in the middle of its second epoch, with its two newest checkpoints on disk."""
    folder = tmp_path_factory.mktemp("content")
    data = write_corpus(folder / "corpus.jsonl", 40)
    run = train(data_path=data, out_dir=folder, epochs=2, save_interval=3, use_moe=1, optimizer="muon")
    assert len(run.saver.checkpoints.paths()) == 2
    return run


def sign(path):
    Path(f"{path}.sha256").write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")


def packed(whole):
    """The archive of a checkpoint, compressed: torch writes none, and what a small one unpacks to has no bound."""
    archive = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as plain, zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as compressed:
        for name in plain.namelist():
            compressed.writestr(name, plain.read(name))
    return archive.getvalue()


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


OTHERS = {
    "text": lambda whole: b"some text\n",
    "compressed": packed,
    "a list": lambda whole: saved([1, 2]),
    "weights": lambda whole: saved({"lm_head.weight": torch.ones(3)}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_signed_file_of_another_kind_is_passed_over(run, name):
    path, before = run.saver.checkpoints.paths()
    whole = path.read_bytes()
    said = []
    run.reporter.say = said.append
    try:
        path.write_bytes(OTHERS[name](whole))
        sign(path)
        progress, _ = run.saver.resume()
    finally:
        del run.reporter.say
        path.write_bytes(whole)
        sign(path)
    state = load_checkpoint(before)
    for key, tensor in run.engine.model.state_dict().items():
        assert torch.equal(tensor, state["model"][key])
    assert progress.update == state["progress"]["update"]
    assert str(path) in said[0] and "\n" not in said[0] and f"resumed from {before}" in said[-1]


def test_all_of_them_wrong_is_one_line_and_exit_code_2(tmp_path, capsys):
    data = write_corpus(tmp_path / "corpus.jsonl", 20)
    paths = train(data_path=data, out_dir=tmp_path, epochs=2, save_interval=2).saver.checkpoints.paths()
    for path in paths:
        path.write_bytes(b"some text\n")
        sign(path)
    capsys.readouterr()
    with pytest.raises(UserError, match=f"none of its {len(paths)} checkpoints is intact") as error:
        train_pretrain.main(flags(data_path=data, out_dir=tmp_path, epochs=3, from_resume=1))
    assert "\n" not in str(error.value)
    said = capsys.readouterr().out
    assert all(str(path) in said for path in paths)
