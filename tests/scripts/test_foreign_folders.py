"""scripts/common.py: folders that nobody should trust, of models that transformers builds. Each ends in one line."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from common.errors import UserError
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from model.hf_format import load_config
from scripts import generate
from scripts.common import end_ids, load_model
from scripts.play import PlayedModel
from tests.helpers import copy_tokenizer, tiny_model, write_weights
from tests.model.public import change_config, write_public


@pytest.fixture
def folder(tmp_path):
    """A Llama with the repository's tokenizer."""
    write_public(tmp_path / "llama", "llama", vocab_size=6400)
    return copy_tokenizer(tmp_path / "llama")


def refused(folder, message):
    with pytest.raises(ValueError, match=message) as error:
        load_model(folder)
    line = str(error.value)
    assert str(folder) in line and "\n" not in line and len(line) < 400


def write(folder, kind):
    """A tiny model in a folder. The fields of a GPT-2 have names of their own."""
    if kind == "minimind":
        tiny_model().save_pretrained(folder)
    elif kind == "gpt2":
        torch.manual_seed(0)
        sizes = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
        GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder)
    else:
        write_public(folder, kind)


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3_moe", "minimind", "gpt2"])
def test_what_the_weights_hold_is_loaded(tmp_path, kind):
    """References: the weights in the file; the logits of transformers' own loader."""
    write(tmp_path, kind)
    model = load_model(tmp_path)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    loaded = model.state_dict()
    # transformers keeps the experts of a layer in one tensor.
    held = {name: weights for name, weights in load_file(tmp_path / "model.safetensors").items() if name in loaded}
    assert held and all(torch.equal(loaded[name], weights.float()) for name, weights in held.items())
    if kind == "minimind":
        return
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, theirs(ids).logits)


def test_a_config_that_is_none_or_of_more_weights_than_there_are_builds_nothing(tmp_path):
    write(tmp_path, "gpt2")
    whole = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "no config can be loaded from there")
    (tmp_path / "config.json").write_text(whole)
    change_config(tmp_path, vocab_size=340)
    refused(tmp_path, r"wte.weight is \[320, 32\] in the file, \[340, 32\] in the config")
    change_config(tmp_path, vocab_size=3_000_000)
    refused(tmp_path, "asks for 96,.* parameters, the weight files have")
    change_config(tmp_path, n_layer=50_000_000)
    refused(tmp_path, "n_layer is more than 2,000")
    with pytest.raises(UserError, match="n_layer is more than 2,000"):
        load_config("--discriminator", tmp_path)


def answer(folder, capsys, *flags):
    words = ["--weight", str(folder), "--device", "cpu", "--max_new_tokens", "12", "--temperature", "0", *flags]
    assert generate.main([*words, "the cat"]) == 0
    return capsys.readouterr()


def test_generation_settings_that_are_none(folder):
    for content in ("{", "[]", "[" * 100_000):
        (folder / "generation_config.json").write_text(content)
        refused(folder, "generation_config.json: (not JSON|not a JSON object)")


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
def test_each_of_several_tokens_ends_a_text(folder, capsys, place):
    """Reference: the greedy tokens of the same model without such an end."""
    model = load_model(folder)
    tokenizer = load_tokenizer(folder)
    ids = DocumentEncoder(tokenizer).prompt_ids("the cat")
    sampling = generate.Sampling(max_new_tokens=12, temperature=0.0, top_p=1.0)
    written = generate.generate(model, tokenizer, [ids], sampling)[0]
    third = written[2]
    first = written.index(third)
    ends = [tokenizer.eos_token_id, third]
    if place == "config.json":
        (folder / "generation_config.json").unlink(missing_ok=True)
        change_config(folder, eos_token_id=ends)
    else:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert f"[{first + 1} token" in answer(folder, capsys).err
    played = PlayedModel("llama", load_model(folder), tokenizer, DocumentEncoder(tokenizer))
    outcome = played.write({"text": "the cat", "sampling": sampling, "seed": 0}, lambda pieces: None)
    assert (outcome["reason"], outcome["tokens"]) == ("end", first + 1)


def test_how_a_text_is_sampled_the_flags_say_alone(folder, capsys):
    """Reference: the text without the file."""
    (folder / "generation_config.json").unlink(missing_ok=True)
    expected = answer(folder, capsys).out
    odd = {"top_k": [1], "cache_implementation": "nope", "max_length": "a", "temperature": "hot"}
    for fields in (odd, {"min_new_tokens": 500, "no_repeat_ngram_size": 1}):
        (folder / "generation_config.json").write_text(json.dumps(fields))
        assert answer(folder, capsys).out == expected


def test_several_ends_of_a_pth_end_a_text(tmp_path):
    """As `--to_pth` writes them for a Llama with several. A single one is the tokenizer's to say."""
    for eos, expected in (([2, 7], [2, 7]), (7, [2])):
        weight = write_weights(tmp_path / "pretrain_32", vocab_size=6400, eos_token_id=eos)
        assert end_ids(load_model(weight), 2) == expected
