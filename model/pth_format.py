"""Strict loading of a flat `.pth` state dict of either public generation; the config is in a `.json` or inferred.

Files are untrusted: none of their code is run, and a small one cannot fill the memory.
"""

import os
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from common.files import check_regular_file, file_digest
from common.wording import one_line
from model.config import DECLARATIONS, ModelConfig, own_fields, public_spellings
from model.weight_record import DIGEST_FIELD, read_record

# MiniMindLM, which imports this module, or MiniMindForCausalLM
ModelT = TypeVar("ModelT", bound=nn.Module)
StateDict = dict[str, torch.Tensor]
HEAD = "lm_head.weight"
EMBEDDINGS = "model.embed_tokens.weight"
ATTENTION = "model.layers.0.self_attn."
MLP = "model.layers.0.mlp."
# RoPE tables in some older files: not weights, so they are left out
TABLES = re.compile(r"(^|\.)(freqs_cis|pos_cis|freqs_cos|freqs_sin|rotary_emb\.inv_freq)$")
# key prefixes of DistributedDataParallel (all keys) and torch.compile (keys of compiled modules)
WRAPPERS = re.compile(r"^((module|_orig_mod)\.)+|(?<=\.)_orig_mod\.")
# entries that hold the weights in checkpoints of various trainers
NESTED = ("model", "state_dict", "model_state_dict")
# first bytes of a torch.save file: a ZIP archive, or before torch 1.6 a pickle
ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = b"\x80"


def load_pth(model_class: type[ModelT], path: str | os.PathLike[str], overrides: Mapping[str, Any]) -> ModelT:
    """path of a state dict -> model_class in fp32 and eval mode. See `MiniMindLM.from_pth`."""
    path = Path(path)
    overrides = public_spellings(overrides)
    if unknown := sorted(overrides.keys() - DECLARATIONS.keys()):
        raise ValueError(f"{unknown[0]} is not a field of ModelConfig")
    beside = path.with_suffix(".json")
    check_regular_file(beside)
    record = read_record(path) if beside.exists() else None
    state = read_state_dict(path, None if record is None else record.get(DIGEST_FIELD))
    try:
        if record is None:
            fields = infer_config(state, overrides)
        else:
            fields = own_fields(record)
        config = ModelConfig(**{**fields, **overrides})
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{path if record is None else beside}: {error}") from None
    model = model_with(model_class, config, state, path)
    # fields that no shape determines, with the generation's defaults
    undetermined = []
    if config.generation == "minimind2" and not overrides.get("head_dim"):
        undetermined.append("num_attention_heads")
    if config.use_moe:
        undetermined.append("num_experts_per_tok")
    guessed = [f"{name}={getattr(config, name)}" for name in undetermined if overrides.get(name) is None]
    if record is None and guessed:
        warnings.warn(
            f"{path}: no .json beside it: {', '.join(guessed)} taken from {config.generation}; if they differ, "
            "pass others, or put a .json with all fields beside it",
            stacklevel=3,
        )
    return model


def model_with(model_class: type[ModelT], config: ModelConfig, state: StateDict, path: Path) -> ModelT:
    """Returns model_class in fp32 and eval mode with these weights. A tied head may be missing. path: for error messages.

    Errors: ValueError, one line, for names and shapes of another model and for non-finite numbers.
    """
    if config.tie_word_embeddings and EMBEDDINGS in state:
        # Some files have a tied matrix once.
        state.setdefault(HEAD, state[EMBEDDINGS])
    try:
        modules = config.num_hidden_layers
        if config.use_moe:
            modules *= config.num_experts + config.n_shared_experts
        # Building them would take hours.
        if modules > len(state):
            raise ValueError(f"num_hidden_layers is {config.num_hidden_layers}, with {len(state)} tensors in all")
        # Names and shapes first: meta tensors take no memory.
        with torch.device("meta"), _WithoutInitialising():
            model_class(config).load_state_dict(state, assign=True)
    except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        others = own_shape(state, config)
        reason = f"they have {others}" if others else one_line(error)[:250]
        raise ValueError(f"{path}: not the weights of this config: {reason}") from None
    for key, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{path}: {key} has NaN or infinite numbers: the file is damaged, or its run failed")
    if config.tie_word_embeddings and not torch.equal(state[HEAD], state[EMBEDDINGS]):
        raise ValueError(
            f'{path}: {HEAD} is not {EMBEDDINGS}: its config (.json) must say "tie_word_embeddings": false'
        )
    model = model_class(config)
    model.load_state_dict(state)
    return model.eval()


def own_shape(state: StateDict, config: ModelConfig) -> str:
    """The fields of the weights' own shape that are others in `config`; "" if there are none, or they cannot be told."""
    # No shape tells it without QK norm.
    heads = {} if ATTENTION + "q_norm.weight" in state else {"num_attention_heads": config.num_attention_heads}
    try:
        found = infer_config(state, heads)
    except (ValueError, ArithmeticError):
        return ""
    return ", ".join(f"{name}={value}" for name, value in found.items() if value != getattr(config, name))


class _WithoutInitialising(TorchFunctionMode):
    """For meta tensors: to initialise these, torch imports its compiler, which takes as long as torch itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == nn.init.__name__:
            return None
        return func(*args, **(kwargs or {}))


def read_state_dict(path: Path, digests: Any) -> StateDict:
    """path -> {key: tensor} without RoPE tables and without the key prefixes of DDP and torch.compile.

    digests: the allowed SHA-256 digests of the file; None: unknown.
    Errors: ValueError, one line, for a file that is no flat state dict of floating-point numbers, or has another digest.
    """
    check_file_type(path)
    if digests is not None and not (isinstance(digests, list) and file_digest(path) in digests):
        raise ValueError(
            f"{path}: damaged or changed: its SHA-256 is not the one in the .json beside it; copy both files again, or "
            f"take {DIGEST_FIELD} out of the .json to load it unchecked"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # A damaged pickle can raise anything.
        reason = one_line(error)[:160] or type(error).__name__
        if "weights_only" in reason or "Weights only" in reason:
            reason = "it holds Python objects besides tensors, which are not loaded because they could run code"
        raise ValueError(f"{path}: not a readable weight file ({reason})") from None
    entries = state if isinstance(state, dict) else {}
    # In any order, but bounded: a hostile entry can contain itself.
    for name in NESTED * len(NESTED):
        if isinstance(entries.get(name), dict):
            entries = entries[name]
    if not entries or not all(isinstance(key, str) for key in entries):
        raise ValueError(f"{path}: not a flat state dict (parameter name -> tensor)")
    weights = {WRAPPERS.sub("", key): tensor for key, tensor in entries.items() if not TABLES.search(key)}
    for key, tensor in weights.items():
        is_plain = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.layout is torch.strided
        # With strides of 0 a few bytes become a tensor of any size. float8 is meant with scales, of which each program has its own.
        size = tensor.element_size() if is_plain else 1
        if size == 1 or tensor.numel() * size > tensor.untyped_storage().nbytes():
            raise ValueError(f"{path}: {key[:60]} is no plain block of floating-point numbers in 16 bits or more")
    return weights


def check_file_type(path: Path) -> None:
    """Raises ValueError for a file that torch.save did not write, or that is larger when unpacked."""
    check_regular_file(path)
    with open(path, "rb") as file:
        head = file.read(64).lstrip()
    reason = ""
    if head.startswith(ZIP_MAGIC):
        try:
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
            # torch stores its entries uncompressed and without overlap; a ZIP bomb does not.
            is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            if not is_stored or sum(entry.file_size for entry in entries) > path.stat().st_size:
                reason = "a compressed archive, which torch never writes"
        except (zipfile.BadZipFile, ValueError, NotImplementedError):
            reason = "the archive is damaged or cut off"
    elif not head.startswith(PICKLE_MAGIC):
        reason = "torch.save did not write it: a .safetensors (name its folder), a git-LFS pointer, for git lfs pull, or a web page?"
    if reason:
        raise ValueError(f"{path}: not a readable weight file ({reason})")


def infer_config(state: StateDict, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Infer config fields from keys and shapes. Errors: ValueError with the field to pass if they do not suffice.

    minimind3's q_norm has the size head_dim. minimind2's files have no such tensor, so its 8 query and 2 key/value heads
    are assumed if the shapes have the same ratio.
    """

    def size(key: str, axis: int = 0) -> int:
        """Size of an axis of a tensor that every MiniMind has."""
        if key not in state or state[key].dim() <= axis:
            raise ValueError(
                f"not the weights of a minimind2 or minimind3 (of a minimind-v1, or a LoRA alone?): {key} is missing, or of another shape"
            )
        return state[key].shape[axis]

    def count(name: str) -> int:
        """Number of numbered modules with this prefix."""
        matches = [re.match(re.escape(name) + r"(\d+)\.", key) for key in state]
        return len({match[1] for match in matches if match})

    vocab_size, hidden_size = size(EMBEDDINGS), size(EMBEDDINGS, axis=1)
    has_qk_norm = ATTENTION + "q_norm.weight" in state
    generation = overrides.get("generation") or ("minimind3" if has_qk_norm else "minimind2")
    defaults = ModelConfig(generation=generation)
    q_rows = size(ATTENTION + "q_proj.weight")
    k_rows = size(ATTENTION + "k_proj.weight")
    head_dim = overrides.get("head_dim") or (size(ATTENTION + "q_norm.weight") if has_qk_norm else None)
    heads = overrides.get("num_attention_heads")
    if heads is None and head_dim is not None:
        heads = q_rows // head_dim
    elif heads is None:
        heads = defaults.num_attention_heads
        if q_rows != k_rows * heads // defaults.num_key_value_heads or q_rows % heads:
            raise ValueError(
                "num_attention_heads does not follow from the shapes; pass it, or put a .json with all fields beside it"
            )
    head_dim = head_dim or q_rows // heads
    if heads * head_dim != q_rows:
        raise ValueError(f"num_attention_heads={heads} does not fit q_proj with {q_rows} rows; pass another")
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
    return fields
