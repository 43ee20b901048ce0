"""Small models of the architectures that transformers has, with random weights, in folders as people publish them."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers import change_json

SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
# {name: (type of the model, fields beside SIZES)}
KINDS = {
    "llama": ("llama", {"rms_norm_eps": 1e-5, "head_dim": 12}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
}


def public_model(kind, **fields):
    """A model of KINDS in eval mode, all of its weights random but those that a MiniMind has none of."""
    model_type, own = KINDS[kind]
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 50_000.0}
    config = AutoConfig.for_model(model_type, **{**SIZES, **own, "rope_parameters": rope, **fields})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias") or "shared_expert_gate" in name:
                parameter.zero_()
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.2)
    return model


def write_public(folder, kind, dtype=torch.float32, max_shard_size="10MB", **fields):
    """Such a model in a folder; returns the model. Where dtype is none of float32, it is spoilt by the cast."""
    model = public_model(kind, **fields).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def change_config(folder, **changes):
    """Change fields of the folder's config.json; None takes a field out."""
    change_json(folder / "config.json", **changes)
