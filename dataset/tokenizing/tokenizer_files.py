"""Tokenizer files: what a tokenizer adds to a text by default, a folder that transformers 4.48 to 5 read alike, and checks
that the tokenizer fits a model or a text. A wrong one would silently train on [UNK].
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

from common.errors import DataError
from common.start import ROOT
from dataset.store.format import Tokens, digest_of_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The tokenizer of this repository, used by default
DEFAULT = ROOT / "model"
CONFIG = "tokenizer_config.json"
# Files that hold a whole tokenizer, of any class
WHOLE_TOKENIZER = ("tokenizer.json", "tokenizer.*.json", "*.model", "*.spm", "*.tiktoken", "tekken.json")
# `check_unknown_share`: tokens at the start of a text that are checked; minimum number of them; maximum share of [UNK]
SAMPLE = 100_000
MIN_SAMPLE = 50
MAX_UNKNOWN_SHARE = 0.5
# Minimum share of a model's embeddings that its own tokenizer has entries for: some models round the number of embeddings
# up, for speed.
MIN_FILLED_SHARE = 0.9


def bos_template(bos: str, bos_id: int) -> TemplateProcessing:
    """Puts BOS before each text, as in training; EOS comes from the model."""
    return TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)])


def remove_bos_template(backend: Tokenizer, bos: str | None, bos_id: int | None) -> None:
    """Removes the post-processor of `bos_template`, in place.

    Then a tokenizer's `to_str` is the same, byte for byte, whether its file has that post-processor or, as in earlier
    releases, none. Other post-processors stay as they are.
    """
    if bos is None or bos_id is None or backend.post_processor is None:
        return
    ours = Tokenizer(models.BPE())
    ours.post_processor = bos_template(bos, bos_id)
    # The library exposes a post-processor only in the whole tokenizer.json.
    if json.loads(backend.to_str())["post_processor"] == json.loads(ours.to_str())["post_processor"]:
        # transformers 5's default for a tokenizer.json without a post-processor
        backend.post_processor = TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])


def unnamed_tokenizer_warning(weight: Path) -> str:
    """The warning for a weight that is read with DEFAULT, and whose .json names no vocabulary."""
    # Weights of this repository name one; the public code has another tokenizer of the same size.
    return (
        f"warning: {weight} does not say which tokenizer it was trained with, so the one in model/ is used: if that is "
        "wrong, name its own with --tokenizer_path"
    )


def check_files(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """From a config alone transformers makes a tokenizer that has only the special tokens.

    Errors: ValueError if the folder lacks the vocabulary files of the tokenizer's class.
    """
    # such as {"vocab_file": "vocab.json", "merges_file": "merges.txt", "tokenizer_file": "tokenizer.json"}.
    files_of_class = type(tokenizer).vocab_files_names
    # Byte and character tokenizers need none.
    if not files_of_class or any(is_filled(path) for pattern in WHOLE_TOKENIZER for path in folder.glob(pattern)):
        return
    # Without a file that holds all, every other one is required.
    wanted = [name for what, name in files_of_class.items() if what != "tokenizer_file"]
    missing = [name for name in wanted if not is_filled(folder / name)]
    if wanted and not missing:
        return
    lacks = f"neither tokenizer.json nor {' and '.join(missing)}" if missing else "no tokenizer.json"
    raise ValueError(
        f"{folder}: no vocabulary is in there ({lacks}), and a tokenizer made without one "
        "knows no word; copy the tokenizer's files into this folder"
    )


def has_tokenizer(folder: Path) -> bool:
    """True if `folder` exists and has a tokenizer file of any kind."""
    return any(is_filled(path) for pattern in (CONFIG, *WHOLE_TOKENIZER) for path in folder.glob(pattern))


def is_filled(path: Path) -> bool:
    """True for a file that is not empty."""
    return path.is_file() and path.stat().st_size > 0


def check_unknown_share(tokens: Tokens, unk_id: int | None, what: str, ignored: Collection[int | None] = ()) -> None:
    """tokens: ids of a text, checked at its start. what: name of the text. ignored: ids that do not count, as separators.

    Errors: DataError if most of them are `unk_id`, from which nothing can be learned.
    """
    if unk_id is None:
        return
    beginning = tokens[:SAMPLE]
    separators = [token_id for token_id in ignored if token_id not in (None, unk_id)]
    beginning = beginning[~np.isin(beginning, separators)]
    if len(beginning) < MIN_SAMPLE:
        return
    is_unknown = beginning == unk_id
    share = float(is_unknown.mean())
    if share > MAX_UNKNOWN_SHARE:
        raise DataError(
            f"{what}: the tokenizer does not know {share:.0%} of the first {len(beginning):,} tokens; it is for another "
            "language or model, or its vocabulary is incomplete"
        )


def vocabulary_digest(tokenizer: "PreTrainedTokenizerBase | Tokenizer") -> str:
    """SHA-256 of the tokens and their ids, which differs between tokenizers of the same size."""
    return digest_of_json(sorted((i, token) for token, i in tokenizer.get_vocab().items()))


def check_vocabulary_size(entries: int, embeddings: int, what: str, fewer_are_fine: bool = False) -> None:
    """entries: the tokenizer's highest id + 1. embeddings: their number in the model. what: the tokenizer's name.

    Errors: ValueError for another model's tokenizer: an id has no embedding, or there are far more embeddings than ids.
    """
    least = 0.0 if fewer_are_fine else MIN_FILLED_SHARE * embeddings
    if not least <= entries <= embeddings:
        raise ValueError(
            f"{what}: the tokenizer has {entries:,} entries and the model embeddings for {embeddings:,}: it is the tokenizer of "
            "another model, or has entries that were added later; name the model's own"
        )
