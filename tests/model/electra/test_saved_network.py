"""What is read from a folder is all of a network, or an error: transformers fills what is missing with random numbers."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, ElectraForMaskedLM, ElectraForSequenceClassification

from common.errors import UserError
from model.electra.model_electra import ElectraPretrainer, configs
from model.electra.saved_network import load_network
from model.electra.sizes import SIZES
from tests.model.public import change_config

TINY = {"layers": 1, "width": 32, "heads": 4, "ffn": 64, "embedding": 16}


@pytest.fixture
def folder(tmp_path):
    """Both networks of an ELECTRA."""
    model = ElectraPretrainer.from_configs(*configs(SIZES["small"], 60, **TINY))
    model.generator.save_pretrained(tmp_path / "generator")
    model.discriminator.save_pretrained(tmp_path / "discriminator")
    return tmp_path


def refused(load, match):
    with pytest.raises(UserError, match=match) as caught:
        load()
    assert "\n" not in str(caught.value)


def test_a_fine_tuned_encoder_is_no_discriminator(folder):
    tuned = ElectraForSequenceClassification.from_pretrained(folder / "discriminator")
    tuned.save_pretrained(folder / "discriminator")
    refused(
        lambda: ElectraPretrainer.from_pretrained(folder),
        "discriminator: 4 weights of an ElectraForPreTraining are not in there, discriminator_predictions",
    )


def test_a_generator_that_lacks_a_weight_is_refused(folder):
    path = folder / "generator" / "model.safetensors"
    weights = load_file(path)
    del weights["electra.encoder.layer.0.output.dense.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    refused(lambda: ElectraPretrainer.from_pretrained(folder), "generator: 1 weights of an ElectraForMaskedLM")


def test_another_kind_of_model_is_refused(folder):
    config = BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertForMaskedLM(config).save_pretrained(folder / "generator")
    refused(lambda: ElectraPretrainer.from_pretrained(folder), "generator: a model of the kind bert; a network of an")


def test_what_was_saved_in_half_precision_is_read_in_fp32(folder):
    network = ElectraForMaskedLM.from_pretrained(folder / "generator").to(torch.bfloat16)
    network.save_pretrained(folder / "generator")
    found = load_network("a", folder / "generator", ElectraForMaskedLM)
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    assert torch.equal(found.electra.embeddings.LayerNorm.weight, network.electra.embeddings.LayerNorm.weight.float())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000, and at most 2,000 layers are built"),
        ({"hidden_size": 10**7}, "asks for [0-9,]+ numbers or more"),
        ({"vocab_size": 10**9}, "asks for 16,000,000,000 numbers or more"),
    ],
)
def test_more_than_the_weights_can_hold_is_not_built(folder, changes, message):
    change_config(folder / "generator", **changes)
    refused(lambda: ElectraPretrainer.from_pretrained(folder), message)
