"""--generator_config and --discriminator_config: networks from JSON files, as transformers writes a config.json."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import ElectraConfig, PreTrainedTokenizerBase

from common.errors import UserError
from common.files import MOST_CONFIG_BYTES, read_small
from common.packages import loader_reason
from dataset.reading.file_kinds import expanded
from model.electra.detection import DRAWS, LENGTH, THRESHOLD
from model.electra.model_electra import UNTIED
from model.electra.sizes import POSITION_INITS
from trainer.electra.settings import LARGEST_STD, ElectraSettings
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
# Those of transformers that have no weights of their own.
ACTIVATIONS = (
    "gelu",
    "gelu_fast",
    "gelu_new",
    "gelu_pytorch_tanh",
    "mish",
    "quick_gelu",
    "relu",
    "silu",
    "swish",
    "tanh",
)


def is_plain_number(value: Any) -> bool:
    # A bool is an int in Python.
    return type(value) in (int, float) and math.isfinite(value)


def is_share(value: Any) -> bool:
    return is_plain_number(value) and 0 <= value < 1


def is_positive(value: Any) -> bool:
    return is_plain_number(value) and value > 0


def is_one_of(*values: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in values


SHARE = ("a number from 0 up and below 1", is_share)
POSITIVE = ("a number above 0", is_positive)
# {field: (what is wanted, whether a value is that)} of the fields that are no sizes.
RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "hidden_act": (f"one of {', '.join(ACTIVATIONS)}", is_one_of(*ACTIVATIONS)),
    "hidden_dropout_prob": SHARE,
    "attention_probs_dropout_prob": SHARE,
    "classifier_dropout": (f"null or {SHARE[0]}", lambda value: value is None or is_share(value)),
    "initializer_range": (
        f"a number above 0, at most {LARGEST_STD:g}",
        lambda value: is_positive(value) and value <= LARGEST_STD,
    ),
    "layer_norm_eps": POSITIVE,
    "position_init": (f"one of {', '.join(POSITION_INITS)}", is_one_of(*POSITION_INITS)),
    UNTIED: ("true or false", lambda value: isinstance(value, bool)),
}
# Fields with one value that this trainer can compute.
ONLY = {
    "model_type": "electra",
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
    "return_dict": True,
    "output_hidden_states": False,
    "output_attentions": False,
    "chunk_size_feed_forward": 0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}
# What a saved model's file says for other uses than pretraining, or of itself. It is passed over.
OF_OTHERS = (
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "label2id",
    "pad_token_id",
    "problem_type",
    "summary_activation",
    "summary_last_dropout",
    "summary_type",
    "summary_use_proj",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    THRESHOLD,
    LENGTH,
    DRAWS,
)


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
    fields = checked(what, fields_of_file(what, expanded(path)))
    fields.setdefault("vocab_size", len(tokenizer))
    fields.setdefault("max_position_embeddings", max(512, settings.max_seq_len))
    # Only the row of the table that stays 0 depends on it.
    fields["pad_token_id"] = tokenizer.pad_token_id
    try:
        config = ElectraConfig(**fields)
    except Exception as error:
        # A newer transformers may have a check that is not here.
        raise UserError(f"{what}: this is no config of an ELECTRA ({loader_reason(error)})") from error
    if config.hidden_size % config.num_attention_heads:
        raise UserError(
            f"{what}: hidden_size {config.hidden_size} is no multiple of {config.num_attention_heads} attention heads"
        )
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
        fields = json.loads(read_small(path, MOST_CONFIG_BYTES))
    except OSError as error:
        raise UserError(f"{what} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what}: no JSON file ({error})") from error
    if not isinstance(fields, dict):
        raise UserError(f"{what}: a JSON object of an ElectraConfig's fields is wanted")
    return fields


def checked(what: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that decide on the networks. Errors: UserError for a field that is none of an ELECTRA's, and for a value
    that a field cannot have."""
    found = {}
    for name, value in fields.items():
        shown = json.dumps(value)[:40]
        if name in OF_OTHERS:
            continue
        if name in SIZES_OF_CONFIG:
            most = SIZES_OF_CONFIG[name]
            if type(value) is not int or not 0 < value <= most:
                raise UserError(f"{what}: {name} is {shown}, a whole number from 1 to {most:,} is wanted")
        elif name in ONLY:
            only = ONLY[name]
            if type(value) is not type(only) or value != only:
                raise UserError(f"{what}: {name} is {shown}, {json.dumps(only)} is wanted")
        elif name in RULES:
            wanted, holds = RULES[name]
            if not holds(value):
                raise UserError(f"{what}: {name} is {shown}, {wanted} is wanted")
        else:
            known = ", ".join([*SIZES_OF_CONFIG, *RULES])
            raise UserError(f"{what}: {name[:40]!r} is none of the fields that count here, which are {known}")
        found[name] = value
    return found
