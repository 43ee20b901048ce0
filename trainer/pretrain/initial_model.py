"""The model that a run starts with: fresh, or with existing weights; if these are missing, the error suggests others."""

import dataclasses
import os
import re
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from common.errors import UserError
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.tokenizer_files import (
    check_vocabulary,
    check_vocabulary_size,
    has_tokenizer,
    vocabulary_digest,
)
from model.config import ARCHITECTURE, TOKEN_IDS, ModelConfig
from model.induction import init_induction
from model.model_minimind import MiniMindLM
from model.weight_record import VOCABULARY_FIELD, existing_weights_hint, read_record
from trainer.machine.ranks import Ranks
from trainer.pretrain.memory import refuse_too_large
from trainer.pretrain.settings import MODEL_FLAGS, PretrainSettings, find_weight
from trainer.sharding import ranks_per_model

ModelT = TypeVar("ModelT", bound=MiniMindLM)
# such as Qwen/Qwen3-0.6B-Base
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def open_model(
    settings: PretrainSettings,
    config: ModelConfig | None,
    tokenizer: Any,
    vocabulary: str,
    vocab_size: int,
    ranks: Ranks,
    device: torch.device,
) -> tuple[MiniMindLM, list[str]]:
    """Returns (the model of a run, with fresh or existing weights; lines for the user).

    settings, config: of settings_of_folder. vocabulary: digest of the tokenizer's. vocab_size: of the encoder. Errors: UserError,
    ValueError for what does not fit.
    """
    notices: list[str] = []
    path = settings.tokenizer_path
    assert path is not None
    if config is not None:
        folder = Path(settings.from_weight)
        is_other = Path(path) != folder and has_tokenizer(folder)
        if is_other and vocabulary_digest(load_tokenizer(folder)) != vocabulary:
            notices.append(
                f"warning: {folder} has a tokenizer of its own, with another vocabulary than --tokenizer_path {path}"
            )
        # Documents start and end with the tokenizer's ids.
        for name in TOKEN_IDS:
            setattr(config, name, getattr(tokenizer, name))
        from model.hf_format import load_folder

        make = partial(load_folder, MiniMindLM, folder, config)
    else:
        shape = {name: getattr(settings, name) for name in MODEL_FLAGS}
        ids = {name: getattr(tokenizer, name) for name in TOKEN_IDS}
        config = ModelConfig(**shape, **ids, vocab_size=vocab_size, dropout=settings.dropout)
        weight = settings.weight()
        if weight is not None:
            notices += check_vocabulary(weight, read_record(weight).get(VOCABULARY_FIELD), vocabulary, path)
        make = partial(init_model, MiniMindLM, config, settings.from_weight, settings.out_dir, settings.init_scheme)
    refuse_too_large(config, device, ranks, settings.shard)
    model = make()
    check_length(settings.max_seq_len, model.config)
    check_vocabulary_size(vocab_size, model.config.vocab_size, f"--tokenizer_path {path}")
    if ranks_per_model(settings.shard, ranks) == 1:
        model.to(device)
    if settings.gradient_checkpointing:
        model.checkpoint_activations()
    return model, notices


def init_model(
    model_class: type[ModelT], config: ModelConfig, from_weight: str, out_dir: str | Path, init_scheme: str
) -> ModelT:
    """A fresh model_class, or one with the weights of `from_weight`: a name as in --save_weight, or the path of a .pth.

    Errors: UserError in one line for a missing file and for weights of another shape than `config`.
    """
    if from_weight == "none":
        model = model_class(config)
        if init_scheme != "default":
            # Every block starts as the identity.
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    torch.nn.init.zeros_(parameter)
        if init_scheme == "induction":
            init_induction(model)
        return model
    path = find_weight(from_weight, out_dir, config.hidden_size, config.use_moe)
    # Unlike Path.exists, this does not raise for strings that are no path.
    if not os.path.exists(path):
        raise UserError(f"--from_weight {from_weight}: {why_not_found(from_weight, path, Path(out_dir))}")
    # What the caller has set goes before the .json beside the weights: the shape, the dropout of this run, and other fields where they
    # are not the defaults.
    plain = ModelConfig(**{name: getattr(config, name) for name in MODEL_FLAGS}, vocab_size=config.vocab_size)
    asked = {name: getattr(config, name) for name in (*MODEL_FLAGS, "dropout")}
    asked |= {name: value for name in ARCHITECTURE if (value := getattr(config, name)) != getattr(plain, name)}
    try:
        return model_class.from_pth(path, **asked)
    except (ValueError, OSError) as error:
        raise UserError(
            f"--from_weight: {error}; --hidden_size, --num_hidden_layers, --use_moe and --generation must fit it"
        ) from error


def why_not_found(from_weight: str, path: Path, out_dir: Path) -> str:
    """Message for a --from_weight that is neither a model's folder nor `path`, the .pth that it would mean."""
    if from_weight.endswith(".safetensors"):
        return f"name the folder that holds it and its config.json, {Path(from_weight).parent}"
    instead = existing_weights_hint(path.parent, out_dir)
    if HUB_NAME.fullmatch(from_weight) and not Path(from_weight).parent.is_dir():
        instead += "; a model of the Hugging Face hub is downloaded first, with hf download"
    return f"there is neither a folder of a model with that name nor {path}; {instead}"


def check_length(max_seq_len: int, config: ModelConfig) -> None:
    """Errors: UserError for rows that are longer than the position table."""
    if max_seq_len > config.max_position_embeddings:
        raise UserError(f"--max_seq_len {max_seq_len} is beyond the position table of {config.max_position_embeddings}")


def settings_of_folder(settings: PretrainSettings) -> tuple[PretrainSettings, ModelConfig | None]:
    """The settings with the model shape and tokenizer of the folder of --from_weight, as if given by flags for a fresh model, and
    its config; without a folder the same settings and None.

    Errors: UserError for a flag that contradicts it, and for a folder without a tokenizer where none is given.
    """
    folder = settings.weight_folder()
    if folder is None:
        return settings, None
    # Only here: the configs of transformers' models import for as long as torch.
    from model.hf_format import read_config

    config = read_config(folder)
    config.dropout = settings.dropout
    shape: dict[str, object] = {}
    for name in MODEL_FLAGS:
        shape[name] = getattr(config, name)
        asked = getattr(settings, name)
        # None: not given. A flag is compared even if it repeats the default of a fresh model.
        if asked is not None and asked != shape[name]:
            raise UserError(f"--{name} {asked} contradicts {folder}, whose {name} is {shape[name]}: leave the flag out")
    shape["tokenizer_path"] = settings.tokenizer_path or str(folder)
    if not settings.tokenizer_path and not has_tokenizer(folder):
        raise UserError(f"--from_weight {folder}: no tokenizer is in there; name the model's own with --tokenizer_path")
    # The type checker does not see that names and values belong together.
    return dataclasses.replace(settings, **shape), config  # type: ignore[arg-type]
