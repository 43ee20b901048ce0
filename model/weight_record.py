"""The weights in a folder, and the record of their training: in the `.json` beside a .pth, and in an export's config.json."""

from pathlib import Path
from typing import Any

from common.files import read_object, relative_to_cwd

# SHA-256 digests of the `.pth` beside it: the newest, and the one before, which is still there after a crash between the
# writes.
DIGEST_FIELD = "weights_sha256"
# The `vocabulary_digest` of the tokenizer
VOCABULARY_FIELD = "vocabulary_sha256"
# --parse_special_tokens: special tokens spelled out in a document were parsed
SPECIAL_TOKENS_FIELD = "parse_special_tokens"
# --max_seq_len: positions of the rows in training
ROW_LENGTH_FIELD = "trained_row_length"
# fine-tuned weights: trained on answers with thoughts
THOUGHTS_FIELD = "trained_thoughts"


def read_record(weight: Path) -> dict[str, Any]:
    """Returns the record of a .pth or a folder; {} if there is none. Errors: ValueError for a file that is not JSON."""
    path = weight / "config.json" if weight.is_dir() else weight.with_suffix(".json")
    record = read_object(path) if path.is_file() else {}
    return with_generation(record) if record.get("model_type") == "minimind" else record


def with_generation(record: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json. MiniMind's own names no generation, but only minimind3 has moe_intermediate_size."""
    if record.get("generation") is None and "moe_intermediate_size" in record:
        return {**record, "generation": "minimind3"}
    return record


def tokenizer_beside(weight: Path) -> Path:
    """The folder of the tokenizer of a .pth, and of its copy of the lowest validation loss: `pretrain_192.tokenizer`.

    It need not exist: then the weights are of the tokenizer in model/, or of one that the user names.
    """
    return weight.with_name(f"{weight.name.removesuffix('.pth').removesuffix('.best')}.tokenizer")


def newest_weight(folder: Path, prefix: str = "") -> Path | None:
    """The newest weights in a folder whose names begin with `prefix`, without the copies of the lowest validation loss."""
    # MiniMind's own trainer keeps its checkpoints beside the weights.
    others = ("_resume.pth", ".best.pth")
    paths = [path for path in folder.glob(f"{prefix}*.pth") if not path.name.endswith(others) and path.is_file()]
    return max(paths, key=lambda path: path.stat().st_mtime, default=None)


def existing_weights_hint(*folders: Path) -> str:
    """Such as "there is out/pretrain_256.pth", for an error: the newest weights of the first folder with any."""
    for folder in folders:
        if weight := newest_weight(folder):
            return f"there is {relative_to_cwd(weight)}"
    return f"{relative_to_cwd(folders[-1])} has no weights yet: make pretrain or trainer/train_pretrain.py trains some"
