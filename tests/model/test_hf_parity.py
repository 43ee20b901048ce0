"""The model against Hugging Face's twins on copied weights."""

import torch
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
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
