"""The networks of a run and its vocabulary: fresh ones, or those of an earlier run."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import ElectraConfig, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from common.errors import UserError
from common.packages import loader_reason
from common.wording import announce
from dataset.reading.file_kinds import expanded
from dataset.tokenizing.sample import TextSource, draw_sample
from dataset.tokenizing.vocabulary import check_size
from dataset.tokenizing.wordpiece import entries, load_wordpiece, train_wordpiece, wordpiece
from model.electra.model_electra import NETWORKS, ElectraPretrainer, configs
from trainer.electra.settings import ElectraSettings
from trainer.machine.ranks import Ranks, on_main
from trainer.saving.checkpoint import Checkpoints

# Folder of the vocabulary that is trained where none is given, and its entries.
OWN = "vocabulary"
OWN_ENTRIES = 8192
# Of the data that such a vocabulary is trained on.
SAMPLE_BYTES = 60e6
# The fields of a config that decide which weights fit and what they compute.
ARCHITECTURE = (
    "vocab_size",
    "embedding_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "hidden_act",
    "layer_norm_eps",
    "hidden_dropout_prob",
    "position_init",
)


def architecture(model: ElectraPretrainer) -> dict[str, list[Any]]:
    """{field: its value in each network} of the fields of ARCHITECTURE: what a resume must agree with."""
    return {name: [getattr(one.config, name, None) for one in model.networks()] for name in ARCHITECTURE}


def open_vocabulary(
    settings: ElectraSettings, data_path: list[str], stem: Path, ranks: Ranks
) -> PreTrainedTokenizerBase:
    """The tokenizer of --vocab_path, or --model_path's, or a WordPiece one that is trained on the data; a resume finds
    that of its start. stem: the path of the run's files without their endings. Errors: ValueError."""
    if settings.vocab_path:
        return load_wordpiece(expanded(settings.vocab_path), settings.lower_case)
    if settings.from_resume:
        checkpoints = Checkpoints(f"{stem}_resume")
        # A run whose folder was renamed back has its vocabulary among its checkpoints until the resume begins. One that ended
        # before its first save has left a vocabulary too, perhaps of other data.
        for folder in (checkpoints.folder, stem.parent) if checkpoints.paths() else ():
            if (folder / OWN / "vocab.txt").exists():
                return load_wordpiece(folder / OWN, named_by="--from_resume 1: ")
    if settings.model_path:
        # The embeddings belong to its own vocabulary.
        try:
            return load_wordpiece(expanded(settings.model_path) / "discriminator", named_by="")
        except ValueError as error:
            raise UserError(
                f"--model_path {settings.model_path} needs its vocabulary: name it by --vocab_path ({error})"
            ) from error

    def train_it() -> list[str]:
        options = (settings.text_field, settings.skip_bad_lines, settings.text_suffixes)
        sources = [TextSource(path, *options) for path in data_path]
        announce(f"no --vocab_path: training a WordPiece vocabulary of {OWN_ENTRIES:,} entries on the data")
        sample = draw_sample(sources, [1.0] * len(sources), SAMPLE_BYTES)
        return entries(train_wordpiece(sample, OWN_ENTRIES, settings.lower_case))

    return wordpiece(on_main(ranks, train_it), settings.lower_case)


def init_model(settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase) -> ElectraPretrainer:
    """Fresh networks, or those of --model_path. Errors: ValueError where flags, files and tokenizer do not fit."""
    options: dict[str, Any] = {
        "sampling": settings.sampling,
        "gen_smooth": settings.gen_smooth,
        "disc_smooth": settings.disc_smooth,
    }
    if settings.model_path:
        return load_networks(settings, tokenizer, options)
    if settings.generator_config and settings.discriminator_config:
        pair = (
            config_of_file("--generator_config", settings.generator_config, settings, tokenizer),
            config_of_file("--discriminator_config", settings.discriminator_config, settings, tokenizer),
        )
    else:
        pair = configs(
            settings.network_sizes(),
            len(tokenizer),
            tokenizer.pad_token_id,
            settings.max_seq_len,
            settings.init_std,
            settings.position_init,
            settings.dropout,
        )
    return ElectraPretrainer.from_configs(*pair, **options)


def config_of_file(
    flag: str, path: str, settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase
) -> ElectraConfig:
    """The config in a JSON file of an ElectraConfig's fields. What it does not say of vocabulary and positions is as the run needs
    it. Errors: UserError where it cannot be read, or does not fit."""
    what = f"{flag} {path}"
    usual = {"vocab_size": len(tokenizer), "max_position_embeddings": max(512, settings.max_seq_len)}
    try:
        config = ElectraConfig(**{**usual, **json.loads(expanded(path).read_bytes())})
    except OSError as error:
        raise UserError(f"{what} cannot be read ({error.strerror})") from error
    except Exception as error:
        # transformers has kinds of its own for a field that is none.
        raise UserError(
            f"{what}: a JSON object of an ElectraConfig's fields is wanted ({loader_reason(error)})"
        ) from error
    # Only the row of the table that stays 0 depends on it.
    config.pad_token_id = tokenizer.pad_token_id
    if config.hidden_size % config.num_attention_heads:
        raise UserError(
            f"{what}: hidden_size {config.hidden_size} is no multiple of {config.num_attention_heads} attention heads"
        )
    check_room(what, config, settings, tokenizer)
    return config


def check_room(what: str, config: Any, settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase) -> None:
    """Errors: UserError where the embeddings are too few for the run. An example has two segments."""
    least = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": settings.max_seq_len,
        "type_vocab_size": 2,
    }
    for name, number in least.items():
        if getattr(config, name) < number:
            raise UserError(f"{what}: {name} is {getattr(config, name)}, {number} is wanted")


def load_networks(
    settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> ElectraPretrainer:
    """The networks of --model_path, with --dropout. Errors: UserError where they cannot be loaded, or do not fit."""
    what = f"--model_path {settings.model_path}"
    assert settings.model_path
    folder = expanded(settings.model_path)
    if not all((folder / name / "config.json").is_file() for name in NETWORKS):
        raise UserError(f"{what}: train_electra.py leaves a folder with {' and '.join(NETWORKS)}, which are not there")
    # Of transformers: it would be drawn over our own lines.
    disable_progress_bar()
    model = ElectraPretrainer.from_pretrained(what, folder, **options)
    config = model.discriminator.config
    check_size(len(tokenizer), config.vocab_size, what)
    check_room(what, config, settings, tokenizer)
    for network in model.networks():
        network.config.hidden_dropout_prob = settings.dropout
        network.config.attention_probs_dropout_prob = settings.dropout
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = settings.dropout
    return model
