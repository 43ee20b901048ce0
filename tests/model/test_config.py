"""MiniMindConfig against the table of the two public generations, and its way through JSON."""

import json

import pytest
import torch
from transformers import AutoConfig

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

# What the numbers of parameters below do not tell
COMMON = {"rope_theta": 1e6, "max_position_embeddings": 32768, "num_experts": 4, "norm_topk_prob": True}
GENERATIONS = {
    "minimind2": {"rms_norm_eps": 1e-5, "num_key_value_heads": 2, "num_experts_per_tok": 2, "n_shared_experts": 1}
    | {"router_aux_loss_coef": 0.1, "seq_aux": True},
    "minimind3": {"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "num_experts_per_tok": 1, "n_shared_experts": 0}
    | {"router_aux_loss_coef": 5e-4, "seq_aux": False},
}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_defaults_are_those_of_the_public_generation(generation):
    config = MiniMindConfig(generation=generation)
    expected = COMMON | GENERATIONS[generation]
    assert {name: getattr(config, name) for name in expected} == expected


def test_parameter_counts_are_the_published_ones():
    large = {"hidden_size": 768, "num_hidden_layers": 16}
    for fields, millions in (({}, 25.83), (large, 104.03), ({"generation": "minimind3"}, 63.91)):
        with torch.device("meta"):
            model = MiniMindForCausalLM(MiniMindConfig(**fields))
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_moe_fields_go_by_both_names():
    old = MiniMindConfig(use_moe=True, n_routed_experts=6, aux_loss_alpha=0.2)
    new = MiniMindConfig(use_moe=True, num_experts=6, router_aux_loss_coef=0.2)
    assert old == new and old.n_routed_experts == old.num_experts == 6 and new.aux_loss_alpha == 0.2
    assert MiniMindConfig(num_experts=6, n_routed_experts=6).num_experts == 6
    saved = new.to_dict()  # the public code of either generation finds its own name in our file
    assert saved["n_routed_experts"] == saved["num_experts"] == 6
    with pytest.raises(ValueError, match="n_routed_experts=4 and num_experts=6"):
        MiniMindConfig(num_experts=6, n_routed_experts=4)


def test_config_errors_are_one_line_and_name_the_fields():
    for fields, message in (
        ({"generation": "minimind9"}, "generation='minimind9'"),
        ({"hidden_size": 100}, "hidden_size=100 is not divisible by num_attention_heads=8"),
        ({"num_attention_heads": 3, "hidden_size": 6}, "divisible by num_key_value_heads=2 (--num_key_value_heads)"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok=3 is not within num_experts=2"),
        ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ({"head_dim": 15}, "head_dim=15 is not even"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling="),
    ):
        with pytest.raises(ValueError) as error:
            MiniMindConfig(**fields)
        assert message in str(error.value) and "\n" not in str(error.value)


def test_config_round_trips_through_json_exactly(tmp_path):
    for fields in (
        {},
        {"generation": "minimind3", "use_moe": True, "hidden_size": 96, "head_dim": 32, "dropout": 0.1},
        {"n_shared_experts": 0, "seq_aux": False, "norm_topk_prob": False, "rms_norm_eps": 1e-3, "pad_token_id": None},
        {"generation": "minimind3", "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 16, "beta_slow": 2}},
    ):
        config = MiniMindConfig(**fields)
        assert MiniMindConfig(**json.loads(json.dumps(config.to_dict()))).to_dict() == config.to_dict()
        config.save_pretrained(tmp_path)
        for loaded in (MiniMindConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
            assert type(loaded) is MiniMindConfig and loaded.to_diff_dict() == config.to_diff_dict()


def test_public_spelling_of_yarn():
    config = MiniMindConfig(generation="minimind3", inference_rope_scaling=True)
    assert (config.yarn_factor, config.yarn_beta_fast, config.yarn_beta_slow) == (16, 32, 1)
    assert config.yarn_original_positions == 2048
    config = MiniMindConfig(rope_parameters={"rope_type": "yarn", "rope_theta": 5e4, "factor": 4})
    assert (config.inference_rope_scaling, config.rope_theta, config.yarn_factor) == (True, 5e4, 4)
    config = MiniMindConfig(rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 512})
    assert config.inference_rope_scaling and (config.yarn_factor, config.yarn_original_positions) == (4, 512)
