"""The tokenizers that come with this repository, and which of them a weight was trained with."""

from pathlib import Path

from common.paths import ROOT
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.vocabulary import vocabulary_digest

# What is used where the user names none.
DEFAULT = ROOT / "model"
# That of the first releases (train_tokenizer.py --pieces compact), for weights that were trained with it.
COMPACT = DEFAULT / "tokenizer_compact"


def shipped_tokenizer(digest: str) -> Path | None:
    """The folder of the tokenizer with this `vocabulary_digest`; None where it is none of ours."""
    for folder in (DEFAULT, COMPACT):
        if vocabulary_digest(load_tokenizer(folder)) == digest:
            return folder
    return None
