"""scripts/common.py: folders that nobody should trust, of models that transformers builds. Each ends in one line."""

import shutil

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from common.errors import UserError
from model import config_bounds
from scripts.common import load_model
from tests.helpers import ROOT, tiny_model
from tests.model.public import change_config, write_public


@pytest.fixture
def folder(tmp_path):
    """A Llama with the repository's tokenizer."""
    write_public(tmp_path / "llama", "llama", vocab_size=6400)
    add_tokenizer(tmp_path / "llama")
    return tmp_path / "llama"


def add_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "model" / name, folder)


def refused(folder, message):
    with pytest.raises(UserError, match=message) as error:
        load_model(folder)
    line = str(error.value)
    assert str(folder) in line and "\n" not in line and len(line) < 400


# ------------------------------------------------------------------------------------ more than the weights can hold


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "minimind", "gpt2"])
def test_layers_that_no_model_has_are_not_built(tmp_path, kind):
    write(tmp_path, kind)
    change_config(tmp_path, **{"n_layer" if kind == "gpt2" else "num_hidden_layers": 10**7})
    refused(tmp_path, "10000000, and at most 2,000 layers")


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("llama", {"hidden_size": 10**7, "head_dim": 12}, "asks for 3,200,000,000 numbers or more"),
        ("llama", {"vocab_size": 10**9}, "asks for 32,000,000,000 numbers or more"),
        ("llama", {"intermediate_size": 10**9}, "asks for 32,000,0"),
        ("qwen3_moe", {"num_experts": 10**7, "num_local_experts": 10**7}, "asks for (more than 200,000 tensors|[0-9,]+ num)"),
        ("minimind", {"hidden_size": 10**7}, "numbers or more"),
        ("gpt2", {"n_positions": 10**8}, "numbers or more"),
    ],
)  # fmt: skip
def test_sizes_that_the_weights_cannot_hold_are_not_built(tmp_path, kind, changes, message):
    write(tmp_path, kind)
    change_config(tmp_path, **changes)
    refused(tmp_path, message)


def write(folder, kind):
    """A tiny model in a folder."""
    if kind == "minimind":
        tiny_model().save_pretrained(folder)
    elif kind == "gpt2":
        gpt2().save_pretrained(folder)
    else:
        write_public(folder, kind)


def gpt2(**changes):
    """Its fields have names of their own."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **changes})).eval()


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe", "minimind", "gpt2"])
def test_what_the_weights_hold_is_loaded(tmp_path, kind):
    """Reference: the logits of transformers' own loader need no test; here nothing is refused that is whole."""
    write(tmp_path, kind)
    model = load_model(tmp_path)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("content", ["{", "[]", "3", "{" * 100_000, '{"a": "' + "x" * (1 << 21) + '"}'])
def test_a_config_that_is_none(tmp_path, content):
    write(tmp_path, "llama")
    (tmp_path / "config.json").write_text(content)
    refused(tmp_path, "not JSON|not a JSON object|larger than")


def test_a_model_of_too_many_small_tensors_is_not_built(tmp_path, monkeypatch):
    """Each of them takes time, however small it is."""
    write(tmp_path, "llama")
    monkeypatch.setattr(config_bounds, "MOST_TENSORS", 20)
    refused(tmp_path, "asks for more than 20 tensors")
