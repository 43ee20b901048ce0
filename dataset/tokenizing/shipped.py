"""The tokenizer that comes with this repository."""

from pathlib import Path

from common.paths import ROOT

# What is used where the user names none.
DEFAULT = ROOT / "model"


def unnamed_vocabulary(weight: Path) -> str:
    """What to say of a .pth that is read with DEFAULT, and whose .json names no vocabulary."""
    # Every weight of this repository says so; the public code has another tokenizer of the same size.
    return (
        f"warning: {weight} does not say which tokenizer it was trained with, and the one in model/ is taken: name its own "
        "with --tokenizer_path"
    )
