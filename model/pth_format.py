"""Reading a flat `.pth` state dict of either public generation, strictly; the config lies beside it or is inferred."""

import json
import pickle
import re
import warnings
from pathlib import Path

import torch

from model.config import public_spellings

# RoPE tables that some older files carry: no weights, so they are left out
TABLES = re.compile(r"(^|\.)(freqs_cis|pos_cis|freqs_cos|freqs_sin|rotary_emb\.inv_freq)$")


def load_pth(model_class, path, overrides):
    """path of a state dict -> model_class in fp32 and eval mode. See `MiniMindForCausalLM.from_pth`."""
    config_class = model_class.config_class
    path = Path(path)
    overrides = public_spellings(overrides)
    unknown = sorted(set(overrides) - set(config_class.__annotations__))
    if unknown:
        raise ValueError(f"{unknown[0]} is not a field of {config_class.__name__}")
    state = read_state_dict(path)
    beside = path.with_suffix(".json")
    fields = read_json(beside) if beside.exists() else infer_config(state, path, overrides, config_class)
    try:
        config = config_class(**{**fields, **overrides})
    except ValueError as error:
        raise ValueError(f"{beside if beside.exists() else path}: {error}") from None
    model = model_class(config)
    check_shapes(state, model.state_dict(), path)
    if config.tie_word_embeddings and not torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"]):
        raise ValueError(f"{path}: lm_head and embed_tokens differ; pass tie_word_embeddings=False")
    model.load_state_dict(state, strict=True)
    if not beside.exists():
        warn_of_guesses(path, config, overrides)
    return model.float().eval()


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


def read_state_dict(path):
    """path -> {key: tensor} without the RoPE tables that some older files carry."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path}: not a readable weight file ({reason[:120]})") from None
    if not isinstance(state, dict) or not state or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise ValueError(f"{path}: not a flat state dict (parameter name -> tensor)")
    return {key: tensor for key, tensor in state.items() if not TABLES.search(key)}


def read_json(path):
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: not a JSON object of config fields")
    return public_spellings(fields)


def infer_config(state, path, overrides, config_class):
    """The config fields that keys and shapes tell; ValueError names the field to pass where they do not suffice."""

    def shape(key):
        if key not in state:
            raise ValueError(f"{path}: not a MiniMind state dict, {key} is missing")
        return state[key].shape

    def numbers(pattern):
        return {int(match[1]) for match in (re.match(pattern, key) for key in state) if match}

    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    vocab_size, hidden_size = shape("model.embed_tokens.weight")
    qk_norm = attention + "q_norm.weight" in state
    fields = {
        "generation": overrides.get("generation") or ("minimind3" if qk_norm else "minimind2"),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": 1 + max(numbers(r"model\.layers\.(\d+)\."), default=0),
        "use_moe": mlp + "gate.weight" in state,
    }
    defaults = config_class(generation=fields["generation"])
    q_rows, k_rows = shape(attention + "q_proj.weight")[0], shape(attention + "k_proj.weight")[0]
    known = {"head_dim": shape(attention + "q_norm.weight")[0], **overrides} if qk_norm else overrides
    fields.update(infer_heads(q_rows, k_rows, defaults, known, path))
    if not fields["use_moe"]:
        return {**fields, "intermediate_size": shape(mlp + "gate_proj.weight")[0]}
    fields["num_experts"] = shape(mlp + "gate.weight")[0]
    fields["moe_intermediate_size"] = shape(mlp + "experts.0.gate_proj.weight")[0]
    fields["n_shared_experts"] = len(numbers(re.escape(mlp) + r"shared_experts\.(\d+)\."))
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
            raise ValueError(f"{path}: {len(keys)} keys are {what}: {some}")
    for key, tensor in expected.items():
        if state[key].shape != tensor.shape:
            theirs, ours = list(state[key].shape), list(tensor.shape)
            raise ValueError(f"{path}: {key} is {theirs} in the file, {ours} in the model")
