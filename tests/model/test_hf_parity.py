"""The model against Hugging Face's twins on copied weights."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

SIZE = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
THEIRS = {
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def ours(**fields):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(**SIZE, **fields)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ones would hide a wrong norm
            parameter.data.uniform_(0.5, 1.5)
    return model


def assert_same(model, twin):
    twin = twin.eval()
    torch.manual_seed(1)
    input_ids = torch.randint(3, 97, (3, 33))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, :7] = 0
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids).logits, twin(input_ids).logits, atol=1e-5, rtol=0)
        padded = [m(input_ids, attention_mask=attention_mask).logits[attention_mask.bool()] for m in (model, twin)]
        torch.testing.assert_close(*padded, atol=1e-5, rtol=0)
    losses = [m(input_ids, labels=input_ids).loss for m in (model, twin)]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=0)
    return input_ids


def test_dense_minimind2_is_a_llama():
    model = ours()
    config = LlamaConfig(**SIZE, **THEIRS, intermediate_size=128, rms_norm_eps=1e-5, max_position_embeddings=32768)
    twin = LlamaForCausalLM(config)
    twin.load_state_dict(model.state_dict(), strict=True)
    assert_same(model, twin)


@pytest.mark.parametrize("head_dim", [12, 32])
def test_dense_minimind3_is_a_qwen3(head_dim):
    model = ours(generation="minimind3", head_dim=head_dim, intermediate_size=192)
    config = Qwen3Config(
        **SIZE, **THEIRS, head_dim=head_dim, intermediate_size=192, rms_norm_eps=1e-6, max_position_embeddings=32768
    )
    twin = Qwen3ForCausalLM(config)
    twin.load_state_dict(model.state_dict(), strict=True)
    assert_same(model, twin)


def test_yarn_is_that_of_qwen3():
    """Hugging Face's yarn with attention_factor 1, at positions beyond the original length."""
    yarn = {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 2048}
    model = ours(generation="minimind3", head_dim=64, intermediate_size=192, inference_rope_scaling=True)
    rope = dict(rope_type="yarn", rope_theta=1e6, attention_factor=1.0, **yarn)
    theirs = {name: value for name, value in THEIRS.items() if name != "rope_theta"}
    config = Qwen3Config(
        **SIZE, **theirs, head_dim=64, intermediate_size=192, max_position_embeddings=32768, rope_parameters=rope
    )
    twin = Qwen3ForCausalLM(config).eval()
    twin.load_state_dict(model.state_dict(), strict=True)
    input_ids, position_ids = torch.randint(3, 97, (1, 40)), torch.arange(0, 20000, 500).unsqueeze(0)
    with torch.no_grad():
        both = [m(input_ids, position_ids=position_ids).logits for m in (model, twin)]
    torch.testing.assert_close(*both, atol=1e-5, rtol=0)


@pytest.mark.parametrize("k", [1, 2])
def test_moe_minimind3_is_a_qwen3_moe(k):
    model = ours(generation="minimind3", use_moe=True, num_experts=4, num_experts_per_tok=k, moe_intermediate_size=64)
    config = Qwen3MoeConfig(
        **SIZE,
        **THEIRS,
        head_dim=12,
        num_experts=4,
        num_experts_per_tok=k,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
    )
    twin = Qwen3MoeForCausalLM(config)
    twin.load_state_dict(fused_experts(model.state_dict(), twin.state_dict()), strict=True)
    assert_same(model, twin)


def fused_experts(ours, theirs):
    """transformers 5 keeps the experts of a layer in two tensors: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    state = {}
    for key in theirs:
        if key.endswith("experts.gate_up_proj"):
            prefix = key.removesuffix("gate_up_proj")
            pairs = [torch.cat([ours[f"{prefix}{e}.{n}.weight"] for n in ("gate_proj", "up_proj")]) for e in range(4)]
            state[key] = torch.stack(pairs)
        elif key.endswith("experts.down_proj"):
            prefix = key.removesuffix("down_proj")
            state[key] = torch.stack([ours[f"{prefix}{e}.down_proj.weight"] for e in range(4)])
        else:
            state[key] = ours[key]
    return state
