"""Shared by the scripts: loading a model, its tokenizer, and an encoder for prompts as in training."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from common.errors import UserError, user_errors
from common.flags import MAX_INT
from common.start import ROOT
from common.wording import announce
from dataset.tokenizing.byte_level_bpe import CHAT_TEMPLATE, WITHOUT_THOUGHTS
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.tokenizer_files import (
    DEFAULT,
    check_vocabulary_size,
    has_tokenizer,
    unnamed_tokenizer_warning,
    vocabulary_digest,
)
from model.config import ModelConfig
from model.model_minimind import MiniMindLM
from model.weight_record import (
    ROW_LENGTH_FIELD,
    SPECIAL_TOKENS_FIELD,
    THOUGHTS_FIELD,
    VOCABULARY_FIELD,
    existing_weights_hint,
    read_record,
)
from trainer.machine.compiling import keep_freed_memory
from trainer.machine.devices import pick_device, pick_dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# A MiniMindForCausalLM is both.
LanguageModel: TypeAlias = "MiniMindLM | PreTrainedModel"
LanguageConfig: TypeAlias = "ModelConfig | PretrainedConfig"


def dtype_of_flag(name: str, device: torch.device) -> torch.dtype:
    """The torch.dtype of a --dtype; auto: the trainer's default."""
    return pick_dtype("bfloat16", device)[0] if name == "auto" else getattr(torch, name)


def load(
    weight: str,
    tokenizer_path: str | None = None,
    device: str | None = None,
    dtype: str = "float32",
    with_interface: bool = True,
) -> "tuple[LanguageModel, PreTrainedTokenizerBase, DocumentEncoder]":
    """(model in eval mode, tokenizer, encoder); parameters: see `model_flags` and `load_model`.

    Errors: UserError for a weight or tokenizer that is missing or does not fit.
    """
    with user_errors():
        target = pick_device(device)
        model = load_model(weight, with_interface)
        tokenizer = tokenizer_of(weight, tokenizer_path)
        encoder = DocumentEncoder(tokenizer, bool(read_record(Path(weight)).get(SPECIAL_TOKENS_FIELD)))
        folder = tokenizer_folder(weight, tokenizer_path)
        embeddings = text_config(model.config).vocab_size
        check_vocabulary_size(encoder.vocab_size, embeddings, f"--tokenizer_path {folder}", fewer_are_fine=True)
    model = model.to(target, dtype_of_flag(dtype, target))  # type: ignore[arg-type]  # transformers wraps it without its types
    if target.type == "cpu":
        keep_freed_memory()
    return model, tokenizer, encoder


def tokenizer_of(weight: str | Path, tokenizer_path: str | None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a weight. Our chat template opens and closes thoughts only if the .json says that some were trained.

    Errors: UserError if the user named none and the .json beside the weight records another. A mismatch with one that the
    user named, which may be an extended one, is only a warning, as is a .json without a record.
    """
    path = Path(weight)
    tokenizer = load_tokenizer(tokenizer_folder(weight, tokenizer_path))
    weight_record = read_record(path)
    recorded = weight_record.get(VOCABULARY_FIELD)
    is_other = recorded not in (None, vocabulary_digest(tokenizer))
    if tokenizer_path:
        if is_other:
            announce(f"warning: {weight} was trained with another tokenizer than {tokenizer_path}", to_stderr=True)
    elif is_other:
        raise UserError(
            f"{weight} was trained with another tokenizer than that in model/: name it with --tokenizer_path"
        )
    elif recorded is None and not has_tokenizer(path):
        announce(unnamed_tokenizer_warning(path), to_stderr=True)
    # A folder keeps its own template.
    if tokenizer.chat_template == CHAT_TEMPLATE and not path.is_dir() and not weight_record.get(THOUGHTS_FIELD):
        tokenizer.chat_template = WITHOUT_THOUGHTS
    return tokenizer


def load_model(weight: str | Path, with_interface: bool = True) -> "LanguageModel":
    """Load a .pth or a folder of any causal language model of transformers; fp32, eval mode.

    with_interface: a .pth as MiniMindForCausalLM, whose import takes longer than that of torch; otherwise as MiniMindLM.
    Errors: UserError, ValueError; for a missing weight they name the newest that is there.
    """
    path = Path(weight)
    if not path.exists():
        raise UserError(f"{path}: no such file; {existing_weights_hint(path.parent, ROOT / 'out')}")
    if not path.is_dir():
        minimind: LanguageModel
        if with_interface:
            from transformers import GenerationConfig

            from model.hf import MiniMindForCausalLM

            minimind = MiniMindForCausalLM.from_pth(path)
            minimind.generation_config = GenerationConfig(eos_token_id=listed_end_ids(minimind))
        else:
            minimind = MiniMindLM.from_pth(path)
        setattr(minimind.config, ROW_LENGTH_FIELD, read_record(path).get(ROW_LENGTH_FIELD))
        return minimind
    if not (path / "config.json").exists():
        # Perhaps the --out_dir of a run, or its checkpoint folder beside the weights
        raise UserError(
            f"{path}: no config.json; expected a folder of save_pretrained or export_hf.py, or a .pth: "
            f"{existing_weights_hint(path, path.parent)}"
        )
    # Its imports take longer than that of torch.
    from scripts.foreign import load_foreign_model

    return load_foreign_model(path)


def text_config(config: "LanguageConfig") -> Any:
    """The part of a multimodal model's config about text; any other config as it is."""
    return config if isinstance(config, ModelConfig) else config.get_text_config(decoder=True)


def max_positions(config: "LanguageConfig") -> int:
    """Maximum length in tokens; MAX_INT for a model without a bound on positions, such as Bloom or Mamba."""
    positions = getattr(text_config(config), "max_position_embeddings", None)
    # Some configs write -1 for no bound.
    return MAX_INT if positions in (None, -1) else int(positions)


def trained_length(config: "LanguageConfig", unknown: int = MAX_INT) -> int:
    """Positions of the rows in training; `unknown` if none are recorded."""
    length = getattr(config, ROW_LENGTH_FIELD, None)
    return length if type(length) is int and length > 0 else unknown


def note_untrained(config: "LanguageConfig", positions: int) -> None:
    """Prints a line if a text has more positions than the rows in training."""
    if positions > (trained := trained_length(config)):
        line = f"note: a text of {positions:,} positions, but the rows in training had {trained:,}: beyond them it gets worse"
        announce(line, to_stderr=True)


def listed_end_ids(model: MiniMindLM) -> list[int] | None:
    """The end tokens in the config of a .pth. A single one may be just the default: the tokenizer's counts."""
    eos_ids: Any = model.config.eos_token_id
    return eos_ids if isinstance(eos_ids, list) else None


def end_ids(model: "LanguageModel", eos_id: int | None) -> list[int]:
    """Ids of the tokens that end a text of this model. eos_id: its tokenizer's, None if it has none."""
    ids = [] if eos_id is None else [eos_id]
    settings: Any = getattr(model, "generation_config", None)
    configured: Any = settings.eos_token_id if settings else listed_end_ids(cast(MiniMindLM, model))
    for token_id in configured if isinstance(configured, list) else [configured]:
        # GPT-2s with another vocabulary keep the original's 50256.
        if isinstance(token_id, int) and token_id not in ids and 0 <= token_id < text_config(model.config).vocab_size:
            ids.append(token_id)
    return ids


def tokenizer_folder(weight: str | Path, tokenizer_path: str | None) -> Path:
    """The user's tokenizer folder, else the weight's own, else the repository's."""
    if tokenizer_path:
        return Path(tokenizer_path)
    if has_tokenizer(Path(weight)):
        return Path(weight)
    return DEFAULT
