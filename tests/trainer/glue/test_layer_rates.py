"""Rates by layer, of tiny networks of 49 families. Reference: for each family the names that its layers and its embeddings
have, read in its code."""

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.trainer.glue.test_padding import FAMILIES
from trainer.glue.layer_rates import depths, layer_groups
from trainer.glue.padding import choose_way

# A parameter of a layer, and one that lies below all layers; all others are the head's.
USUAL = (r"\.encoder\.layer\.(\d+)\.", r"\.\w*embeddings\w*\.")
OF_FAMILY = {
    # One layer, which is computed as often as the config says.
    "albert": (r"\.albert_layer_groups\.(\d+)\.", r"\.embeddings\.|embedding_hidden_mapping_in"),
    # Its own encoder of characters lies below, and the way back to characters above.
    "canine": (r"canine\.encoder\.layer\.(\d+)\.", r"char_embeddings|initial_char|chars_to_molecules"),
    "distilbert": (r"\.transformer\.layer\.(\d+)\.", r"\.embeddings\."),
    # `contact_head` has no part in it, and is trained by nothing.
    "esmc": (r"\.layers\.(\d+)\.", "embed_tokens"),
    "esm": (USUAL[0], r"\.embeddings\.|contact_head"),
    "eurobert": (r"\.layers\.(\d+)\.", "embed_tokens"),
    "flaubert": (r"\.(?:attentions|layer_norm1|ffns|layer_norm2)\.(\d+)\.", "embeddings|layer_norm_emb"),
    "funnel": (r"\.blocks\.(\d+)\.", r"\.embeddings\."),
    "gte": (r"\.layers\.(\d+)\.", r"\.embeddings\."),
    "jina_embeddings_v3": (r"\.layers\.(\d+)\.", r"\.embeddings\."),
    # What is there for pictures trains nothing.
    "layoutlmv3": (USUAL[0], r"\.embeddings\.|rel_pos_|layoutlmv3\.(?:cls_token|pos_embed|patch_embed|LayerNorm|norm)"),
    "modernbert": (r"\.layers\.(\d+)\.", r"\.embeddings\."),
    "mpnet": (USUAL[0], r"\.embeddings\.|relative_attention_bias"),
    "nomic_bert": (r"\.layers\.(\d+)\.", r"\.embeddings\."),
    "perceiver": (r"\.self_attends\.(\d+)\.", r"input_preprocessor|embeddings\.latents|encoder\.cross_attention"),
    "rembert": (USUAL[0], r"\.embeddings\.|embedding_hidden_mapping_in"),
    "roformer": (USUAL[0], r"\.embeddings\.|embed_positions"),
    "squeezebert": (r"\.encoder\.layers\.(\d+)\.", r"\.embeddings\."),
    "ultrabert": (r"\.layers\.(\d+)\.", "embed_tokens"),
    "xlm": (r"\.(?:attentions|layer_norm1|ffns|layer_norm2)\.(\d+)\.", "embeddings|layer_norm_emb"),
    "xlnet": (r"transformer\.layer\.(\d+)\.", "word_embedding|mask_emb"),
}


def model_of(family, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **changes}, num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config)
    choose_way(model, family, 64)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_the_exponent_of_its_depth(family):
    model = model_of(family)
    groups = layer_groups(model, depths(model, 64), 0.01, 0.5)
    exponents = {}
    for group in groups:
        assert group["lr_scale"] == 0.5 ** group["exponent"]
        for parameter in group["params"]:
            assert id(parameter) not in exponents
            exponents[id(parameter)] = group["exponent"]
    layer_pattern, below_pattern = OF_FAMILY.get(family, USUAL)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == len(exponents)
    layers = {name: int(found[1]) for name in trained if (found := re.search(layer_pattern, name))}
    n_layers = max(layers.values()) + 1
    for name, parameter in trained.items():
        wanted = 0
        if name in layers:
            wanted = n_layers - layers[name]
        elif re.search(below_pattern, name):
            wanted = n_layers + 1
        assert exponents[id(parameter)] == wanted, name
    # The head is there, the layers without a gap, and the embeddings.
    assert set(exponents.values()) == set(range(n_layers + 2))


def test_a_funnel_counts_its_layers_across_blocks():
    model = model_of("funnel", block_sizes=[2, 1])
    depth_of = depths(model, 64)
    found = {name.split(".attention")[0]: depth for name, depth in depth_of.items() if name.endswith("q_head.weight")}
    assert list(found.values()) == [3, 2, 1]
    assert list(found) == [f"funnel.encoder.blocks.{place}" for place in ("0.0", "0.1", "1.0")]


def test_layers_that_share_their_weights_are_one():
    """Twelve passes through two sets of weights."""
    model = model_of("albert", num_hidden_layers=12, num_hidden_groups=2)
    depth_of = depths(model, 64)
    assert depth_of["albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.weight"] == 2
    assert depth_of["albert.encoder.albert_layer_groups.1.albert_layers.0.ffn.weight"] == 1
    assert depth_of["albert.embeddings.word_embeddings.weight"] == 3


def test_the_short_example_leaves_the_model_as_it_was():
    model = model_of("bert").train()
    depths(model, 64)
    assert model.training and not torch.nn.modules.module._global_forward_pre_hooks
