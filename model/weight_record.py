"""What the `.json` beside a weight says of its training, and the config.json of an export too."""

from pathlib import Path
from typing import Any

from common.files import read_object

# SHA-256 of the `.pth` beside it: of the newest, and of the one before, which is still there if a crash came between the
# two files.
DIGEST_FIELD = "weights_sha256"
# The `vocabulary_digest` of the tokenizer
VOCABULARY_FIELD = "vocabulary_sha256"
# --parse_special_tokens: the spelling of a special token inside a text was that token
SPECIAL_TOKENS_FIELD = "parse_special_tokens"
# answers with thoughts were trained, in a fine-tuned weight
THOUGHTS_FIELD = "trained_thoughts"


def record_of(weight: Path) -> dict[str, Any]:
    """The fields above, as far as they are recorded, of a .pth or a folder. Errors: ValueError for a file that is no JSON."""
    path = weight.with_suffix(".json") if weight.suffix == ".pth" else weight / "config.json"
    return read_object(path) if path.is_file() else {}
