"""Reading a flat `.pth` state dict of either public generation, strictly; the config lies beside it or is inferred."""

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from common.files import MOST_CONFIG_BYTES, read_object
from model.config import DECLARATIONS, SHAPE, MiniMindConfig, fields_that_decide, parameter_count, public_spellings
from model.weight_files import read_state_dict
from model.weight_record import DIGEST_FIELD

# MiniMindForCausalLM, which is built on this module
ModelT = TypeVar("ModelT", bound=PreTrainedModel)
State = Mapping[str, torch.Tensor]
HEAD = "lm_head.weight"
EMBEDDINGS = "model.embed_tokens.weight"
# By how much a model may be larger than its file before it is built to say what is missing
MOST_TIMES = 4
ATTENTION = "model.layers.0.self_attn."
MLP = "model.layers.0.mlp."


def load_pth(model_class: type[ModelT], path: str | os.PathLike[str], overrides: Mapping[str, Any]) -> ModelT:
    """path of a state dict -> model_class in fp32 and eval mode. See `MiniMindForCausalLM.from_pth`."""
    path = Path(path)
    overrides = public_spellings(overrides)
    unknown = sorted(set(overrides) - set(DECLARATIONS))
    if unknown:
        raise ValueError(f"{unknown[0]} is not a field of MiniMindConfig")
    beside = path.with_suffix(".json")
    has_config = beside.exists()
    if has_config:
        fields = read_json(beside)
        state = read_state_dict(path, fields.get(DIGEST_FIELD))
        # What transformers writes besides our fields could make it import or fetch other programs.
        fields = {name: value for name, value in fields.items() if name in DECLARATIONS}
    else:
        state = read_state_dict(path)
        fields = infer_config(state, path, overrides)
    for name in fields_that_decide(SHAPE):
        asked, found = overrides.get(name), fields.get(name)
        if asked is not None and found is not None and asked != found:
            raise ValueError(f"{path}: its {name} is {found}, not {asked}")
    try:
        config = MiniMindConfig(**{**fields, **overrides})
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{beside if has_config else path}: {error}") from None
    if config.tie_word_embeddings and EMBEDDINGS in state:
        # Some write a tied matrix once.
        state.setdefault(HEAD, state[EMBEDDINGS])
    check_tensors(state, config, path, model_class)
    if config.tie_word_embeddings and not torch.equal(state[HEAD], state[EMBEDDINGS]):
        raise ValueError(
            f"{path}: {HEAD} is not {EMBEDDINGS}: pass tie_word_embeddings=False, or write it into {beside.name} as "
            '"tie_word_embeddings": false'
        )
    model = model_class(config)
    model.load_state_dict(state, strict=True)
    if not has_config:
        warn_of_guesses(path, config, overrides)
    return model.float().eval()


def read_json(path: Path) -> dict[str, Any]:
    """The config fields of the .json beside a weight, under our names. Errors: ValueError for a file that has none."""
    fields = read_object(path, MOST_CONFIG_BYTES)
    try:
        return public_spellings(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_tensors(state: State, config: MiniMindConfig, path: Path, model_class: type[PreTrainedModel]) -> None:
    """ValueError with the first few keys that are missing, unexpected or of another shape than in a model of the config."""
    wanted = parameter_count(config)
    held = sum(tensor.numel() for tensor in state.values())
    if wanted > MOST_TIMES * held:
        # Before anything of that size is built.
        raise ValueError(f"{path}: holds {held:,} numbers, and the config is that of a model with {wanted:,}")
    # On the meta device tensors have shapes and no memory.
    with torch.device("meta"):
        expected = model_class(config).state_dict()
    for what, keys in (("missing", expected.keys() - state.keys()), ("unexpected", state.keys() - expected.keys())):
        if keys:
            some = ", ".join(sorted(keys)[:3])
            more = " ..." if len(keys) > 3 else ""
            hint = "; set tie_word_embeddings to true if the head is the embeddings" if keys == {HEAD} else ""
            raise ValueError(f"{path}: {what} keys ({len(keys)}): {some}{more}{hint}")
    for key, tensor in expected.items():
        if state[key].shape != tensor.shape:
            raise ValueError(
                f"{path}: {key} is {list(state[key].shape)} in the file, {list(tensor.shape)} in the model"
            )


# ------------------------------------------------------------------------------- a config without a .json


def infer_config(state: State, path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config fields that keys and shapes tell; ValueError names the field to pass where they do not suffice.

    minimind3's q_norm tells head_dim. minimind2's files do not, so the generation's 8 heads are taken if 8 / 2 is also
    the ratio of the shapes.
    """

    def size(key: str, axis: int = 0) -> int:
        """Of a tensor that every such MiniMind has."""
        if key not in state or state[key].dim() <= axis:
            raise ValueError(f"{path}: not a MiniMind state dict, {key} is missing, or of another shape")
        return state[key].shape[axis]

    def count(name: str) -> int:
        """How many modules are numbered behind this name."""
        found = [re.match(re.escape(name) + r"(\d{1,9})\.", key) for key in state]
        return len({match[1] for match in found if match})

    vocab_size, hidden_size = size(EMBEDDINGS), size(EMBEDDINGS, axis=1)
    # Only minimind3 has norms of the queries and keys.
    qk_norm = ATTENTION + "q_norm.weight" in state
    generation = overrides.get("generation") or ("minimind3" if qk_norm else "minimind2")
    defaults = MiniMindConfig(generation=generation)
    q_rows = size(ATTENTION + "q_proj.weight")
    k_rows = size(ATTENTION + "k_proj.weight")
    head_dim = overrides.get("head_dim") or (size(ATTENTION + "q_norm.weight") if qk_norm else None)
    heads = overrides.get("num_attention_heads")
    if heads is None and head_dim is not None:
        heads = q_rows // head_dim
    elif heads is None:
        heads = defaults.num_attention_heads
        if q_rows != k_rows * heads // defaults.num_key_value_heads or q_rows % heads:
            raise ValueError(f"{path}: the shapes do not tell num_attention_heads; pass it")
    head_dim = head_dim or q_rows // heads
    if head_dim < 1 or heads * head_dim != q_rows or k_rows % head_dim:
        raise ValueError(
            f"{path}: num_attention_heads={heads} and head_dim={head_dim} do not fit q_proj with {q_rows} rows "
            f"and k_proj with {k_rows}; pass num_attention_heads"
        )
    fields: dict[str, Any] = {
        "generation": generation,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": count("model.layers."),
        "num_attention_heads": heads,
        "num_key_value_heads": k_rows // head_dim,
        "head_dim": head_dim,
        "use_moe": MLP + "gate.weight" in state,
    }
    if not fields["use_moe"]:
        return {**fields, "intermediate_size": size(MLP + "gate_proj.weight")}
    fields["num_experts"] = size(MLP + "gate.weight")
    fields["moe_intermediate_size"] = size(MLP + "experts.0.gate_proj.weight")
    fields["n_shared_experts"] = count(MLP + "shared_experts.")
    if "num_experts_per_tok" not in overrides and defaults.num_experts_per_tok > fields["num_experts"]:
        raise ValueError(f"{path}: the keys do not tell num_experts_per_tok; pass it")
    return fields


def warn_of_guesses(path: Path, config: MiniMindConfig, overrides: Mapping[str, Any]) -> None:
    """Name the fields that no shape tells and that were taken from the generation's defaults."""
    untold = []
    if config.generation == "minimind2" and not overrides.get("head_dim"):
        untold.append("num_attention_heads")
    if config.use_moe:
        untold.append("num_experts_per_tok")
    guessed = [f"{name}={getattr(config, name)}" for name in untold if overrides.get(name) is None]
    if guessed:
        warnings.warn(
            f"{path}: no .json beside it: {', '.join(guessed)} taken from {config.generation}; pass others if they differ",
            stacklevel=4,
        )
