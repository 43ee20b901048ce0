"""What a user can mend: exactly one line on stderr that names the cause, exit code 2, no traceback."""

import os

import pytest

from tests import helpers
from tests.helpers import flags, train
from trainer import train_pretrain


def complaint(capsys, **changes):
    """The one line on stderr with which a run with these flags ends."""
    return helpers.complaint(capsys, train_pretrain.main, flags(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size=30 is not divisible by num_attention_heads=4"),
        ({"device": "cuda:9"}, "--device cuda:9"),
        ({"data_path": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"ddp": "true"}, "torchrun --nproc_per_node"),
        ({"tokenizer_path": os.path.dirname(__file__)}, os.path.dirname(__file__)),
        ({"from_weight": "sft"}, "sft_16.pth"),
    ],
)
def test_flags(capsys, data, tmp_path, changes, words):
    assert words in complaint(capsys, **{"data_path": data, "out_dir": tmp_path, **changes})


def test_weights_of_another_shape(capsys, data, tmp_path):
    train(data_path=data, out_dir=tmp_path)
    weights = tmp_path / "pretrain_16.pth"
    for changes in ({"num_hidden_layers": 2}, {"use_moe": 1}, {"generation": "minimind3", "num_key_value_heads": 2}):
        line = complaint(capsys, data_path=data, out_dir=tmp_path / "out", from_weight=weights, **changes)
        assert weights.stem in line
