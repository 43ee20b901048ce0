"""--generator_config and --discriminator_config: networks from JSON files, as transformers writes a config.json."""

import json
from pathlib import Path
from typing import Any

from transformers import ElectraConfig, PreTrainedTokenizerBase

from common.errors import UserError
from common.packages import loader_reason, refuse_foreign_attention
from model.electra.model_electra import UNTIED
from trainer.electra.settings import ElectraSettings
from trainer.pretrain.settings import MOST_LAYERS

# Of a number in such a file; a slip of the keyboard ends here, and not in a network that is built for hours.
LARGEST_SIZE = 10**7
# The fields that are sizes. A file that leaves one out gets the value of transformers.
SIZES_OF_CONFIG = {
    "vocab_size": LARGEST_SIZE,
    "embedding_size": LARGEST_SIZE,
    "hidden_size": LARGEST_SIZE,
    "num_hidden_layers": MOST_LAYERS,
    "num_attention_heads": LARGEST_SIZE,
    "intermediate_size": LARGEST_SIZE,
    "max_position_embeddings": LARGEST_SIZE,
    "type_vocab_size": LARGEST_SIZE,
}
# An example has two segments.
SEGMENTS = 2


def configs_of_files(
    settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase
) -> tuple[ElectraConfig, ElectraConfig]:
    """(generator's, discriminator's) ElectraConfig of the two files. Errors: UserError where one cannot be read, or does not
    fit the tokenizer and --max_seq_len."""
    assert settings.generator_config is not None and settings.discriminator_config is not None
    generator = config_of_file("--generator_config", settings.generator_config, settings, tokenizer)
    discriminator = config_of_file("--discriminator_config", settings.discriminator_config, settings, tokenizer)
    if settings.untied_embeddings:
        setattr(generator, UNTIED, True)
    return generator, discriminator


def config_of_file(
    flag: str, path: str, settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase
) -> ElectraConfig:
    """The config in a JSON file. What it does not say of vocabulary and positions is as the run needs it."""
    what = f"{flag} {path}"
    fields = fields_of_file(what, Path(path))
    fields.setdefault("vocab_size", len(tokenizer))
    fields.setdefault("max_position_embeddings", max(512, settings.max_seq_len))
    # Only the row of the table that stays 0 depends on it.
    fields["pad_token_id"] = tokenizer.pad_token_id
    try:
        config = ElectraConfig(**fields)
    except Exception as error:
        # Each field has a check of its own.
        raise UserError(f"{what}: this is no config of an ELECTRA ({loader_reason(error)})") from error
    refuse_foreign_attention(config, what)
    check_sizes(what, config)
    for name, least in (
        ("vocab_size", len(tokenizer)),
        ("max_position_embeddings", settings.max_seq_len),
        ("type_vocab_size", SEGMENTS),
    ):
        if getattr(config, name) < least:
            raise UserError(f"{what}: {name} is {getattr(config, name)}, {least} is wanted")
    return config


def fields_of_file(what: str, path: Path) -> dict[str, Any]:
    """The object in a JSON file. Errors: UserError."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{what} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what}: no JSON file ({error})") from error
    if not isinstance(fields, dict):
        raise UserError(f"{what}: a JSON object of an ElectraConfig's fields is wanted")
    kind = fields.pop("model_type", "electra")
    if kind != "electra":
        raise UserError(f"{what}: model_type is {str(kind)[:40]!r}, electra is wanted")
    return fields


def check_sizes(what: str, config: ElectraConfig) -> None:
    """Errors: UserError where a size is no number that a network can be built of."""
    for name, most in SIZES_OF_CONFIG.items():
        value = getattr(config, name)
        if type(value) is not int or not 0 < value <= most:
            raise UserError(f"{what}: {name} is {str(value)[:40]}, a whole number from 1 to {most:,} is wanted")
    if config.hidden_size % config.num_attention_heads:
        raise UserError(
            f"{what}: hidden_size {config.hidden_size} is no multiple of {config.num_attention_heads} attention heads"
        )
