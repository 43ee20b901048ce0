"""Which files in a folder of data were left there by a run, a token store or a model."""

import re
from collections.abc import Callable
from pathlib import PurePath


def is_own_output(below: PurePath, is_there: Callable[[PurePath], bool]) -> bool:
    """Whether a run, a token store or a model has left the file where data lies too.

    below: its path from the folder that was named. is_there: whether there is a file of such a path.
    """
    if (
        below.name.endswith((".metrics.jsonl", ".report.html", ".settings.yaml", ".plan.yaml"))
        or below.name == "hashes.json"
    ):
        return True
    # The settings of a model stand beside its weights.
    if below.suffix == ".json" and is_there(below.with_suffix(".pth")):
        return True
    # Below the folder that was named alone: whatever that one is called, the user wants what is in it.
    if any(re.search(r"_resume(_old\d+)?$", folder) for folder in below.parts[:-1]):
        return True
    beside = below.parent
    is_store = is_there(beside / "meta.json") and is_there(beside / "tokens.bin")
    is_model = is_there(beside / "config.json") and is_there(beside / "model.safetensors")
    is_tokenizer = is_there(beside / "tokenizer_config.json")
    return is_store or is_model or is_tokenizer
