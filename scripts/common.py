"""Shared by the scripts: loading a model, its tokenizer, and an encoder for prompts as in training."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.errors import UserError, user_errors
from common.files import read_object
from common.flags import MAX_INT
from common.start import ROOT
from common.wording import announce
from dataset.tokenizing.byte_level_bpe import CHAT_TEMPLATE, WITHOUT_THOUGHTS
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.tokenizer_files import (
    check_vocabulary,
    check_vocabulary_size,
    tokenizer_folder,
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
    from transformers import PreTrainedTokenizerBase

# set in the config of a loaded model: ids of tokens that end its texts, beside the tokenizer's
ENDS_FIELD = "listed_end_ids"
ELSEWHERE = "other models: `transformers serve` and `transformers chat`, or model.generate, write; lm_eval measures"


def dtype_of_flag(name: str, device: torch.device) -> torch.dtype:
    """The torch.dtype of a --dtype; auto: the trainer's default."""
    return pick_dtype("bfloat16", device)[0] if name == "auto" else getattr(torch, name)


def load(
    weight: str,
    tokenizer_path: str | None = None,
    device: str | None = None,
    dtype: str = "float32",
    with_interface: bool = True,
) -> "tuple[MiniMindLM, PreTrainedTokenizerBase, DocumentEncoder]":
    """(model in eval mode, tokenizer, encoder); parameters: see `model_flags` and `load_model`.

    Errors: UserError for a weight or tokenizer that is missing or does not fit.
    """
    with user_errors():
        target = pick_device(device)
        model = load_model(weight, with_interface)
        tokenizer = tokenizer_of(weight, tokenizer_path)
        encoder = DocumentEncoder(tokenizer, bool(read_record(Path(weight)).get(SPECIAL_TOKENS_FIELD)))
        what = f"--tokenizer_path {tokenizer.name_or_path}"
        check_vocabulary_size(encoder.vocab_size, model.config.vocab_size, what, fewer_are_fine=True)
    model.to(target, dtype_of_flag(dtype, target))
    if target.type == "cpu":
        keep_freed_memory()
    return model, tokenizer, encoder


def tokenizer_of(weight: str | Path, tokenizer_path: str | None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a weight. Our chat template opens and closes thoughts only if the .json says that some were trained.

    Errors: UserError if the user named none and the .json beside the weight records another. A mismatch with one that the
    user named, which may be an extended one, is only a warning, as is a .json without a record.
    """
    path = Path(weight)
    folder = tokenizer_path or tokenizer_folder(weight)
    tokenizer = load_tokenizer(folder)
    weight_record = read_record(path)
    recorded, vocabulary = weight_record.get(VOCABULARY_FIELD), vocabulary_digest(tokenizer)
    if not tokenizer_path:
        for line in check_vocabulary(path, recorded, vocabulary, folder):
            announce(line, to_stderr=True)
    elif recorded not in (None, vocabulary):
        announce(f"warning: {weight} was trained with another tokenizer than {tokenizer_path}", to_stderr=True)
    # A folder keeps its own template.
    if tokenizer.chat_template == CHAT_TEMPLATE and not path.is_dir() and not weight_record.get(THOUGHTS_FIELD):
        tokenizer.chat_template = WITHOUT_THOUGHTS
    return tokenizer


def load_model(weight: str | Path, with_interface: bool = True) -> MiniMindLM:
    """Load a .pth, or a folder of a model that MiniMind computes exactly; fp32, eval mode.

    with_interface: as MiniMindForCausalLM, whose import takes longer than that of torch; otherwise as MiniMindLM.
    Errors: UserError, ValueError; for a missing weight they name the newest that is there.
    """
    path = Path(weight)
    if not path.exists():
        raise UserError(f"{path}: no such file; {existing_weights_hint(path.parent, ROOT / 'out')}")
    if path.is_dir() and not (path / "config.json").exists():
        # Perhaps the --out_dir of a run, or its checkpoint folder beside the weights
        raise UserError(
            f"{path}: no config.json; expected a folder of save_pretrained or export_hf.py, or a .pth: "
            f"{existing_weights_hint(path, path.parent)}"
        )
    model_class = MiniMindLM
    if with_interface:
        from model.hf import MiniMindForCausalLM

        model_class = MiniMindForCausalLM
    record = read_record(path)
    if path.is_dir():
        # Its imports take longer than that of torch.
        from model.hf_format import load_folder, read_config

        try:
            config = read_config(path)
        except ValueError as error:
            raise UserError(f"{error}; {ELSEWHERE}") from error
        model = load_folder(model_class, path, config)
        # A chat model of others may end its answers by a token that is none of its tokenizer's.
        settings = path / "generation_config.json"
        ends = (read_object(settings) if settings.exists() else record).get("eos_token_id")
    else:
        model = model_class.from_pth(path)
        # A single one may be just the default: the tokenizer's counts.
        ends = model.config.eos_token_id if isinstance(model.config.eos_token_id, list) else None
    setattr(model.config, ENDS_FIELD, ends if isinstance(ends, list) else [ends])
    setattr(model.config, ROW_LENGTH_FIELD, record.get(ROW_LENGTH_FIELD))
    return model


def trained_length(config: ModelConfig, unknown: int = MAX_INT) -> int:
    """Positions of the rows in training; `unknown` if none are recorded."""
    length = getattr(config, ROW_LENGTH_FIELD, None)
    return length if type(length) is int and length > 0 else unknown


def note_untrained(config: ModelConfig, positions: int) -> None:
    """Prints a line if a text has more positions than the rows in training."""
    if positions > (trained := trained_length(config)):
        line = f"note: a text of {positions:,} positions, but the rows in training had {trained:,}: beyond them it gets worse"
        announce(line, to_stderr=True)


def end_ids(model: MiniMindLM, eos_id: int | None) -> list[int]:
    """Ids of the tokens that end a text of this model. eos_id: its tokenizer's, None if it has none."""
    ids = [] if eos_id is None else [eos_id]
    # A model that was not loaded has none.
    listed: list[Any] = getattr(model.config, ENDS_FIELD, [])
    for token_id in listed:
        if isinstance(token_id, int) and token_id not in ids and 0 <= token_id < model.config.vocab_size:
            ids.append(token_id)
    return ids
