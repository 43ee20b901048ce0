"""Conversion of both MiniMind generations to native Hugging Face architectures, and back.

State dicts here have the key names of published checkpoints (experts not stacked), which transformers, vLLM and
llama.cpp all read. H hidden, I intermediate, N query heads, G key/value heads, D head dimension.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

import model.hf_config  # noqa: F401 - lets AutoConfig read our own
from common.errors import UserError, library_errors
from common.files import read_object
from common.wording import one_line
from model.config import ALL_EXPORTS, DECLARATIONS, EXPERT_EXPORTS, MODEL_TYPE, YARN_NAMES, ModelConfig, own_fields
from model.pth_format import TABLES, ModelT, StateDict, model_with, read_state_dict
from model.weight_record import with_generation

CONFIG = "config.json"
# entries of rope_parameters that change nothing
NEUTRAL_ROPE = {"partial_rotary_factor": 1, "truncate": True}
# those of transformers' YaRN if a config has none; the only ones of llama.cpp
YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
WEIGHTS = "model.safetensors"
# shards of large weights, as save_pretrained names them
SHARDS = "model-*-of-*.safetensors"
# where there is no .safetensors: MiniMind's own conversion writes it
PICKLE = "pytorch_model.bin"
# upper bound: published models have a few hundred
MAX_LAYERS = 2_000
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COMMON_FIELDS = [name for name, declared in DECLARATIONS.items() if declared["exported"] == ALL_EXPORTS]
MOE_FIELDS = [name for name, declared in DECLARATIONS.items() if declared["exported"] == EXPERT_EXPORTS]
# {(generation, use_moe): (config class, name of the model class)}
HF_CLASSES: dict[tuple[str, bool], tuple[type[PretrainedConfig], str]] = {
    ("minimind2", False): (LlamaConfig, "LlamaForCausalLM"),
    ("minimind2", True): (Qwen2MoeConfig, "Qwen2MoeForCausalLM"),
    ("minimind3", False): (Qwen3Config, "Qwen3ForCausalLM"),
    ("minimind3", True): (Qwen3MoeConfig, "Qwen3MoeForCausalLM"),
}
# {model_type of transformers: (generation, use_moe)}
GENERATIONS_OF_TYPES = {config_class.model_type: form for form, (config_class, _) in HF_CLASSES.items()}

# fields that MiniMind cannot vary: they must equal hf_config's
FIXED_FIELDS = (
    "hidden_act", "use_sliding_window", "attention_dropout", "quantization_config", "decoder_sparse_step", "mlp_only_layers",
    "norm_topk_prob", "shared_expert_intermediate_size",
)  # fmt: skip

# tensors that must be zero, since MiniMind has no such part
ZERO = re.compile(
    r"model\.layers\.\d+\.(self_attn\.\w+_proj\.bias|mlp\.\w+_proj\.bias|mlp\.shared_expert_gate\.weight)"
)
SHARED_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.)shared_expert\.((?:gate|up|down)_proj\.weight)")


# ------------------------------------------------------------------------------------------------- to a folder


def hf_config(config: ModelConfig) -> PretrainedConfig:
    """ModelConfig -> the equivalent transformers config.

    Errors: ValueError for a minimind3 with shared experts, which Qwen3-MoE does not have, for a YaRN that transformers computes
    in another way, and for shapes it refuses.
    """
    if config.generation == "minimind3" and config.use_moe and config.n_shared_experts:
        raise ValueError("a minimind3 with shared experts has no equivalent in transformers: it cannot be exported")
    config_class, name = HF_CLASSES[config.generation, config.use_moe]
    fields: dict[str, Any] = {field: getattr(config, field) for field in COMMON_FIELDS}
    if config.use_moe:
        fields.update({field: getattr(config, field) for field in MOE_FIELDS})
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
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.inference_rope_scaling:
        # MiniMind's ramp ends at dimension D/2 - 1 at the latest, that of transformers and llama.cpp at D - 1.
        turns = config.yarn_original_positions / config.yarn_beta_slow / (2 * math.pi)
        if math.ceil(config.head_dim / 2 * math.log(turns) / math.log(config.rope_theta)) > config.head_dim // 2 - 1:
            raise ValueError(
                f"with head_dim {config.head_dim} and rope_theta {config.rope_theta:g}, transformers and llama.cpp stretch positions "
                f"by YaRN in another way than MiniMind: yarn_original_positions {config.yarn_original_positions} "
                "(original_max_position_embeddings) must be shorter"
            )
        rope["rope_type"] = "yarn"
        rope.update({name: getattr(config, field) for name, field in YARN_NAMES.items()})
        # MiniMind does not rescale the logits.
        rope["attention_factor"] = 1.0
    fields["rope_parameters"] = rope
    try:
        return config_class(**fields, architectures=[name])
    except StrictDataclassError as error:
        raise ValueError(f"transformers has no such {name}: {one_line(error)}") from None


def to_hf(state: StateDict, config: ModelConfig) -> StateDict:
    """State dict of MiniMindLM -> that of its counterpart, without a tied head.

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


# ----------------------------------------------------------------------------------------------- from a folder


def read_config(folder: Path) -> ModelConfig:
    """Returns the ModelConfig that is equivalent to the model in `folder`.

    The architecture's own class reads config.json, with its defaults, in the formats of transformers 4 and 5.
    Errors: ValueError, one line, for a folder without a config, and with the field and the value that MiniMind cannot
    express.
    """
    hf_fields = read_object(folder / CONFIG)
    try:
        refuse_layers(hf_fields)
        model_type = str(hf_fields.get("model_type"))
        if model_type == MODEL_TYPE:
            return ModelConfig(**own_fields(with_generation(hf_fields)))
        if model_type not in GENERATIONS_OF_TYPES:
            raise ValueError(
                f"model_type {model_type!r}: MiniMind has no such form; one of {', '.join(GENERATIONS_OF_TYPES)}"
            )
        generation, use_moe = GENERATIONS_OF_TYPES[model_type]
        config = HF_CLASSES[generation, use_moe][0].from_dict(dict(hf_fields))
        fields = {name: getattr(config, name, None) for name in (*COMMON_FIELDS, *(MOE_FIELDS if use_moe else ()))}
        rope = {
            name: value
            for name, value in config.rope_parameters.items()
            if value is not None and NEUTRAL_ROPE.get(name) != value
        }
        rope.pop("type", None)
        fields["rope_theta"] = rope.get("rope_theta")
        if rope.get("rope_type") == "yarn":
            rope = YARN_BETAS | rope
            fields["inference_rope_scaling"] = True
            fields.update({field: rope[name] for name, field in YARN_NAMES.items() if name in rope})
        if use_moe and generation == "minimind2":
            fields["n_shared_experts"] = config.shared_expert_intermediate_size // config.moe_intermediate_size
            # minimind2 does not normalise a single weight.
            fields["norm_topk_prob"] = config.norm_topk_prob or config.num_experts_per_tok == 1
        minimind_config = ModelConfig(generation=generation, use_moe=use_moe, **fields)
        reference = hf_config(minimind_config)
        # rope_type first: the other entries follow from it.
        names = ("rope_type", *rope, *reference.rope_parameters)
        ropes = [(f"rope_parameters: {name}", rope.get(name), reference.rope_parameters.get(name)) for name in names]
        for name, value, expected in (
            *ropes,
            ("layer_types", layer_types(config), layer_types(reference)),
            *((name, getattr(config, name, None), getattr(reference, name, None)) for name in FIXED_FIELDS),
        ):
            if value != expected:
                raise ValueError(f"{name} is {value!r:.60}; MiniMind has only {expected!r:.60}")
    except Exception as error:
        # The exceptions vary with the version of transformers.
        raise ValueError(f"{folder / CONFIG}: {one_line(error)[:250]}") from None
    return minimind_config


def layer_types(hf_config: PretrainedConfig) -> list[str]:
    """The kinds of attention in its layers; a config without this field has one kind."""
    return sorted(set(getattr(hf_config, "layer_types", None) or ["full_attention"]))


def refuse_layers(hf_fields: Mapping[str, object]) -> None:
    """Raises ValueError for a config.json with more layers than any model has: building them would take hours."""
    for name, value in hf_fields.items():
        if isinstance(value, Mapping):
            refuse_layers(value)
        elif name.endswith(("layer", "layers")) and isinstance(value, int) and value > MAX_LAYERS:
            raise ValueError(f"{name[:60]} is more than {MAX_LAYERS:,}, which no model has")


def load_folder(model_class: type[ModelT], folder: Path, config: ModelConfig) -> ModelT:
    """The weights in `folder` -> model_class in fp32 and eval mode: the inverse of to_hf.

    config: of read_config.
    Reads one .safetensors or its shards, or else a pytorch_model.bin, as a .pth: none of its code is run. One shared expert
    is split along its hidden units into n_shared_experts. An unexpected tensor keeps its name, so that strict loading
    reports it.
    Errors: ValueError, one line, for damaged files and those of another model, for a tensor that must be zero and is not,
    and for a dtype that is not in DTYPES.
    """
    whole = folder / WEIGHTS
    shards = [] if whole.exists() else sorted(folder.glob(SHARDS))
    if any(not path.stem.endswith(f"-of-{len(shards):05}") for path in shards):
        raise ValueError(f"{folder}: a shard {SHARDS} is missing, or there are those of several models")
    hf_state: StateDict = {}
    if not shards and not whole.exists() and (folder / PICKLE).exists():
        hf_state = read_state_dict(folder / PICKLE, None)
    for path in () if hf_state else shards or [whole]:
        try:
            hf_state.update(load_file(path))
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path}: not a readable .safetensors, or not all of it; {PICKLE} is the only other kind that is read ({error})"
            ) from None
    state: StateDict = {}
    for name, tensor in hf_state.items():
        shared = SHARED_EXPERT.fullmatch(name)
        if TABLES.search(name):
            continue
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{folder}: {name[:80]} is {tensor.dtype}; float32, float16 and bfloat16 are read")
        if ZERO.fullmatch(name):
            if tensor.any():
                raise ValueError(f"{folder}: {name} is not zero: MiniMind has no such part")
        elif shared and config.generation == "minimind2":
            mlp, matrix = shared.groups()
            # to_hf doubles down_proj, since the gate is 1/2.
            axis, scale = (1, 0.5) if matrix.startswith("down") else (0, 1.0)
            for s, part in enumerate(tensor.float().chunk(config.n_shared_experts, dim=axis)):
                state[f"{mlp}shared_experts.{s}.{matrix}"] = part * scale
        else:
            state[name] = tensor
    return model_with(model_class, config, state, folder)


# ------------------------------------------------------------------- a folder of any architecture, in its own class


def load_config(what: str, folder: Path) -> Any:
    """Returns the config of a save_pretrained folder, of any architecture. what: its name in errors. Errors: UserError."""
    with library_errors(f"{what}: no config can be loaded from there"):
        refuse_layers(read_object(folder / CONFIG))
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # transformers would download an attention kernel from the hub and run it, despite trust_remote_code=False.
    implementation = str(getattr(config, "_attn_implementation", None) or "")
    if "/" in implementation:
        raise UserError(f"{what}: its config asks for the attention of {implementation}, a program that is not fetched")
    return config


def load_network(
    what: str, folder: Path, auto_class: Any, config: Any, **options: Any
) -> tuple[Any, dict[str, list[str]]]:
    """Returns (network in fp32, {"missing_keys", "unexpected_keys", "mismatched_keys": names of weights}).

    Missing weights and those of another shape are random; names of the latter include both shapes. auto_class: of
    transformers. config: of load_config, perhaps changed. Errors: UserError.
    """
    with library_errors(f"{what}: no model can be loaded from there"):
        # transformers makes random weights where the files have none: a config of a kilobyte must not fill the memory. Quantised
        # weights have half a byte each.
        with torch.device("meta"):
            without_weights = auto_class.from_config(config, trust_remote_code=False)
            parameters = sum(weight.numel() for weight in without_weights.parameters())
        n_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
        if parameters > 2 * n_bytes:
            raise ValueError(f"its config asks for {parameters:,} parameters, the weight files have {n_bytes:,} bytes")
        network, faults = auto_class.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    shapes = "{} is {} in the file, {} in the config"
    faults["mismatched_keys"] = [
        shapes.format(key, list(in_file), list(expected)) for key, in_file, expected in faults["mismatched_keys"]
    ]
    return network, {fault: sorted(keys) for fault, keys in faults.items()}
