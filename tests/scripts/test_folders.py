"""scripts/common.py: folders of other people's models, which MiniMind computes exactly or refuses in one line."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from model.decoding import Sampling
from scripts import generate
from scripts.common import end_ids, load_model
from scripts.export_hf import export
from scripts.play import PlayedModel
from tests.helpers import copy_tokenizer, write_weights
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
    assert str(folder) in line and "\n" not in line and len(line) < 500


@pytest.mark.parametrize("kind", ["gpt2", "mamba", "qwen2", "bert"])
def test_a_model_that_minimind_does_not_compute_is_refused_with_who_does(tmp_path, kind):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    refused(tmp_path, f"model_type '{kind}': MiniMind has no such form; .*`transformers chat`.*lm_eval")


def test_a_config_that_is_none_or_of_more_weights_than_there_are_builds_nothing(folder):
    change_config(folder, vocab_size=3_000_000)
    refused(folder, "not the weights of this config")
    change_config(folder, num_hidden_layers=50_000_000)
    refused(folder, "num_hidden_layers is more than 2,000")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json: not JSON")
    # Generation settings that are none
    write_public(folder, "llama", vocab_size=6400)
    for content in ("{", "[]", "[" * 100_000):
        (folder / "generation_config.json").write_text(content)
        refused(folder, "generation_config.json: (not JSON|not a JSON object)")


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_each_of_several_tokens_ends_a_text(folder, tmp_path, file):
    """Reference: the greedy tokens of the same model in transformers. An export of the folder has the same ends."""
    tokenizer = load_tokenizer(folder)
    ids = DocumentEncoder(tokenizer).prompt_ids("the cat")
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    written = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=-1)[0, len(ids) :]
    first = written.tolist().index(written[2])
    ends = [tokenizer.eos_token_id, int(written[2])]
    if file == "config.json":
        (folder / "generation_config.json").unlink()
        change_config(folder, eos_token_id=ends)
    else:
        (folder / file).write_text(json.dumps({"eos_token_id": ends, "min_new_tokens": 500, "max_length": "a"}))
    sampling = Sampling(max_new_tokens=12, temperature=0.0, top_p=1.0)
    export(folder, tmp_path / "again")
    for weight in (folder, tmp_path / "again"):
        model = load_model(weight, with_interface=False)
        assert not isinstance(model, PreTrainedModel)
        assert generate.generate(model, tokenizer, [ids], sampling)[0] == written[: first + 1].tolist()
        played = PlayedModel("llama", model, tokenizer, DocumentEncoder(tokenizer))
        outcome = played.write({"text": "the cat", "sampling": sampling, "seed": 0}, lambda pieces: None)
        assert (outcome["reason"], outcome["tokens"]) == ("end", first + 1)


def test_several_ends_of_a_pth_end_a_text(tmp_path):
    """As `--to_pth` writes them for a Llama with several. A single one is the tokenizer's to say."""
    for eos, expected in (([2, 7], [2, 7]), (7, [2])):
        weight = write_weights(tmp_path / "pretrain_32", vocab_size=6400, eos_token_id=eos)
        assert end_ids(load_model(weight), 2) == expected
