"""What the scripts rely on of the config.json and generation_config.json of a folder that may come from anybody, checked.

The sizes of a model that also sees or hears stand in the config of its text part.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from common.errors import UserError
from common.files import MOST_CONFIG_BYTES, read_object
from common.flags import LARGEST
from common.notices import announce
from model.config import TOKEN_IDS, checked_token_id, in_json
from model.hf_folder import CONFIG

GENERATION_CONFIG = "generation_config.json"
# The objects that say how positions are rotated, in transformers 5 and 4
ROPE = ("rope_parameters", "rope_scaling")
# Where transformers 4 has none of them, this number stands among the sizes.
ROPE_THETA = "rope_theta"
# Of these, the numbers that something is divided by, or whose logarithm is taken
ROPE_ABOVE_0 = (ROPE_THETA, "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")


def vocabulary_size(config: PretrainedConfig) -> int:
    """How many tokens a model has embeddings for."""
    size: int = config.get_text_config(decoder=True).vocab_size
    return size


def most_positions(config: PretrainedConfig) -> int:
    """How many tokens a text may have. A model without numbered positions, such as a Bloom or a Mamba, has no such bound."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    # Some have -1 for no bound.
    return LARGEST if positions in (None, -1) else int(positions)


def check_sizes(folder: Path, config: PretrainedConfig) -> None:
    """Errors: UserError for sizes of a config that are none."""
    text = config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    for name, value, may_be_missing in (
        ("vocab_size", getattr(text, "vocab_size", None), False),
        ("max_position_embeddings", positions, positions in (None, -1)),
    ):
        if not may_be_missing and (type(value) is not int or not 0 < value <= LARGEST):
            raise UserError(f"{folder / CONFIG}: {name} is {in_json(value)}, no positive whole number")


def check_rotation(folder: Path, content: Mapping[str, object]) -> None:
    """Errors: UserError for numbers that no rotation of positions can be computed from. content: of config.json."""
    for where, name, value in numbers_of_rotation(content):
        is_above_0 = 0 < value < math.inf
        is_right = is_above_0 or (value == 0 and name not in ROPE_ABOVE_0)
        if not is_right:
            least = "above 0" if name in ROPE_ABOVE_0 else "from 0 on"
            place = f"{where}: " if where else ""
            raise UserError(f"{folder / CONFIG}: {place}{name[:60]} is {in_json(value)}, no finite number {least}")


def numbers_of_rotation(content: Mapping[str, object], where: str = "") -> Iterator[tuple[str, str, float]]:
    """(object of ROPE or "", name, number) of each number that says how positions are rotated, those of parts and layers included."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from numbers_of_rotation(value, where or (name if name in ROPE else ""))
        elif (where or name == ROPE_THETA) and isinstance(value, int | float) and not isinstance(value, bool):
            yield where, name, value


def token_ids_of_folder(folder: Path, content: Mapping[str, object]) -> dict[str, list[int]]:
    """{field: ids} of the fields of TOKEN_IDS, as generation_config.json has them, or config.json, whose content is given.

    Errors: UserError for what is no id of a token.
    """
    said: dict[str, list[int]] = {}
    text = content.get("text_config")
    if isinstance(text, Mapping):
        said.update(checked_token_ids(folder / CONFIG, text))
    said.update(checked_token_ids(folder / CONFIG, content))
    path = folder / GENERATION_CONFIG
    if path.exists():
        try:
            of_generation = read_object(path, MOST_CONFIG_BYTES)
        except ValueError as error:
            raise UserError(str(error)) from None
        said.update(checked_token_ids(path, of_generation))
    return said


def checked_token_ids(path: Path, content: Mapping[str, object]) -> dict[str, list[int]]:
    """{field: ids} of those fields of TOKEN_IDS in a JSON file that say something. Errors: UserError."""
    found = {}
    for name in TOKEN_IDS:
        try:
            value = checked_token_id(name, content.get(name))
        except ValueError as error:
            raise UserError(f"{path}: {error}") from None
        if value is not None:
            found[name] = value if isinstance(value, list) else [value]
    return found


def ids_that_fit(folder: Path, said: Mapping[str, list[int]], vocabulary: int) -> dict[str, list[int]]:
    """What a folder says of its token ids, without those that the model has no embedding for: each of them gets a line."""
    fitting = {}
    for name, ids in said.items():
        fitting[name] = [token_id for token_id in ids if token_id < vocabulary]
        for token_id in ids:
            if token_id >= vocabulary:
                announce(
                    f"warning: {folder}: its {name} is {token_id}, and the model has {vocabulary:,} tokens: it is left aside",
                    to_stderr=True,
                )
    return fitting


def end_ids(model: PreTrainedModel, eos_id: int | None) -> list[int]:
    """The ids of the tokens that end a text of this model. eos_id: the one of its tokenizer, None if it has none."""
    settings = model.generation_config
    said = None if settings is None else settings.eos_token_id
    ids = [] if eos_id is None else [eos_id]
    for token_id in said if isinstance(said, list) else [said]:
        if token_id is not None and token_id not in ids:
            ids.append(token_id)
    return ids
