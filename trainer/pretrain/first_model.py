"""The model that a run begins with: a fresh one, or one with weights that are there."""

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.paths import ROOT
from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from trainer.pretrain.public_weights import checked_folder, model_of_folder
from trainer.pretrain.settings import FILES_OF_MODELS, MODEL_FLAGS, PretrainSettings, weight_candidates, weight_folder
from trainer.pretrain.weights_at_hand import flags_of_trainer, weights_instead

# Such as Qwen/Qwen3-0.6B-Base
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def config_from_flags(settings: PretrainSettings, vocab_size: int, tokenizer: Any) -> MiniMindConfig:
    """The config of a fresh model."""
    asked = {name: getattr(settings, name) for name in MODEL_FLAGS}
    return MiniMindConfig(
        **asked,
        vocab_size=vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def init_model(
    config: MiniMindConfig,
    from_weight: str | Path = "none",
    out_dir: str | Path = ROOT / "out",
    init_scheme: str = "default",
) -> MiniMindForCausalLM:
    """A fresh MiniMindForCausalLM, or one with the weights of `from_weight`: a name as in --save_weight, the path of a
    .pth, or a Hugging Face folder.

    Errors: UserError in one line for a missing file and for weights of another shape than `config`.
    """
    from_weight = os.fspath(from_weight)
    if from_weight == "none":
        model = MiniMindForCausalLM(config)
        if init_scheme == "zero_out":
            # Every block begins as the identity.
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    torch.nn.init.zeros_(parameter)
        return model
    folder = weight_folder(from_weight, out_dir, config.hidden_size, config.use_moe)
    if folder is not None:
        return model_of_folder(checked_folder(folder, config))
    path = find_weight(from_weight, config, Path(out_dir))
    # Unlike Path.exists, this one has no errors of its own for texts that are no path.
    if not os.path.exists(path):
        raise UserError(f"--from_weight {from_weight}: {why_not_found(from_weight, path, config, Path(out_dir))}")
    asked = {name: getattr(config, name) for name in MODEL_FLAGS}
    try:
        return MiniMindForCausalLM.from_pth(path, **asked)
    except (ValueError, OSError) as error:
        raise UserError(f"--from_weight: {error}; the flags of the model group must fit it") from error


def find_weight(from_weight: str, config: MiniMindConfig, out_dir: Path) -> Path:
    """The .pth that --from_weight means: a path, with or without its ending, or a name as in --save_weight."""
    path = Path(from_weight)
    if path.suffix == ".pth":
        return path
    candidates = weight_candidates(from_weight, out_dir, config.hidden_size, config.use_moe)
    for candidate in candidates:
        if os.path.isfile(candidate):
            return candidate
    return candidates[0]


def why_not_found(from_weight: str, path: Path, config: MiniMindConfig, out_dir: Path) -> str:
    """What to say of a --from_weight that is neither a model's folder nor `path`, the .pth that it would mean."""
    if from_weight.endswith(".safetensors") and os.path.isfile(from_weight):
        return f"name the folder that holds it and its config.json, {Path(from_weight).parent}"
    asked = {name: getattr(config, name) for name in MODEL_FLAGS}
    flags_of = partial(flags_of_trainer, asked=asked)
    instead = weights_instead(Path(from_weight), path.parent, out_dir, first=Path(from_weight).name, flags_of=flags_of)
    if os.path.isdir(from_weight):
        return (
            f"the folder holds no model, none of {', '.join(FILES_OF_MODELS)} as save_pretrained and downloads leave them, and "
            f"{path} is not there; {instead}"
        )
    if from_weight.endswith(".pth"):
        return f"no such file; {instead}"
    if os.path.isfile(from_weight):
        return f"it is a file, but no .pth; {path} is not there; {instead}"
    said = f"there is neither such a folder nor {path}; {instead}"
    if HUB_NAME.fullmatch(from_weight) and not Path(from_weight).parent.is_dir():
        said += "; a model of the Hugging Face hub is downloaded first, with hf download"
    return said


def check_length(max_seq_len: int, config: MiniMindConfig) -> None:
    """Errors: UserError for rows that are longer than the table of positions."""
    if max_seq_len > config.max_position_embeddings:
        raise UserError(f"--max_seq_len {max_seq_len} is beyond the position table of {config.max_position_embeddings}")
