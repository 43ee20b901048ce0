"""WordPiece vocabularies, as BERT and ELECTRA have them: training and writing them."""

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from string import punctuation
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from common.files import atomic_folder, temporary_beside
from dataset.tokenizing.tokenizer_files import save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# in BERT's spelling and order
WORDPIECE_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Share of a text that the alphabet of a new vocabulary covers. Rarer characters would take the entries of common words.
ALPHABET_COVERAGE = 0.9995
# Maximum characters of a word in BERT's tokenizer. With a higher one a character without an entry would make more of the
# text [UNK], and a word takes time that grows with its cube: one of 20,000 a minute.
LONGEST_WORD = 100


def wordpiece(lines: list[str], lower_case: bool, cuts_words: bool = False) -> "PreTrainedTokenizerBase":
    """The BertTokenizer of a vocab.txt's lines. cuts_words: words of more than LONGEST_WORD characters are cut, not [UNK]."""
    # A slow import, which byte-level BPE does not need.
    from transformers import BertTokenizer, PreTrainedTokenizerFast

    bert = BertTokenizer(vocab={token: i for i, token in enumerate(lines)}, do_lower_case=lower_case)
    if not cuts_words:
        return bert
    backend = bert.backend_tokenizer
    cut = pre_tokenizers.Split(Regex(f".{{{LONGEST_WORD}}}"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([backend.pre_tokenizer, cut])
    # Of its files a BertTokenizer reads only the vocabulary.
    inputs = bert.model_input_names
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **bert.special_tokens_map)


def has_long_words(texts: list[str], rules: Tokenizer) -> bool:
    """True for Thai, DNA and the like: words over LONGEST_WORD are no rarity. texts: normalized. rules: BERT's."""
    # Such a run may still be words and punctuation.
    runs = (run for text in texts for run in re.findall(rf"\S{{{LONGEST_WORD + 1},}}", text))
    words = (word for run in runs for word, _ in rules.pre_tokenizer.pre_tokenize_str(run))
    n_long = sum(len(word) for word in words if len(word) > LONGEST_WORD)
    return n_long > (1 - ALPHABET_COVERAGE) * sum(map(len, texts))


def train_wordpiece(texts: Iterable[str], vocab_size: int, lower_case: bool) -> "PreTrainedTokenizerBase":
    """A tokenizer of at most `vocab_size` entries: WORDPIECE_TOKENS, the commonest characters, then pieces by frequency.
    A BertTokenizer, unless many words are too long for it. The same texts give the same vocabulary.
    """
    # BERT's normalizer and pre-tokenizer, from a minimal BertTokenizer
    rules = wordpiece(WORDPIECE_TOKENS, lower_case).backend_tokenizer
    # Iterated several times.
    texts = list(texts)
    normalized = [rules.normalizer.normalize_str(text) for text in texts]
    cuts_words = has_long_words(normalized, rules)
    rules = wordpiece(WORDPIECE_TOKENS, lower_case, cuts_words).backend_tokenizer
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = rules.normalizer
    tokenizer.pre_tokenizer = rules.pre_tokenizer
    # Each character may have two entries: itself and its continuation.
    most = (vocab_size - len(WORDPIECE_TOKENS)) // 2
    alphabet, continuing = common_characters(normalized, most)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        # By default the trainer numbers characters in an order that changes from process to process, and breaks ties
        # between pieces by these numbers.
        special_tokens=WORDPIECE_TOKENS + [f"##{character}" for character in continuing],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() <= vocab_size
    return wordpiece(entries(tokenizer), lower_case, cuts_words)


def common_characters(texts: Iterable[str], most: int) -> tuple[list[str], list[str]]:
    """(the most frequent characters without white space, which make up 99.95 % of the texts, but at most `most`; those of
    them that occur within words)."""
    counts: Counter[str] = Counter()
    within: set[str] = set()
    for text in texts:
        counts.update(text)
        # Characters that follow another one.
        within.update(re.findall(r"(?<=\S)\S", text))
    visible = {character: n for character, n in counts.items() if not character.isspace()}
    total = sum(visible.values())
    seen = 0
    found: list[str] = []
    # By descending frequency; ties by code point.
    for character in sorted(visible, key=lambda character: (-visible[character], character))[:most]:
        if seen >= ALPHABET_COVERAGE * total:
            break
        found.append(character)
        seen += visible[character]
    # BERT makes a word of each punctuation mark, so none continues one. ASCII marks such as "$", which Unicode calls
    # symbols, count too.
    within -= {mark for mark in found if unicodedata.category(mark).startswith("P") or mark in punctuation}
    return found, [character for character in found if character in within]


def entries(tokenizer: "Tokenizer | PreTrainedTokenizerBase") -> list[str]:
    """The lines of a tokenizer's vocab.txt: its tokens in the order of their ids."""
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def save_wordpiece(tokenizer: "PreTrainedTokenizerBase", out_dir: Path) -> None:
    """Write a tokenizer that AutoTokenizer loads, and its vocab.txt for code that reads only that, each file atomically."""
    out_dir.mkdir(parents=True, exist_ok=True)
    with atomic_folder(out_dir, temporary_beside(out_dir / "tokenizer"), last="tokenizer.json") as unfinished:
        save_tokenizer(tokenizer, unfinished)
        (unfinished / "vocab.txt").write_bytes("".join(f"{token}\n" for token in entries(tokenizer)).encode())
