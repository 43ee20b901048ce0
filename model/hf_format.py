"""The two MiniMind generations as architectures that Hugging Face transformers has of its own, and back.

State dicts here have the key names of published checkpoints (each expert by itself), which transformers, vLLM and
llama.cpp read alike. H hidden, I intermediate, N query heads, G key/value heads, D head dimension.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

from common.flags import LARGEST
from model.config import (
    ALL_EXPORTS,
    EXPERT_EXPORTS,
    TOKEN_IDS,
    YARN_NAMES,
    MiniMindConfig,
    checked_token_id,
    fields_exported,
    in_json,
)

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

# {field: (values that MiniMind computes as well, why no others)}; null says nothing.
ONLY: dict[str, tuple[Sequence[object], str]] = {
    "hidden_act": (("silu",), "MiniMind has silu only"),
    "use_sliding_window": ((False,), "MiniMind has full attention only"),
    "attention_dropout": ((0,), "MiniMind has none in attention alone"),
    "partial_rotary_factor": ((1,), "MiniMind rotates whole heads"),
    "quantization_config": ((), "plain weights are wanted, in F32, F16 or BF16"),
}
ONLY_WITH_EXPERTS: dict[str, tuple[Sequence[object], str]] = {
    "decoder_sparse_step": ((1,), "every layer of a MiniMind with experts has them"),
    "mlp_only_layers": (([],), "every layer of a MiniMind with experts has them"),
}
# Where a file does not have these fields, the defaults of transformers' config class hold.
OF_CLASS = (
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "router_aux_loss_coef",
    "norm_topk_prob",
    *TOKEN_IDS,
)
# Published models have one, ours a few. Each is a module of its own, so a huge number would take memory and time.
MOST_SHARED_EXPERTS = 64

# Tensors of theirs that must be zero, since MiniMind has no such part.
BIAS = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.bias")
SHARED_GATE = re.compile(r"model\.layers\.\d+\.mlp\.shared_expert_gate\.weight")
SHARED_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.)shared_expert\.(gate|up|down)(_proj\.weight)")


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
        # These biases are zeros, see to_hf.
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


def fields_from_hf(theirs: Mapping[str, object]) -> dict[str, Any]:
    """The content of their config.json -> the fields of the MiniMindConfig that computes the same.

    Both ways of writing are read, that of transformers 4 and that of 5. MiniMindConfig checks the values themselves.
    Errors: ValueError, one line, for what is missing and for what MiniMind computes otherwise: the field and its value.
    """
    model_type = theirs.get("model_type")
    if not isinstance(model_type, str) or model_type not in KINDS:
        raise ValueError(f"model_type {in_json(model_type)}: MiniMind has no such form; one of {', '.join(KINDS)}")
    generation, use_moe = KINDS[model_type]
    refuse_huge_numbers(theirs)
    refuse_other_forms(theirs, generation, use_moe)
    fields: dict[str, Any] = {"generation": generation, "use_moe": use_moe, **rope_fields(theirs)}
    # What their class takes where the file says nothing.
    defaults = HF_CLASSES[generation, use_moe][0]()
    for name in (*SAME, *(MOE if use_moe else ())):
        value = theirs.get(name)
        if name in theirs and name in TOKEN_IDS:
            fields[name] = checked_token_id(name, value)
            continue
        if value is None and name == "num_experts":
            value = theirs.get("num_local_experts")
        if value is None and name in OF_CLASS:
            value = getattr(defaults, name)
        fields[name] = value
    # The first Llamas did not share keys and values among heads, and their files do not say how many there are.
    if fields["num_key_value_heads"] is None and model_type == "llama":
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    # Without a head_dim, Qwen3 takes 128 and the others hidden_size / num_attention_heads, as MiniMind does.
    may_be_missing = {*OF_CLASS, "intermediate_size"} if use_moe else set(OF_CLASS)
    if model_type != "qwen3":
        may_be_missing.add("head_dim")
    for name, value in fields.items():
        if value is None and name not in may_be_missing:
            raise ValueError(f"{name} is missing")
    if use_moe and generation == "minimind2":
        fields.update(shared_expert_fields(theirs, fields))
    return fields


def refuse_huge_numbers(theirs: Mapping[str, object]) -> None:
    """ValueError for a whole number that no model has: it would fill an error line, or a list of so many entries memory."""
    for name, value in theirs.items():
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"{name[:60]} is {in_json(value)}: no model has such a number")


def refuse_other_forms(theirs: Mapping[str, object], generation: str, use_moe: bool) -> None:
    """ValueError for settings of their config that MiniMind has no counterpart of."""
    _, class_name = HF_CLASSES[generation, use_moe]
    architectures = theirs.get("architectures")
    if architectures and architectures != [class_name]:
        raise ValueError(f"architectures is {in_json(architectures)}: MiniMind is a {class_name}")
    only = {**ONLY, **(ONLY_WITH_EXPERTS if use_moe else {})}
    for name, (values, why) in only.items():
        if name in theirs and theirs[name] is not None and theirs[name] not in values:
            raise ValueError(f"{name} is {in_json(theirs[name])}: {why}")
    layer_types = theirs.get("layer_types")
    if layer_types is not None:
        kinds = layer_types if isinstance(layer_types, list) else [layer_types]
        others = [kind for kind in kinds if kind != "full_attention"]
        if others:
            raise ValueError(f"layer_types has {in_json(others[0])}: MiniMind has full attention only")


def shared_expert_fields(theirs: Mapping[str, object], fields: Mapping[str, Any]) -> dict[str, Any]:
    """n_shared_experts and norm_topk_prob of a minimind2 from a Qwen2-MoE's one wide shared expert. Errors: ValueError."""
    width = theirs.get("shared_expert_intermediate_size")
    own_width = fields["moe_intermediate_size"]
    for name, value in (("shared_expert_intermediate_size", width), ("moe_intermediate_size", own_width)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {in_json(value)}, no positive whole number")
    assert isinstance(width, int)
    if width % own_width:
        raise ValueError(
            f"shared_expert_intermediate_size is {width}, no multiple of moe_intermediate_size, which is {own_width}"
        )
    if width // own_width > MOST_SHARED_EXPERTS:
        raise ValueError(f"shared_expert_intermediate_size is {width}, more than {MOST_SHARED_EXPERTS} experts wide")
    takes_one = fields["num_experts_per_tok"] == 1
    if takes_one and fields["norm_topk_prob"]:
        raise ValueError(
            "norm_topk_prob is true with one expert per token: minimind2 does not normalise a single weight"
        )
    return {"n_shared_experts": width // own_width, "norm_topk_prob": takes_one or fields["norm_topk_prob"]}


def rope_fields(theirs: Mapping[str, object]) -> dict[str, Any]:
    """Our fields of the rotation. Errors: ValueError for a kind that MiniMind does not have.

    transformers 5 writes all of it in `rope_parameters`; transformers 4 wrote `rope_theta`, and `rope_scaling` where the
    rotation is not the plain one. Exports have both.
    """
    said: list[dict[str, Any]] = []
    for name in ("rope_parameters", "rope_scaling"):
        rope = theirs.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise ValueError(f"{name} is {in_json(rope)}, no object")
        said.append(fields_of_rope(name, rope))
    if theirs.get("rope_theta") is not None:
        said.append({"rope_theta": theirs["rope_theta"]})
    fields: dict[str, Any] = {}
    for part in said:
        for name, value in part.items():
            if fields.setdefault(name, value) != value:
                raise ValueError(f"{name} is {in_json(fields[name])} in one place and {in_json(value)} in another")
    # Their classes take it where a file of the first Llamas says nothing.
    fields.setdefault("rope_theta", 10_000.0)
    theta = fields["rope_theta"]
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
        raise ValueError(f"rope_theta is {in_json(theta)}, no number above 0")
    return fields


def fields_of_rope(name: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields of the object `name` of their config. Errors: ValueError for another kind than the plain one and YaRN."""
    given = {key: value for key, value in rope.items() if value is not None}
    # Transformers 4 wrote the kind under both names.
    newer = given.pop("rope_type", None)
    older = given.pop("type", None)
    if newer is not None and older is not None and newer != older:
        raise ValueError(f"{name}: rope_type is {in_json(newer)} and type is {in_json(older)}")
    kind = older if newer is None else newer
    if kind is None:
        kind = "default"
    if kind not in ("default", "yarn"):
        raise ValueError(f"{name}: rope_type is {in_json(kind)}: MiniMind has default and yarn")
    fields: dict[str, Any] = {"inference_rope_scaling": kind == "yarn"}
    if "rope_theta" in given:
        fields["rope_theta"] = given.pop("rope_theta")
    refuse_huge_numbers(given)
    if given.get("partial_rotary_factor") == 1:
        del given["partial_rotary_factor"]
    if kind == "yarn":
        # Where it is missing, their YaRN makes the logits larger by a factor that follows from the others.
        if given.pop("attention_factor", None) != 1:
            raise ValueError(f"{name}: a yarn with another attention_factor than 1: MiniMind does not scale its logits")
        for theirs, ours in YARN_NAMES.items():
            if theirs not in given:
                raise ValueError(f"{name}: {theirs} is missing")
            fields[ours] = given.pop(theirs)
    for key, value in given.items():
        raise ValueError(f"{name}: {key[:60]} is {in_json(value)}: MiniMind's rotation has none")
    return fields


def must_be_zero(name: str) -> str | None:
    """Why a tensor of theirs must be zero, or None where it is a weight."""
    if BIAS.fullmatch(name):
        return "MiniMind has no biases"
    if SHARED_GATE.fullmatch(name):
        return "MiniMind's shared experts have no gate"
    return None


def own_tensors(name: str, tensor: torch.Tensor, config: MiniMindConfig) -> StateDict:
    """What a weight of theirs is in MiniMindForCausalLM: the way back of to_hf. tensor: fp32.

    One shared expert becomes n_shared_experts, which share its hidden units out among them. A tensor that a file should
    not have keeps its name, so that the comparison with the model's own names finds it.
    """
    shared = SHARED_EXPERT.fullmatch(name)
    has_shared_experts = config.generation == "minimind2" and config.use_moe
    if not shared or not has_shared_experts or tensor.dim() != 2:
        return {name: tensor}
    mlp, matrix, ending = shared.groups()
    # to_hf doubles it, since their gate halves what comes of it.
    axis, scale = (1, 0.5) if matrix == "down" else (0, 1.0)
    parts = tensor.chunk(config.n_shared_experts, dim=axis)
    return {f"{mlp}shared_experts.{s}.{matrix}{ending}": part * scale for s, part in enumerate(parts)}
