"""A MiniMind and its tokenizer in llama.cpp's format, by the optional package gguf.

D: head dimension.
"""

import json
import math
import re
from collections import defaultdict
from itertools import count, islice

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, TokenType
from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from common.wording import announce
from dataset.tokenizing.byte_level_bpe import PIECE_RULES, piece_rule
from model.config import ARCHITECTURE, YARN_NAMES, ModelConfig
from model.hf_format import YARN_BETAS, StateDict, hf_config, to_hf
from scripts.chat_template import default_template

# {(generation, has experts): architecture of llama.cpp}. In transformers a minimind2 with experts is a Qwen2-MoE. Not
# here: llama.cpp divides by the shared expert's gate, and a gate of zeros gives NaN.
ARCHITECTURES = {
    ("minimind2", False): MODEL_ARCH.LLAMA,
    ("minimind2", True): MODEL_ARCH.BAILINGMOE,
    ("minimind3", False): MODEL_ARCH.QWEN3,
    ("minimind3", True): MODEL_ARCH.QWEN3MOE,
}
# RoPE pairs dimensions 2i and 2i + 1 here; i and i + D/2 in the others and in MiniMind.
ROTATE_NEIGHBOURS = (MODEL_ARCH.LLAMA, MODEL_ARCH.BAILINGMOE)

# Fields of the config that are exported here, or that matter in training only
EXPORTED_FIELDS = {
    "generation", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "rms_norm_eps", "rope_theta", "dropout", "use_moe", "num_experts", "num_experts_per_tok",
    "n_shared_experts", "moe_intermediate_size", "router_aux_loss_coef", "seq_aux", "norm_topk_prob",
    "inference_rope_scaling", *YARN_NAMES.values(),
}  # fmt: skip


# --------------------------------------------------------------------------------------------------- the model


def architecture_of(config: ModelConfig) -> MODEL_ARCH:
    """Errors: UserError, or ValueError of `hf_config`, for a model that llama.cpp does not compute."""
    # A field unknown here could change the logits, but not the tensors.
    assert set(ARCHITECTURE) <= EXPORTED_FIELDS, set(ARCHITECTURE) - EXPORTED_FIELDS
    hf_config(config)
    if config.generation == "minimind3" and config.use_moe and not config.norm_topk_prob:
        raise UserError("llama.cpp always normalises the experts' weights of a Qwen3-MoE; norm_topk_prob is false here")
    betas = {"beta_fast": config.yarn_beta_fast, "beta_slow": config.yarn_beta_slow}
    if config.inference_rope_scaling and betas != YARN_BETAS:
        raise UserError("llama.cpp stretches positions by YaRN with beta_fast 32 and beta_slow 1 only")
    return ARCHITECTURES[config.generation, config.use_moe]


def write_settings(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """Write the hyperparameters that llama.cpp needs."""
    width = config.moe_intermediate_size if config.use_moe else config.intermediate_size
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(width)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    if config.inference_rope_scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.yarn_factor)
        writer.add_rope_scaling_orig_ctx_len(config.yarn_original_positions)
        # llama.cpp multiplies the rotated queries and keys by this, and by YaRN's 1 + ln(factor) / 10. MiniMind by neither.
        writer.add_rope_scaling_attn_factors(1 / (1 + 0.1 * math.log(config.yarn_factor)))
    if config.use_moe:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(width)
    if ARCHITECTURES[config.generation, config.use_moe] == MODEL_ARCH.BAILINGMOE:
        exported = hf_config(config)
        writer.add_expert_shared_count(exported.shared_expert_intermediate_size // width)
        writer.add_expert_weights_norm(exported.norm_topk_prob)
        writer.add_expert_weights_scale(1.0)
        writer.add_leading_dense_block_count(0)


def to_gguf(state: StateDict, config: ModelConfig) -> StateDict:
    """State dict of MiniMindLM -> tensors with llama.cpp's names, in fp32.

    As in `to_hf`, several shared experts become one wide one, and a missing one becomes zeros. The routed experts of a
    layer become one tensor, [experts, out, in].
    """
    architecture = ARCHITECTURES[config.generation, config.use_moe]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    state = to_hf(state, config)
    if architecture == MODEL_ARCH.BAILINGMOE:
        # No tied head: the file holds the matrix twice. No gate of the shared expert and no bias either; ours are zeros.
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
        state = {name: tensor for name, tensor in state.items() if not re.search(r"shared_expert_gate|\.bias$", name)}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    out: StateDict = {}
    experts = defaultdict(list)
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        of_all_experts = re.sub(r"experts\.\d+\.", "experts.", module)
        out_name = f"{names.get_name(of_all_experts)}.weight"
        if of_all_experts != module:
            experts[out_name].append(tensor)
            continue
        matrix = module.rpartition(".")[2]
        if architecture in ROTATE_NEIGHBOURS and matrix in heads:
            # Rows i and i + D/2 of each head become rows 2i and 2i + 1.
            halves = tensor.view(heads[matrix], 2, config.head_dim // 2, config.hidden_size)
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if module.endswith("shared_expert.down_proj"):
            # `to_hf` doubles it because Qwen2-MoE has a gate of 1/2.
            tensor = tensor / 2
        out[out_name] = tensor
    return out | {name: torch.stack(parts) for name, parts in experts.items()}


def quantized(
    tensor: torch.Tensor, number_type: GGMLQuantizationType, name: str
) -> tuple[np.ndarray, GGMLQuantizationType, float]:
    """(a tensor as the file holds it, its type, the largest change of a weight).

    Q8_0 has a scale in half precision for each 32 weights of a row. Errors: ValueError for a weight that the type does not hold.
    """
    block_size, _ = gguf.GGML_QUANT_SIZES[number_type]
    if tensor.shape[-1] % block_size:
        # As llama.cpp's own programs do.
        announce(f"{name} stays in float16: its rows of {tensor.shape[-1]} weights are no multiple of {block_size}")
        number_type = GGMLQuantizationType.F16
    values = tensor.contiguous().numpy()
    # What overflows is refused below.
    with np.errstate(all="ignore"):
        data = gguf.quantize(values, number_type)
        change = float(np.abs(gguf.dequantize(data, number_type) - values).max())
    if not math.isfinite(change):
        reached = f"{name} reaches {np.abs(values).max():.3g}"
        raise ValueError(f"{reached}, which {number_type.name} does not hold; float32 holds all finite numbers")
    return data, number_type, change


# ----------------------------------------------------------------------------------------------- the tokenizer


def write_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int, where: str, begins_with_bos: bool
) -> str:
    """Write a tokenizer; returns llama.cpp's name for its pre-tokenizer. vocab_size: the model's; where: for errors.

    begins_with_bos: llama.cpp puts BOS before a prompt; no effect without such a token.
    Errors: UserError for a tokenizer that llama.cpp would not reproduce exactly.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    rule = piece_rule(content)
    if rule is None:
        raise UserError(
            f"{where}: llama.cpp would cut texts into other pieces than this tokenizer, and the model would do worse. "
            f"Its rules are MiniMind's and train_tokenizer.py --pieces {', '.join(PIECE_RULES)}: train such a tokenizer and model"
        )
    vocabulary = tokenizer.get_vocab()
    # Names for unused rows; llama.cpp aborts if two are equal.
    unused = (name for i in count() if (name := f"[PAD{i}]") not in vocabulary)
    tokens = list(islice(unused, vocab_size))
    types = [TokenType.UNUSED] * vocab_size
    for token, i in vocabulary.items():
        tokens[i] = token
        types[i] = TokenType.NORMAL
    # In a prompt the text of a control token stays text, as in our training; that of a user-defined one becomes the token.
    for i, added in tokenizer.added_tokens_decoder.items():
        types[i] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    for name in ("bos", "eos", "pad", "unk"):
        token_id = getattr(tokenizer, f"{name}_token_id")
        if token_id is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_add_bos_token(begins_with_bos and tokenizer.bos_token_id is not None)
    # A prompt is the start of a document; EOS ends one.
    writer.add_add_eos_token(False)
    if (template := default_template(tokenizer)) is not None:
        writer.add_chat_template(template)
        # Otherwise llama.cpp takes any token spelled like an end of turn, not always the same one.
        if tokenizer.eos_token_id is not None:
            writer.add_eot_token_id(tokenizer.eos_token_id)
    return rule
