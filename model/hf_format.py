"""The two MiniMind generations as architectures that Hugging Face transformers has of its own, and back.

State dicts here have the key names of published checkpoints (each expert by itself), which transformers, vLLM and
llama.cpp read alike. H hidden, I intermediate, N query heads, G key/value heads, D head dimension.
"""

import re
from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

from model.config import ALL_EXPORTS, EXPERT_EXPORTS, MiniMindConfig, fields_exported

SAME = fields_exported(ALL_EXPORTS)
MOE = fields_exported(EXPERT_EXPORTS)
# {(generation, whether it has experts): (class of its config, name of its model)}
HF_CLASSES: dict[tuple[str, bool], tuple[type[PretrainedConfig], str]] = {
    ("minimind2", False): (LlamaConfig, "LlamaForCausalLM"),
    ("minimind2", True): (Qwen2MoeConfig, "Qwen2MoeForCausalLM"),
    ("minimind3", False): (Qwen3Config, "Qwen3ForCausalLM"),
    ("minimind3", True): (Qwen3MoeConfig, "Qwen3MoeForCausalLM"),
}
# {model_type of theirs: (generation, whether it has experts)}
KINDS = {config_class.model_type: kind for kind, (config_class, _) in HF_CLASSES.items()}

StateDict = dict[str, torch.Tensor]


def hf_config(config: MiniMindConfig) -> PretrainedConfig:
    """MiniMindConfig -> the transformers config of the architecture that computes the same.

    Errors: ValueError for a minimind3 with shared experts, which Qwen3-MoE has none of.
    """
    if config.generation == "minimind3" and config.use_moe and config.n_shared_experts:
        raise ValueError("a minimind3 with shared experts has no twin in transformers: it cannot be exported")
    config_class, name = HF_CLASSES[config.generation, config.use_moe]
    fields: dict[str, Any] = {field: getattr(config, field) for field in SAME}
    if config.use_moe:
        fields.update({field: getattr(config, field) for field in MOE})
        # Every layer has experts.
        fields.update(decoder_sparse_step=1, mlp_only_layers=[])
    if config.generation == "minimind2" and config.use_moe:
        # minimind2 does not normalise the weight of a single expert.
        fields["norm_topk_prob"] = config.norm_topk_prob and config.num_experts_per_tok > 1
        fields["shared_expert_intermediate_size"] = max(config.n_shared_experts, 1) * config.moe_intermediate_size
        # Of zeros, see to_hf.
        fields["qkv_bias"] = True
    else:
        fields["attention_bias"] = False
    fields["rope_parameters"] = rope_parameters(config)
    return config_class(**fields, architectures=[name])


def rope_parameters(config: MiniMindConfig) -> dict[str, Any]:
    """How their attention is to rotate."""
    if not config.inference_rope_scaling:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    return {
        "rope_type": "yarn",
        "rope_theta": config.rope_theta,
        "factor": config.yarn_factor,
        "beta_fast": config.yarn_beta_fast,
        "beta_slow": config.yarn_beta_slow,
        "original_max_position_embeddings": config.yarn_original_positions,
        # MiniMind does not rescale the logits.
        "attention_factor": 1.0,
    }


def to_hf(state: StateDict, config: MiniMindConfig) -> StateDict:
    """State dict of MiniMindForCausalLM -> that of its twin, a tied head left out.

    Qwen2-MoE multiplies its one shared expert by sigmoid(w·x). With w = 0 that is exactly 1/2, so down_proj is doubled,
    which is exact too. Several shared experts are one whose hidden units are theirs together; none is one of zeros.
    The zero biases are for readers that know Qwen2-MoE with biases only; x + 0 is x.
    """
    state = {name: tensor.float() for name, tensor in state.items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    if not (config.generation == "minimind2" and config.use_moe):
        return state
    H = config.hidden_size
    width = config.moe_intermediate_size
    for layer in range(config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp."
        attention = f"model.layers.{layer}.self_attn."
        # axis: of the hidden units, along which the experts are joined.
        for matrix, axis, scale, shape in (
            ("gate_proj", 0, 1, (width, H)),
            ("up_proj", 0, 1, (width, H)),
            ("down_proj", 1, 2, (H, width)),
        ):
            names = [f"{mlp}shared_experts.{s}.{matrix}.weight" for s in range(config.n_shared_experts)]
            parts = [state.pop(name) for name in names]
            if not parts:
                parts = [torch.zeros(shape)]
            state[f"{mlp}shared_expert.{matrix}.weight"] = torch.cat(parts, dim=axis) * scale
        state[f"{mlp}shared_expert_gate.weight"] = torch.zeros(1, H)
        for matrix in ("q_proj", "k_proj", "v_proj"):
            state[f"{attention}{matrix}.bias"] = torch.zeros(len(state[f"{attention}{matrix}.weight"]))
    return state


# Which fields a config of theirs has depends on its class, so no common type has them.
def from_hf(theirs: Any, state: StateDict) -> tuple[MiniMindConfig, StateDict]:
    """(transformers config, state dict of a checkpoint) -> (MiniMindConfig, state dict for strict loading), fp32.

    Errors: ValueError that names what MiniMind does not have.
    """
    if theirs.model_type not in KINDS:
        raise ValueError(f"model_type {theirs.model_type}: MiniMind has no such form; one of {', '.join(KINDS)}")
    generation, use_moe = KINDS[theirs.model_type]
    check_form(theirs, generation, use_moe)
    fields: dict[str, Any] = {field: getattr(theirs, field) for field in SAME if hasattr(theirs, field)}
    fields.update(generation=generation, use_moe=use_moe, **rope_fields(theirs))
    if use_moe:
        fields.update({field: getattr(theirs, field) for field in MOE})
    if generation == "minimind2" and use_moe:
        width = theirs.moe_intermediate_size
        if theirs.shared_expert_intermediate_size % width:
            raise ValueError("shared_expert_intermediate_size is no multiple of moe_intermediate_size")
        fields["n_shared_experts"] = theirs.shared_expert_intermediate_size // width
        fields["norm_topk_prob"] = theirs.norm_topk_prob or theirs.num_experts_per_tok == 1
        if theirs.norm_topk_prob and theirs.num_experts_per_tok == 1:
            raise ValueError("one expert per token with norm_topk_prob: minimind2 does not normalise a single weight")
    config = MiniMindConfig(**fields)
    state = {name: tensor.float() for name, tensor in state.items()}
    if generation == "minimind2" and use_moe:
        split_shared_experts(state, config)
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    # A list, since entries are removed on the way.
    for name in list(state):
        if name.endswith(".bias") and state.pop(name).any():
            raise ValueError(f"{name} is not zero: MiniMind has no biases")
    return config, state


def check_form(theirs: Any, generation: str, use_moe: bool) -> None:
    """ValueError for settings of their config that MiniMind has no counterpart of."""
    if theirs.hidden_act != "silu" or getattr(theirs, "use_sliding_window", False):
        raise ValueError("MiniMind has silu and full attention only")
    if use_moe and (getattr(theirs, "decoder_sparse_step", 1) != 1 or getattr(theirs, "mlp_only_layers", None)):
        raise ValueError("every layer of a MiniMind with experts has them: decoder_sparse_step 1, no mlp_only_layers")
    if generation == "minimind3" and use_moe and not theirs.norm_topk_prob:
        raise ValueError("minimind3 normalises the experts' weights: norm_topk_prob must be true")


def rope_fields(theirs: Any) -> dict[str, Any]:
    """Our fields of the rotation. Errors: ValueError for a kind that MiniMind does not have."""
    rope = theirs.rope_parameters
    fields = {"rope_theta": rope["rope_theta"]}
    if rope["rope_type"] == "yarn":
        names = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "attention_factor")
        given = {name: rope[name] for name in names if rope.get(name) is not None}
        fields["rope_scaling"] = {"type": "yarn", **given}
    elif rope["rope_type"] != "default":
        raise ValueError(f"rope_type {rope['rope_type']}: MiniMind has default and yarn")
    return fields


def split_shared_experts(state: StateDict, config: MiniMindConfig) -> None:
    """In place: one gated shared expert -> n_shared_experts without a gate."""
    for layer in range(config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp."
        if state.pop(f"{mlp}shared_expert_gate.weight").any():
            raise ValueError(f"{mlp}shared_expert_gate is not zero: MiniMind's shared experts have no gate")
        for matrix, axis, scale in (("gate_proj", 0, 1), ("up_proj", 0, 1), ("down_proj", 1, 0.5)):
            parts = state.pop(f"{mlp}shared_expert.{matrix}.weight").chunk(config.n_shared_experts, dim=axis)
            for s, part in enumerate(parts):
                state[f"{mlp}shared_experts.{s}.{matrix}.weight"] = part.contiguous() * scale
    stray = [name for name in state if re.search(r"shared_expert[._]", name)]
    assert not stray, stray
