"""Reading WordPiece vocabularies, checked as ELECTRA needs them, and tokenizers that return segments."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.wordpiece import WORDPIECE_TOKENS, wordpiece

# Size and special ids of BERT's lower-case English vocabulary, which ELECTRA shares
STANDARD_SIZE = 30_522
STANDARD_IDS = {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103}


def load_wordpiece(path: str | Path, lower_case: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer of a vocab.txt, or of a folder that train_tokenizer.py or save_pretrained wrote.

    Errors: OSError if there is none; ValueError if a special token is missing, ids have gaps, or special tokens of a
    vocabulary of the standard size have other ids than usual (a sorted file, or one that starts with another line).
    """
    path = Path(path)
    tokenizer: PreTrainedTokenizerBase
    if path.is_dir():
        tokenizer = load_tokenizer(path)
    else:
        try:
            # Not splitlines, which also ends a line at a U+2028, which a token may hold.
            lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
        except UnicodeDecodeError:
            raise ValueError(f"{path}: a WordPiece vocab.txt is in UTF-8, and this file is not") from None
        for token in WORDPIECE_TOKENS:
            if token not in lines:
                raise ValueError(f"{path}: no {token} in it; a WordPiece vocab.txt has one token per line")
        tokenizer = wordpiece(lines, lower_case)
    highest = max(tokenizer.get_vocab().values())
    # Models have one embedding per entry.
    if highest >= len(tokenizer):
        raise ValueError(
            f"{path}: the ids of this tokenizer have gaps (is a line there twice?): the highest of {len(tokenizer):,} is "
            f"{highest:,}"
        )
    for name, standard_id in STANDARD_IDS.items():
        token_id = getattr(tokenizer, f"{name}_token_id")
        if token_id is None:
            raise ValueError(f"{path}: this tokenizer has no {name} token, which ELECTRA needs")
        if len(tokenizer) == STANDARD_SIZE and token_id != standard_id:
            raise ValueError(
                f"{path}: {name} is id {token_id}, in the standard vocabulary of this size {standard_id}: the lines of the "
                "file are not in their usual order"
            )
    return tokenizer


def return_segments(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the tokenizer return token types. In transformers 5 those of ALBERT and XLNet return none by default."""
    tokenizer.model_input_names = list(dict.fromkeys([*tokenizer.model_input_names, "token_type_ids"]))
