"""trainer/tour.py is what train_pretrain.py does, on one page: the reference is train_pretrain.py with the same flags."""

import inspect
import re

import pytest
import torch

from common.errors import UserError
from dataset.packing import naive_rows
from model import loss, plain
from tests.helpers import write_corpus
from trainer import tour, train_pretrain

# The trainer's ways that the tour has not: other precision, compiled code, several processes.
PLAIN = ("--dtype", "float32", "--use_compile", "0", "--cpu_processes", "1", "--device", "cpu", "--report", "0")


def test_the_whole_of_it_has_510_lines_as_the_readme_says():
    assert round(sum(len(inspect.getsource(part).splitlines()) for part in (tour, plain, loss, naive_rows)), -1) == 510


@pytest.mark.parametrize("text", ["", '{"text": 5}\n', "[]\n"])
def test_a_file_without_texts_gets_one_line(text, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match='each line must be an object {"text": "..."}'):
        tour.train(tour.parse_args([f"--data_path={path}", f"--out_dir={tmp_path}"]))


@pytest.mark.parametrize(("epochs", "max_updates"), [(2, 0), (1, 3)])
def test_tour_has_the_losses_and_weights_of_the_trainer(epochs, max_updates, tmp_path, capsys):
    """Two epochs whose last update is short, of two micro-batches, whose last one is short too."""
    same = {"hidden_size": 32, "num_hidden_layers": 2, "max_seq_len": 24, "batch_size": 3}
    same |= {"accumulation_steps": 2, "epochs": epochs, "max_updates": max_updates, "log_interval": 3}
    same |= {"learning_rate": 0.02, "grad_clip": 0.5}
    same |= {"data_path": write_corpus(tmp_path / "data.jsonl"), "out_dir": tmp_path}
    with open(same["data_path"], "a") as file:
        file.write('{"text": ""}\n{"text": "<|im_start|>as in MiniMind<|im_end|>"}\n')
    shared = [f"--{name}={value}" for name, value in same.items()]
    tour.train(tour.parse_args(shared))
    of_tour = capsys.readouterr().out
    assert train_pretrain.main([*shared, *PLAIN]) == 0

    line = re.compile(r"Epoch:\S+ loss:\S+ lr:\S+")
    lines = line.findall(of_tour)
    assert len(lines) > 2
    assert lines == line.findall(capsys.readouterr().out)
    ours, theirs = (torch.load(tmp_path / f"{name}_32.pth", weights_only=True) for name in ("tour", "pretrain"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
