"""Reading a flat `.pth` state dict of either public generation, strictly; the config lies beside it or is inferred."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.files import MOST_CONFIG_BYTES, read_object
from model.config import DECLARATIONS, SHAPE, MiniMindConfig, fields_that_decide, public_spellings
from model.infer_config import infer_config, numbers_in, warn_of_guesses
from model.weight_files import read_state_dict
from model.weight_record import DIGEST_FIELD

if TYPE_CHECKING:
    from model.model_minimind import MiniMindForCausalLM

State = Mapping[str, torch.Tensor]
HEAD = "lm_head.weight"
EMBEDDINGS = "model.embed_tokens.weight"


def load_pth(
    model_class: "type[MiniMindForCausalLM]", path: str | os.PathLike[str], overrides: Mapping[str, Any]
) -> "MiniMindForCausalLM":
    """path of a state dict -> model_class in fp32 and eval mode. See `MiniMindForCausalLM.from_pth`.

    A file of somebody else may say anything. So everything is compared before memory is taken for it: the digest, then
    the tensors, then the sizes of the config with those of the tensors, and only then a model is built.
    """
    path = Path(path)
    overrides = public_spellings(overrides)
    unknown = sorted(set(overrides) - set(DECLARATIONS))
    if unknown:
        raise ValueError(f"{unknown[0]} is not a field of MiniMindConfig")
    beside = path.with_suffix(".json")
    has_config = beside.exists()
    if has_config:
        fields = read_json(beside)
        digests = _checked_digests(beside, fields.pop(DIGEST_FIELD, None))
        # Of what transformers writes besides our fields nothing decides about the weights. Some of it would make it import
        # or fetch other programs, such as another implementation of attention.
        fields = {name: value for name, value in fields.items() if name in DECLARATIONS}
        state = read_state_dict(path, digests)
    else:
        state = read_state_dict(path)
        fields = infer_config(state, path, overrides)
    _check_asked(path, fields, overrides)
    try:
        config = MiniMindConfig(**{**fields, **overrides})
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{beside if has_config else path}: {error}") from None
    if config.tie_word_embeddings and EMBEDDINGS in state:
        # Some write a tied matrix once.
        state.setdefault(HEAD, state[EMBEDDINGS])
    check_sizes(state, config, path)
    # On the meta device tensors have shapes and no memory.
    with torch.device("meta"):
        expected = model_class(config).state_dict()
    check_shapes(state, expected, path)
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


def _checked_digests(beside: Path, digests: object) -> list[str] | None:
    """The SHA-256 that the .json gives; None where it gives none, as in files of others and of earlier versions."""
    if digests is None:
        return None
    if not isinstance(digests, list) or not digests or not all(isinstance(digest, str) for digest in digests):
        raise ValueError(f"{beside}: {DIGEST_FIELD} is no list of SHA-256; take the field out or copy the file again")
    return digests


def _check_asked(path: Path, fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """ValueError where a size is asked for that the file does not have."""
    for name in fields_that_decide(SHAPE):
        asked = overrides.get(name)
        found = fields.get(name)
        if asked is not None and found is not None and asked != found:
            raise ValueError(f"{path}: its {name} is {found}, not {asked}")


def check_sizes(state: State, config: MiniMindConfig, path: Path) -> None:
    """ValueError where the config speaks of more than the file has, before a model of such a size is built."""
    embeddings = state.get(EMBEDDINGS)
    if embeddings is None:
        raise ValueError(f"{path}: not a MiniMind state dict, {EMBEDDINGS} is missing")
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


def check_shapes(state: State, expected: State, path: Path) -> None:
    """ValueError with the first few keys that are missing, unexpected or of another shape."""
    for what, keys in (("missing", expected.keys() - state.keys()), ("unexpected", state.keys() - expected.keys())):
        if keys:
            some = ", ".join(sorted(keys)[:3])
            more = " ..." if len(keys) > 3 else ""
            hint = "; set tie_word_embeddings to true if the head is the embeddings" if keys == {HEAD} else ""
            raise ValueError(f"{path}: {what} keys ({len(keys)}): {some}{more}{hint}")
    for key, tensor in expected.items():
        theirs = list(state[key].shape)
        ours = list(tensor.shape)
        if theirs != ours:
            raise ValueError(f"{path}: {key} is {theirs} in the file, {ours} in the model")
