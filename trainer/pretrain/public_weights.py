"""Going on from a Hugging Face folder: the model's shape and the tokenizer come from there, not from flags."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.vocabulary import has_tokenizer, vocabulary_digest
from model.config import ARCHITECTURE, MiniMindConfig
from model.hf_folder import checked_files, load_folder, read_config
from model.model_minimind import MiniMindForCausalLM
from trainer.pretrain.settings import MODEL_FLAGS, PretrainSettings


@dataclass(frozen=True)
class PublicModel:
    """A Hugging Face folder that was looked at: its config, and the files whose tensors are those of such a model."""

    folder: Path
    config: MiniMindConfig
    files: list[Path]


def settings_of_folder(settings: PretrainSettings, folder: Path, config: MiniMindConfig) -> PretrainSettings:
    """The settings with what the folder tells: they describe the run as those of a fresh model would.

    config: the folder's. Errors: UserError for a flag that says otherwise, and for a folder without a tokenizer where
    none is named.
    """
    found: dict[str, object] = {}
    for name in MODEL_FLAGS:
        found[name] = getattr(config, name)
        asked = getattr(settings, name)
        # None: the user has not said it. One that says a fresh model's default contradicts as any other value does.
        if asked is not None and asked != found[name]:
            raise UserError(f"--{name} {asked} contradicts {folder}, whose {name} is {found[name]}: leave the flag out")
    found["tokenizer_path"] = settings.tokenizer_path or str(folder)
    if not settings.tokenizer_path and not has_tokenizer(folder):
        raise UserError(f"--from_weight {folder}: no tokenizer is in there; name the model's own with --tokenizer_path")
    # The type checker does not see that names and values belong together.
    return dataclasses.replace(settings, **found)  # type: ignore[arg-type]


def tokenizer_notices(folder: Path, tokenizer_path: str, vocabulary: str) -> list[str]:
    """A line where the tokenizer of the run is another one than the folder's. vocabulary: its `vocabulary_digest`."""
    if Path(tokenizer_path) == folder or not has_tokenizer(folder):
        return []
    if vocabulary_digest(load_tokenizer(folder)) == vocabulary:
        return []
    return [
        f"warning: {folder} has a tokenizer of its own, with another vocabulary than --tokenizer_path {tokenizer_path}"
    ]


def model_of_folder(public: PublicModel) -> MiniMindForCausalLM:
    """Errors: UserError where the weights are damaged or those of another model."""
    try:
        return load_folder(MiniMindForCausalLM, public.folder, public.config, public.files)
    except (ValueError, OSError) as error:
        raise UserError(f"--from_weight: {error}") from error


def checked_folder(folder: Path, config: MiniMindConfig) -> PublicModel:
    """The folder, if its model is one of `config`. Errors: UserError where it is another."""
    try:
        theirs = read_config(folder)
        # The shapes are compared with the files. Other fields, such as rope_theta, do not show in any tensor.
        for name in ARCHITECTURE:
            if getattr(theirs, name) != getattr(config, name):
                raise ValueError(f"{folder}: its {name} is {getattr(theirs, name)}, not {getattr(config, name)}")
        return PublicModel(folder, config, checked_files(MiniMindForCausalLM, folder, config))
    except (ValueError, OSError) as error:
        raise UserError(f"--from_weight: {error}") from error
