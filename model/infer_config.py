"""The config of a `.pth` without a `.json` beside it, as far as the names and shapes of its tensors tell."""

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from model.config import MiniMindConfig

State = Mapping[str, torch.Tensor]

ATTENTION = "model.layers.0.self_attn."
MLP = "model.layers.0.mlp."


def infer_config(state: State, path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config fields that keys and shapes tell; ValueError names the field to pass where they do not suffice."""
    vocab_size, hidden_size = _shape(state, path, "model.embed_tokens.weight")
    # Only minimind3 has norms of the queries and keys.
    qk_norm = ATTENTION + "q_norm.weight" in state
    generation = overrides.get("generation") or ("minimind3" if qk_norm else "minimind2")
    defaults = MiniMindConfig(generation=generation)
    fields: dict[str, Any] = {
        "generation": generation,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": 1 + max(numbers_in(state, r"model\.layers\.(\d+)\."), default=0),
        "use_moe": MLP + "gate.weight" in state,
    }
    known = dict(overrides)
    if qk_norm:
        known.setdefault("head_dim", _shape(state, path, ATTENTION + "q_norm.weight", dimensions=1)[0])
    q_rows = _shape(state, path, ATTENTION + "q_proj.weight")[0]
    k_rows = _shape(state, path, ATTENTION + "k_proj.weight")[0]
    fields.update(_infer_heads(q_rows, k_rows, defaults, known, path))
    if not fields["use_moe"]:
        fields["intermediate_size"] = _shape(state, path, MLP + "gate_proj.weight")[0]
        return fields
    fields["num_experts"] = _shape(state, path, MLP + "gate.weight")[0]
    fields["moe_intermediate_size"] = _shape(state, path, MLP + "experts.0.gate_proj.weight")[0]
    fields["n_shared_experts"] = len(numbers_in(state, re.escape(MLP) + r"shared_experts\.(\d+)\."))
    if "num_experts_per_tok" not in overrides and defaults.num_experts_per_tok > fields["num_experts"]:
        raise ValueError(f"{path}: the keys do not tell num_experts_per_tok; pass it")
    return fields


def _shape(state: State, path: Path, key: str, dimensions: int = 2) -> torch.Size:
    """The shape of a tensor that every MiniMind has. Errors: ValueError where it is missing or of another kind."""
    if key not in state:
        raise ValueError(f"{path}: not a MiniMind state dict, {key} is missing")
    if state[key].dim() != dimensions or not state[key].numel():
        raise ValueError(f"{path}: {key} is {list(state[key].shape)}, which no MiniMind has")
    return state[key].shape


def _infer_heads(
    q_rows: int, k_rows: int, defaults: MiniMindConfig, known: Mapping[str, Any], path: Path
) -> dict[str, int]:
    """Row counts of q_proj and k_proj -> heads, kv heads, head_dim.

    minimind3's q_norm tells head_dim. minimind2's files do not, so the generation's 8 heads are taken if 8 / 2 is
    also the ratio of the shapes; otherwise the caller has to say num_attention_heads or head_dim.
    """
    head_dim = known.get("head_dim")
    heads = known.get("num_attention_heads")
    if heads is None and head_dim is not None:
        heads = q_rows // head_dim
    elif heads is None:
        heads = defaults.num_attention_heads
        if q_rows != k_rows * heads // defaults.num_key_value_heads or q_rows % heads:
            raise ValueError(f"{path}: the shapes do not tell num_attention_heads; pass it")
    if head_dim is None:
        head_dim = q_rows // heads
    if head_dim < 1 or heads * head_dim != q_rows or k_rows % head_dim:
        raise ValueError(
            f"{path}: num_attention_heads={heads} and head_dim={head_dim} do not fit q_proj with {q_rows} rows "
            f"and k_proj with {k_rows}; pass num_attention_heads"
        )
    return {"num_attention_heads": heads, "num_key_value_heads": k_rows // head_dim, "head_dim": head_dim}


def numbers_in(keys: Iterable[str], pattern: str) -> set[int]:
    """The numbers that the pattern's group finds at the beginning of the keys."""
    found = set()
    for key in keys:
        match = re.match(pattern, key)
        if match:
            # Nine digits at most: a longer number is no index, and reading it could take long.
            found.add(int(match[1][:9]))
    return found


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
