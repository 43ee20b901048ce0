"""What the scripts share: finding weights and their tokenizer, and ids of a prompt as the model was trained on them."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from common.errors import UserError, user_errors
from common.files import read_object, utf8_folder
from common.flags import LARGEST
from common.start import ROOT
from common.wording import announce
from dataset.tokenizing.byte_level_bpe import CHAT_TEMPLATE, WITHOUT_THOUGHTS
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.tokenizer_files import (
    DEFAULT,
    check_size,
    has_tokenizer,
    unnamed_vocabulary,
    vocabulary_digest,
)
from model.hf_format import load_config, load_folder, load_network, read_config
from model.model_minimind import MiniMindForCausalLM
from model.weight_record import SPECIAL_TOKENS_FIELD, THOUGHTS_FIELD, VOCABULARY_FIELD, record_of
from trainer.machine.devices import pick_device, pick_dtype
from trainer.pretrain.first_model import weights_instead


def dtype_of_flag(name: str, device: torch.device) -> torch.dtype:
    """torch.dtype for the --dtype of that name; auto: as the trainer does by default."""
    dtype: torch.dtype = pick_dtype("bfloat16", device)[0] if name == "auto" else getattr(torch, name)
    return dtype


def load(
    weight: str, tokenizer_path: str | None = None, device: str | None = None, dtype: str = "float32"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DocumentEncoder]:
    """(model in eval mode, tokenizer, encoder); the flags of these names, see `model_flags`.

    Errors: UserError for a weight or tokenizer that is not there or does not fit.
    """
    with user_errors():
        place = pick_device(device)
        model = load_model(weight)
        tokenizer = tokenizer_of(weight, tokenizer_path)
        encoder = DocumentEncoder(tokenizer, bool(record_of(Path(weight)).get(SPECIAL_TOKENS_FIELD)))
        folder = tokenizer_folder(weight, tokenizer_path)
        embeddings = vocabulary_size(model.config)
        check_size(encoder.vocab_size, embeddings, f"--tokenizer_path {folder}", fewer_are_fine=True)
    model = model.to(place, dtype_of_flag(dtype, place))  # type: ignore[arg-type]  # transformers wraps it without its types
    return model, tokenizer, encoder


def tokenizer_of(weight: str | Path, tokenizer_path: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a weight. Our chat template opens and closes thoughts only where its .json says that some were
    trained.

    Errors: UserError where the user named none and the .json beside the weight speaks of another. One that the user named
    may have been extended: a line says so, as it does where the .json speaks of none.
    """
    path = Path(weight)
    tokenizer = load_tokenizer(tokenizer_folder(weight, tokenizer_path))
    record = record_of(path)
    recorded = record.get(VOCABULARY_FIELD)
    is_other = recorded not in (None, vocabulary_digest(tokenizer))
    if tokenizer_path:
        if is_other:
            announce(f"warning: {weight} was trained with another tokenizer than {tokenizer_path}", to_stderr=True)
    elif is_other:
        raise UserError(
            f"{weight} was trained with another tokenizer than the one in model/: name it with --tokenizer_path"
        )
    elif path.is_dir() and not has_tokenizer(path):
        announce(
            f"warning: {weight} has no tokenizer, so the one in model/ is taken: name its own with --tokenizer_path",
            to_stderr=True,
        )
    elif recorded is None and path.suffix == ".pth":
        announce(unnamed_vocabulary(path), to_stderr=True)
    # The template of a folder is as whoever wrote it wants it.
    if tokenizer.chat_template == CHAT_TEMPLATE and not path.is_dir() and not record.get(THOUGHTS_FIELD):
        tokenizer.chat_template = WITHOUT_THOUGHTS
    return tokenizer


def load_model(weight: str | Path) -> PreTrainedModel:
    """A .pth (MiniMindForCausalLM) or a folder of any causal language model that transformers knows; fp32, eval mode.

    Errors: UserError, ValueError; where the weight is not there they name those that are.
    """
    path = Path(weight)
    if not path.exists():
        raise UserError(f"{path}: no such file; {weights_instead(path.parent, ROOT / 'out')}")
    if not path.is_dir():
        own = MiniMindForCausalLM.from_pth(path)
        # A single id may be the default of the config, which nobody chose: that one the tokenizer tells.
        eos_ids = own.config.eos_token_id
        own.generation_config = GenerationConfig(eos_token_id=eos_ids if isinstance(eos_ids, list) else None)
        return own
    if not (path / "config.json").exists():
        # It may be the --out_dir of a run, or the folder of its checkpoints, which lies beside the weights.
        raise UserError(
            f"{path}: no config.json; a folder of save_pretrained or export_hf.py is wanted, or a .pth: "
            f"{weights_instead(path, path.parent)}"
        )
    utf8_folder("--weight", path)
    disable_progress_bar()
    settings = path / "generation_config.json"
    said = read_object(settings) if settings.exists() else {}
    config = load_config(str(path), path)
    kinds = config.architectures or []
    if kinds and not any("CausalLM" in kind or "LMHead" in kind or "ConditionalGeneration" in kind for kind in kinds):
        # Such as an ELECTRA, which transformers would load all the same.
        raise UserError(f"{path}: a {kinds[0]}, and no causal language model, which continues a text")
    # In the place of the folder's file: how a text is sampled, our flags say.
    options = {"generation_config": GenerationConfig()}
    model: PreTrainedModel
    model, faults = load_network(str(path), path, AutoModelForCausalLM, config, **options)
    # transformers fills what is missing with random numbers, says so in a log line, and goes on.
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(faults[what])
        if keys:
            raise UserError(f"{path}: {len(keys)} {what.replace('_', ' ')}, {keys[0]}")
    ends: Any = said.get("eos_token_id", getattr(config, "eos_token_id", None))
    model.generation_config = GenerationConfig(eos_token_id=ends if isinstance(ends, list) else [ends])
    return model.eval()


def as_minimind(model: PreTrainedModel, folder: Path) -> MiniMindForCausalLM:
    """The MiniMind that computes what `model` does, which was loaded from the folder. Errors: ValueError where none does."""
    if isinstance(model, MiniMindForCausalLM):
        return model
    return load_folder(MiniMindForCausalLM, folder, read_config(folder))


def vocabulary_size(config: PretrainedConfig) -> int:
    """How many tokens a model has embeddings for. The sizes of one that also sees or hears stand in its text part."""
    return int(config.get_text_config(decoder=True).vocab_size)


def most_positions(config: PretrainedConfig) -> int:
    """How many tokens a text may have. A model without numbered positions, such as a Bloom or a Mamba, has no such bound."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    # Some have -1 for no bound.
    return LARGEST if positions in (None, -1) else int(positions)


def end_ids(model: PreTrainedModel, eos_id: int | None) -> list[int]:
    """The ids of the tokens that end a text of this model. eos_id: the one of its tokenizer, None if it has none."""
    settings = model.generation_config
    said = None if settings is None else settings.eos_token_id
    ids = [] if eos_id is None else [eos_id]
    for token_id in said if isinstance(said, list) else [said]:
        # GPT-2s of another vocabulary keep the 50256 of the first one.
        if isinstance(token_id, int) and token_id not in ids and 0 <= token_id < vocabulary_size(model.config):
            ids.append(token_id)
    return ids


def tokenizer_folder(weight: str | Path, tokenizer_path: str | None) -> Path:
    """The tokenizer's folder: as the user says, or the weight's own, or the repository's."""
    if tokenizer_path:
        return Path(tokenizer_path)
    if has_tokenizer(Path(weight)):
        return Path(weight)
    return DEFAULT
