"""The two MiniMind generations in the terms of llama.cpp: its architecture that computes the same, settings, tensors.

llama.cpp reads names of its own: `blk.0.attn_q.weight` is `model.layers.0.self_attn.q_proj.weight`. The tables here are
those of its source (src/llama-arch.cpp and src/models). N query heads, G key/value heads, D head dimension, H hidden.
"""

import math

import torch

from common.errors import UserError
from model.config import ARCHITECTURE, YARN_FIELDS, MiniMindConfig
from model.hf_format import StateDict, hf_config, to_hf
from model.model_minimind import plain_frequencies, yarn

# What a GGUF file says of its model, by key.
Value = str | bool | int | float | list[str] | list[int]
Metadata = dict[str, Value]

# {(generation, whether it has experts): architecture of llama.cpp}. A minimind2 with experts is no Qwen2-MoE there, as it
# is in transformers: llama.cpp divides by the shared expert's gate, and a gate of zeros gives NaN.
ARCHITECTURES = {
    ("minimind2", False): "llama",
    ("minimind2", True): "bailingmoe",
    ("minimind3", False): "qwen3",
    ("minimind3", True): "qwen3moe",
}
# They rotate dimension 2i with dimension 2i + 1; the others, and MiniMind, rotate i with i + D/2.
ROTATE_NEIGHBOURS = ("llama", "bailingmoe")
# They have no tied head: the file holds the matrix twice.
NEED_OUTPUT = ("bailingmoe",)

OF_THE_MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
OF_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
# The routed experts of a layer are one tensor, [experts, out, in].
OF_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}

# The fields on which a model's result depends and that this file hands on, or that matter in training alone. A model with
# another one is refused: the file would hold a model that computes something else, and nothing here would notice.
HANDED_ON = {
    "generation", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "rms_norm_eps", "rope_theta", "dropout", "use_moe", "num_experts", "num_experts_per_tok",
    "n_shared_experts", "moe_intermediate_size", "router_aux_loss_coef", "seq_aux", "norm_topk_prob", *YARN_FIELDS,
}  # fmt: skip

# llama.cpp reads no others for these architectures.
YARN_BETAS = (32.0, 1.0)


def architecture_of(config: MiniMindConfig) -> str:
    """The name of the architecture. Errors: ValueError, or UserError, for a model that llama.cpp does not compute."""
    unknown = sorted(set(ARCHITECTURE) - HANDED_ON)
    if unknown:
        raise UserError(f"scripts/gguf_format.py does not tell llama.cpp of {unknown[0]}, on which the result depends")
    # Errors for what no architecture of others has.
    hf_config(config)
    if config.generation == "minimind3" and config.use_moe and not config.norm_topk_prob:
        raise UserError("llama.cpp always normalises the experts' weights of a Qwen3-MoE; norm_topk_prob is false here")
    if config.inference_rope_scaling:
        check_yarn(config)
    return ARCHITECTURES[config.generation, config.use_moe]


def model_metadata(config: MiniMindConfig) -> Metadata:
    """What llama.cpp has to know of the model besides its tensors. Errors: as `architecture_of`."""
    architecture = architecture_of(config)
    width = config.moe_intermediate_size if config.use_moe else config.intermediate_size
    fields: Metadata = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": width,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
    }
    if config.inference_rope_scaling:
        fields["rope.scaling.type"] = "yarn"
        fields["rope.scaling.factor"] = float(config.yarn_factor)
        fields["rope.scaling.original_context_length"] = config.yarn_original_positions
        # llama.cpp multiplies the rotated queries and keys by this, and by YaRN's 1 + ln(factor) / 10. MiniMind by neither.
        fields["rope.scaling.attn_factor"] = 1 / (1 + 0.1 * math.log(config.yarn_factor))
    if config.use_moe:
        fields["expert_count"] = config.num_experts
        fields["expert_used_count"] = config.num_experts_per_tok
        fields["expert_feed_forward_length"] = width
    if architecture == "bailingmoe":
        theirs = hf_config(config)
        fields["expert_shared_count"] = theirs.shared_expert_intermediate_size // width
        fields["expert_weights_norm"] = bool(theirs.norm_topk_prob)
        fields["expert_weights_scale"] = 1.0
        fields["leading_dense_block_count"] = 0
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def check_yarn(config: MiniMindConfig) -> None:
    """UserError where llama.cpp stretches the positions in another way than MiniMind does."""
    if (config.yarn_beta_fast, config.yarn_beta_slow) != YARN_BETAS:
        raise UserError(
            f"llama.cpp reads no beta_fast and beta_slow of YaRN for this model, and takes {YARN_BETAS[0]:g} and "
            f"{YARN_BETAS[1]:g}; here they are {config.yarn_beta_fast:g} and {config.yarn_beta_slow:g}"
        )
    frequencies = plain_frequencies(config, torch.device("cpu"))
    ours = yarn(config, frequencies)
    theirs = yarn_of_llama_cpp(config, frequencies)
    if not torch.allclose(ours, theirs, rtol=1e-5, atol=0):
        raise UserError(
            f"llama.cpp joins stretched and unstretched dimensions in another way than MiniMind where head_dim is "
            f"{config.head_dim} and YaRN's original length {config.yarn_original_positions}: it would compute another model"
        )


def yarn_of_llama_cpp(config: MiniMindConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """frequencies [D/2] -> [D/2], as ggml_rope_yarn_corr_dims and rope_yarn of ggml make them."""
    D = config.head_dim
    ends = []
    for beta in YARN_BETAS:
        turns = config.yarn_original_positions / (beta * 2 * math.pi)
        ends.append(D * math.log(turns) / (2 * math.log(config.rope_theta)))
    low = max(math.floor(ends[0]), 0)
    # MiniMind has D/2 - 1 here. So the two differ where few dimensions turn often.
    high = min(math.ceil(ends[1]), D - 1)
    index = torch.arange(len(frequencies), dtype=torch.float32)
    is_stretched = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / config.yarn_factor * is_stretched + frequencies * (1 - is_stretched)


def to_gguf(state: StateDict, config: MiniMindConfig) -> StateDict:
    """State dict of MiniMindForCausalLM -> tensors by the names of llama.cpp, in fp32.

    Several shared experts are one wide one, and none is one of zeros, as in `to_hf`.
    """
    architecture = ARCHITECTURES[config.generation, config.use_moe]
    theirs = to_hf(state, config)
    if architecture in NEED_OUTPUT:
        theirs.setdefault("lm_head.weight", theirs["model.embed_tokens.weight"])
    out: StateDict = {}
    for name, our_name in OF_THE_MODEL.items():
        if name in theirs:
            out[our_name] = theirs[name]
    for layer in range(config.num_hidden_layers):
        out.update(layer_to_gguf(theirs, config, layer))
    return out


def layer_to_gguf(theirs: StateDict, config: MiniMindConfig, layer: int) -> StateDict:
    """The tensors of one layer; theirs: what `to_hf` made."""
    architecture = ARCHITECTURES[config.generation, config.use_moe]
    block = f"blk.{layer}."
    out: StateDict = {}
    for module, name in OF_A_LAYER.items():
        tensor = theirs.get(f"model.layers.{layer}.{module}.weight")
        if tensor is None:
            continue
        if architecture in ROTATE_NEIGHBOURS and name == "attn_q":
            tensor = rows_for_neighbours(tensor, config.num_attention_heads)
        if architecture in ROTATE_NEIGHBOURS and name == "attn_k":
            tensor = rows_for_neighbours(tensor, config.num_key_value_heads)
        if name == "ffn_down_shexp":
            # `to_hf` doubles it, for the gate of 1/2 that Qwen2-MoE has. This architecture has no gate.
            tensor = tensor / 2
        out[f"{block}{name}.weight"] = tensor
    if config.use_moe:
        for matrix, name in OF_EXPERTS.items():
            experts = []
            for e in range(config.num_experts):
                experts.append(theirs[f"model.layers.{layer}.mlp.experts.{e}.{matrix}.weight"])
            out[f"{block}{name}.weight"] = torch.stack(experts)
    return out


def rows_for_neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * D, H] -> the same with rows i and i + D/2 of each head side by side, as rows 2i and 2i + 1."""
    rows, width = weight.shape
    halves = weight.view(heads, 2, rows // heads // 2, width)
    return halves.transpose(1, 2).reshape(rows, width)
