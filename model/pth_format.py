"""Reading a flat `.pth` state dict of either public generation, strictly; the config lies beside it or is inferred."""

import json
import re
import warnings
from pathlib import Path

import torch
from transformers import PretrainedConfig

from model.config import public_spellings
from model.weight_files import DIGEST_FIELD, VOCABULARY_FIELD, read_state_dict


def load_pth(model_class, path, overrides):
    """path of a state dict -> model_class in fp32 and eval mode. See `MiniMindForCausalLM.from_pth`."""
    config_class = model_class.config_class
    path = Path(path)
    overrides = public_spellings(overrides)
    unknown = sorted(set(overrides) - set(config_class.__annotations__))
    if unknown:
        raise ValueError(f"{unknown[0]} is not a field of {config_class.__name__}")
    beside = path.with_suffix(".json")
    has_config = beside.exists()
    fields = read_json(beside) if has_config else None
    digests = checked_digests(beside, fields.pop(DIGEST_FIELD, None)) if has_config else None
    if fields is not None:
        fields.pop(VOCABULARY_FIELD, None)
    state = read_state_dict(path, digests)
    if fields is None:
        fields = infer_config(state, path, overrides, config_class)
    check_asked(path, fields, overrides)
    try:
        config = config_class(**{**fields, **overrides})
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{beside if has_config else path}: {error}") from None
    check_sizes(state, config, path)
    # On the meta device: shapes are compared before memory is taken for them.
    with torch.device("meta"):
        shapes = model_class(config).state_dict()
    check_shapes(state, shapes, path)
    if config.tie_word_embeddings and not torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"]):
        raise ValueError(f"{path}: lm_head and embed_tokens differ; pass tie_word_embeddings=False")
    model = model_class(config)
    model.load_state_dict(state, strict=True)
    if not has_config:
        warn_of_guesses(path, config, overrides)
    return model.float().eval()


def checked_digests(beside: Path, digests: object) -> list[str] | None:
    """The SHA-256 that the .json gives; None where it gives none, as in files of others and of earlier versions."""
    if digests is None:
        return None
    if not isinstance(digests, list) or not digests or not all(isinstance(digest, str) for digest in digests):
        raise ValueError(f"{beside}: {DIGEST_FIELD} is no list of SHA-256; take the field out or copy the file again")
    return digests


def check_asked(path: Path, fields: dict, overrides: dict) -> None:
    """ValueError where a size is asked for that the file does not have."""
    sizes = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "num_experts",
    )
    for name in ("generation", *sizes, "use_moe"):
        asked = overrides.get(name)
        if asked is not None and fields.get(name) is not None and asked != fields[name]:
            raise ValueError(f"{path}: its {name} is {fields[name]}, not {asked}")


def check_sizes(state: dict[str, torch.Tensor], config: PretrainedConfig, path: Path) -> None:
    """ValueError where the config speaks of more than the file has, before a model of such a size is built."""
    embeddings = state.get("model.embed_tokens.weight")
    if embeddings is None:
        raise ValueError(f"{path}: not a MiniMind state dict, model.embed_tokens.weight is missing")
    wanted = [config.vocab_size, config.hidden_size]
    if list(embeddings.shape) != wanted:
        raise ValueError(
            f"{path}: model.embed_tokens.weight is {list(embeddings.shape)} in the file, {wanted} in the model"
        )
    # What is repeated in the model is built once for each number: the file must have them all.
    repeated = {"num_hidden_layers": r"model\.layers\.(\d+)\."}
    if config.use_moe:
        repeated["num_experts"] = r"model\.layers\.0\.mlp\.experts\.(\d+)\."
        repeated["n_shared_experts"] = r"model\.layers\.0\.mlp\.shared_experts\.(\d+)\."
    for name, pattern in repeated.items():
        found = len(numbers_in(state, pattern))
        if found != getattr(config, name):
            raise ValueError(f"{path}: {name} is {found} in the file, {getattr(config, name)} in the config")
    largest = max(tensor.numel() for tensor in state.values())
    for name in ("head_dim", "intermediate_size", "moe_intermediate_size", "num_experts", "n_shared_experts"):
        if getattr(config, name) > largest:
            raise ValueError(f"{path}: {name}={getattr(config, name)} of the config is beyond all that the file holds")


def numbers_in(state: dict[str, torch.Tensor], pattern: str) -> set[int]:
    """The numbers that the pattern's group finds in the keys."""
    found = set()
    for key in state:
        match = re.match(pattern, key)
        if match:
            found.add(int(match[1][:9]))
    return found


def warn_of_guesses(path, config, overrides):
    """Name the fields that no shape tells and that were taken from the generation's defaults."""
    guessed = [] if config.generation == "minimind3" or overrides.get("head_dim") else ["num_attention_heads"]
    guessed += ["num_experts_per_tok"] if config.use_moe else []
    guessed = [f"{name}={getattr(config, name)}" for name in guessed if overrides.get(name) is None]
    if guessed:
        warnings.warn(
            f"{path}: no .json beside it: {', '.join(guessed)} taken from {config.generation}; pass others if they differ",
            stacklevel=4,
        )


def vocabulary_of(path: Path) -> str | None:
    """What the .json beside a weight says of the vocabulary that it was trained with; None: nothing.

    Errors: ValueError for a .json that is none.
    """
    beside = path.with_suffix(".json")
    if path.suffix != ".pth" or not beside.is_file():
        return None
    found = read_json(beside).get(VOCABULARY_FIELD)
    return found if isinstance(found, str) else None


def read_json(path):
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({str(error)[:80]})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: not a JSON object of config fields")
    return public_spellings(fields)


def infer_config(state, path, overrides, config_class):
    """The config fields that keys and shapes tell; ValueError names the field to pass where they do not suffice."""

    def shape(key, dimensions=2):
        if key not in state:
            raise ValueError(f"{path}: not a MiniMind state dict, {key} is missing")
        if state[key].dim() != dimensions or not state[key].numel():
            raise ValueError(f"{path}: {key} is {list(state[key].shape)}, which no MiniMind has")
        return state[key].shape

    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    vocab_size, hidden_size = shape("model.embed_tokens.weight")
    qk_norm = attention + "q_norm.weight" in state
    fields = {
        "generation": overrides.get("generation") or ("minimind3" if qk_norm else "minimind2"),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": 1 + max(numbers_in(state, r"model\.layers\.(\d+)\."), default=0),
        "use_moe": mlp + "gate.weight" in state,
    }
    defaults = config_class(generation=fields["generation"])
    q_rows, k_rows = shape(attention + "q_proj.weight")[0], shape(attention + "k_proj.weight")[0]
    known = {"head_dim": shape(attention + "q_norm.weight", 1)[0], **overrides} if qk_norm else overrides
    fields.update(infer_heads(q_rows, k_rows, defaults, known, path))
    if not fields["use_moe"]:
        return {**fields, "intermediate_size": shape(mlp + "gate_proj.weight")[0]}
    fields["num_experts"] = shape(mlp + "gate.weight")[0]
    fields["moe_intermediate_size"] = shape(mlp + "experts.0.gate_proj.weight")[0]
    fields["n_shared_experts"] = len(numbers_in(state, re.escape(mlp) + r"shared_experts\.(\d+)\."))
    if "num_experts_per_tok" not in overrides and defaults.num_experts_per_tok > fields["num_experts"]:
        raise ValueError(f"{path}: the keys do not tell num_experts_per_tok; pass it")
    return fields


def infer_heads(q_rows, k_rows, defaults, known, path):
    """Row counts of q_proj and k_proj -> heads, kv heads, head_dim.

    minimind3's q_norm tells head_dim. minimind2's files do not, so the generation's 8 heads are taken if 8 / 2 is
    also the ratio of the shapes; otherwise the caller has to say num_attention_heads or head_dim.
    """
    head_dim, heads = known.get("head_dim"), known.get("num_attention_heads")
    if head_dim is None and heads is None:
        heads = defaults.num_attention_heads
        if q_rows != k_rows * heads // defaults.num_key_value_heads or q_rows % heads:
            raise ValueError(f"{path}: the shapes do not tell num_attention_heads; pass it")
    if heads is None:
        heads = q_rows // head_dim
    if head_dim is None:
        head_dim = q_rows // heads
    if head_dim < 1 or heads * head_dim != q_rows or k_rows % head_dim:
        raise ValueError(
            f"{path}: num_attention_heads={heads} and head_dim={head_dim} do not fit q_proj with {q_rows} rows "
            f"and k_proj with {k_rows}; pass num_attention_heads"
        )
    return {"num_attention_heads": heads, "num_key_value_heads": k_rows // head_dim, "head_dim": head_dim}


def check_shapes(state, expected, path):
    """ValueError with the first few keys that are missing, unexpected or of another shape."""
    for what, keys in (("missing", expected.keys() - state.keys()), ("unexpected", state.keys() - expected.keys())):
        if keys:
            some = ", ".join(sorted(keys)[:3]) + (" ..." if len(keys) > 3 else "")
            raise ValueError(f"{path}: {what} keys ({len(keys)}): {some}")
    for key, tensor in expected.items():
        if state[key].shape != tensor.shape:
            theirs, ours = list(state[key].shape), list(tensor.shape)
            raise ValueError(f"{path}: {key} is {theirs} in the file, {ours} in the model")
