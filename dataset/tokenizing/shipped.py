"""The tokenizers that come with this repository, and which of them a weight was trained with."""

from pathlib import Path

from tokenizers import Tokenizer

from common.paths import ROOT
from dataset.tokenizing.vocabulary import vocabulary_digest

# What is used where the user names none.
DEFAULT = ROOT / "model"
# That of the first releases (train_tokenizer.py --pieces compact), for weights that were trained with it.
COMPACT = DEFAULT / "tokenizer_compact"


def shipped_tokenizer(digest: str) -> Path | None:
    """The folder of the tokenizer with this `vocabulary_digest`; None where it is none of ours."""
    for folder in (DEFAULT, COMPACT):
        # Its entries are all that is asked for; transformers would take its time.
        if vocabulary_digest(Tokenizer.from_file(str(folder / "tokenizer.json"))) == digest:
            return folder
    return None


def unnamed_vocabulary(weight: Path) -> str:
    """What to say of a .pth that is read with DEFAULT, and whose .json names no vocabulary."""
    # Every weight that was trained with today's tokenizer says so.
    return (
        f"warning: {weight} does not say which tokenizer it was trained with, and the one in model/ is newer: name it "
        f"with --tokenizer_path (this repository's first releases: {COMPACT})"
    )
