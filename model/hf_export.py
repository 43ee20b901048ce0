"""The weights of a MiniMind under the names of its counterpart in transformers; hf_format.py has the config, and the way back."""

import torch

from model.config import MiniMindConfig
from model.pth_format import StateDict


def to_hf(state: StateDict, config: MiniMindConfig) -> StateDict:
    """State dict of MiniMindForCausalLM -> that of its counterpart, without a tied head.

    Qwen2-MoE multiplies its one shared expert by sigmoid(w·x). With w = 0 that is exactly 1/2, so down_proj is doubled,
    which is exact too. Several shared experts are concatenated along their hidden units; none becomes one of zeros.
    The zero biases are for readers that only know Qwen2-MoE with biases; x + 0 is x.
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
        # axis: that of the hidden units, for the concatenation
        for matrix, axis, scale, shape in (
            ("gate_proj", 0, 1, (width, H)),
            ("up_proj", 0, 1, (width, H)),
            ("down_proj", 1, 2, (H, width)),
        ):
            names = [f"{mlp}shared_experts.{s}.{matrix}.weight" for s in range(config.n_shared_experts)]
            parts = [state.pop(name) for name in names] or [torch.zeros(shape)]
            state[f"{mlp}shared_expert.{matrix}.weight"] = torch.cat(parts, dim=axis) * scale
        state[f"{mlp}shared_expert_gate.weight"] = torch.zeros(1, H)
        for matrix in ("q_proj", "k_proj", "v_proj"):
            state[f"{attention}{matrix}.bias"] = torch.zeros(len(state[f"{attention}{matrix}.weight"]))
    return state
