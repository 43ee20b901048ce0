"""What the `.json` beside a weight says of its training, and the config.json of an export too."""

from pathlib import Path
from typing import Any

from common.files import read_object

# SHA-256 of the `.pth` beside it: of the newest, and of the one before, which is still there if a crash came between the
# two files.
DIGEST_FIELD = "weights_sha256"
# The vocabulary of the tokenizer
VOCABULARY_FIELD = "vocabulary_sha256"
# Whether the spelling of a special token inside a text was that token, as --parse_special_tokens says
SPECIAL_TOKENS_FIELD = "parse_special_tokens"
# Of a fine-tuned weight: whether answers with thoughts were trained
THOUGHTS_FIELD = "trained_thoughts"


def vocabulary_of(weight: Path) -> str | None:
    """The `vocabulary_digest` of the tokenizer that a weight was trained with; None: it is not recorded. Errors: ValueError."""
    return _record_of(weight).get(VOCABULARY_FIELD)


def parses_special_tokens(weight: Path) -> bool | None:
    """How special tokens inside a text were read for a weight; None: it is not recorded. Errors: ValueError."""
    return _record_of(weight).get(SPECIAL_TOKENS_FIELD)


def has_trained_thoughts(weight: Path) -> bool:
    """Whether answers with thoughts were trained, as far as it is recorded. Errors: ValueError."""
    return bool(_record_of(weight).get(THOUGHTS_FIELD))


def _record_of(weight: Path) -> dict[str, Any]:
    """Empty where there is no such file. Errors: ValueError for one that is no JSON."""
    path = weight.with_suffix(".json") if weight.suffix == ".pth" else weight / "config.json"
    return read_object(path) if path.is_file() else {}
