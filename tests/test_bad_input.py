"""What a user can mend: exactly one line on stderr that names the cause, exit code 2, no traceback."""

import json
import os

import pytest
import torch

from tests import helpers
from tests.helpers import flags, train
from trainer import train_pretrain


def complaint(capsys, **changes):
    """The one line on stderr with which a run with these flags ends."""
    return helpers.complaint(capsys, train_pretrain.main, flags(**changes))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "data.jsonl: no such file"),
        ("\n", "data.jsonl"),
        ('{"text": ""}\n', "data.jsonl"),
        ('{"text": "good"}\n{"text": null}\n{"text": "good too"}', "data.jsonl:2: 'text' is a null"),
    ],
)
def test_data(capsys, tmp_path, content, words):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    assert words in complaint(capsys, data_path=path, out_dir=tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no_such_flag": 1}, "--no_such_flag"),
        ({"dtype": "float8"}, "--dtype"),
        ({"batch_size": 0}, "--batch_size"),
        ({"val_fraction": 0.1, "val_path": "x.jsonl"}, "--val_path"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size=30 is not divisible by num_attention_heads=4"),
        ({"max_seq_len": 32769}, "--max_seq_len 32769 is beyond the position table of 32768"),
        ({"device": "cuda:9"}, "--device cuda:9"),
        ({"ddp": "true"}, "torchrun --nproc_per_node"),
        ({"tokenizer_path": "/no/tokenizer/here"}, "/no/tokenizer/here"),
        ({"tokenizer_path": os.path.dirname(__file__)}, os.path.dirname(__file__)),
        ({"out_dir": __file__}, __file__),
        ({"out_dir": f"{__file__}/below"}, __file__),
        ({"from_weight": "sft"}, "sft_16.pth"),
    ],
)
def test_flags(capsys, data, tmp_path, changes, words):
    assert words in complaint(capsys, **{"data_path": data, "out_dir": tmp_path, **changes})


@pytest.fixture(scope="module")
def weights(data, tmp_path_factory):
    """The .pth of a short run."""
    folder = tmp_path_factory.mktemp("weights")
    train(data_path=data, out_dir=folder)
    return folder / "pretrain_16.pth"


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 2}, {"use_moe": 1}, {"generation": "minimind3", "num_key_value_heads": 2}],
)
def test_weights_of_another_shape(capsys, data, weights, tmp_path, changes):
    line = complaint(capsys, **{"data_path": data, "out_dir": tmp_path, "from_weight": weights, **changes})
    assert weights.stem in line


def test_token_id_beyond_the_vocabulary_of_the_weights(capsys, data, weights, tmp_path):
    """Weights of a model with 300 tokens, and a tokenizer with 6,400."""
    state = torch.load(weights, weights_only=True)
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        state[key] = state["model.embed_tokens.weight"][:300].clone()
    torch.save(state, tmp_path / "small.pth")
    config = json.loads(weights.with_suffix(".json").read_text())
    del config["weights_sha256"]
    (tmp_path / "small.json").write_text(json.dumps({**config, "vocab_size": 300}))
    line = complaint(capsys, data_path=data, out_dir=tmp_path, from_weight=tmp_path / "small.pth")
    assert "embeddings for 300" in line


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs a folder in which even root cannot write")
def test_out_dir_that_is_not_writable(capsys, data):
    assert "/proc/self/fd" in complaint(capsys, data_path=data, out_dir="/proc/self/fd")
