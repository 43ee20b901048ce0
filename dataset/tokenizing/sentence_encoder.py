"""Sentences to token ids, for fine-tuning an encoder."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.packages import loader_reason
from dataset.store.interface import Ints
from dataset.tokenizing.encoder import DocumentEncoder
from dataset.tokenizing.long_texts import LONGEST_WHOLE, TooLongToEncode

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

# Sentences that are encoded together. What the library holds of them beside their ids is many times as large, and gone
# before the next ones.
LINES = 4096


class TokensOfText(NamedTuple):
    """The tokens of a text, arrays [n]: ids; places [n, 2], where each begins and ends in the text, in characters; words, equal
    numbers for those of one word."""

    ids: Ints
    places: Ints
    words: Ints


class SentenceEncoder(DocumentEncoder):
    """Encodes sentences: their ids and nothing else. A "[SEP]" in a sentence is text, no special token.

    Errors: ValueError for a tokenizer without CLS, SEP or padding, or whose own examples begin with no special token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        super().__init__(tokenizer)
        # A sentence is no document.
        self._put_nothing_around()
        self.unk_id: int | None = tokenizer.unk_token_id
        self.cls_id, self.sep_id = self._ends_of_example(tokenizer)
        self.pad_id = tokenizer.pad_token_id
        if self.pad_id is None:
            raise ValueError("the tokenizer has no padding token; an encoder such as ELECTRA is wanted")
        # Funnel has a segment for CLS alone.
        self.cls_type = getattr(tokenizer, "cls_token_type_id", 0)

    def _ends_of_example(self, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, int]:
        """(the id that begins an example, the id that ends each of its sentences), as the tokenizer itself puts them.

        Their names differ: XLM begins with its BOS, and its CLS is what others call SEP; ESM ends with its EOS. Errors:
        ValueError.
        """
        name = type(tokenizer).__name__
        try:
            # The backend encodes text alone, also where the tokenizer around it wants each word's place on a page.
            own_format = tokenizer("a").input_ids if self._backend is None else self._backend.encode("a").ids
        except Exception as error:
            # Each tokenizer raises its own kinds.
            raise ValueError(
                f"{name} cannot encode a plain sentence ({loader_reason(error)}); an encoder of text, as BERT, is wanted"
            ) from error
        special = set(tokenizer.all_special_ids) - {self.unk_id}
        if special.isdisjoint(own_format[:1]):
            raise ValueError(
                f"{name} does not begin an example with its CLS token; an encoder that reads CLS first, as BERT does, is "
                "wanted"
            )
        sep_id = tokenizer.sep_token_id
        if sep_id is None and len(own_format) > 1 and own_format[-1] in special:
            sep_id = own_format[-1]
        if sep_id is None:
            raise ValueError(f"{name} has no SEP token; an encoder such as ELECTRA is wanted")
        return own_format[0], sep_id

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each sentence."""
        encoded = []
        for begin in range(0, len(texts), LINES):
            encoded.extend(self._encode_bodies(texts[begin : begin + LINES]))
        return encoded

    def encode_with_places(self, text: str) -> tuple[Ints, Ints]:
        """(ids [n] of a text, where each token begins and ends in it [n, 2], in characters).

        Errors: ValueError for a tokenizer that does not say so, TooLongToEncode.
        """
        encoding = self._encoding(text)
        ids = np.array(encoding.ids, dtype=np.int64)
        return ids, np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def encode_in_words(self, text: str) -> "TokensOfText":
        """As `encode_with_places`, and which word of the text each token belongs to."""
        encoding = self._encoding(text)
        # Of a token that the tokenizer takes for no part of a word: a word of its own.
        words = [-1 - i if word is None else word for i, word in enumerate(encoding.word_ids)]
        return TokensOfText(
            ids=np.array(encoding.ids, dtype=np.int64),
            places=np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2),
            words=np.array(words, dtype=np.int64),
        )

    def _encoding(self, text: str) -> "Encoding":
        if self._backend is None:
            raise ValueError(
                "the tokenizer does not say where its tokens stand in a text; one with tokenizer.json does"
            )
        if len(text) > LONGEST_WHOLE:
            raise TooLongToEncode(
                f"a text of {len(text):,} characters; at most {LONGEST_WHOLE:,} can be encoded at once"
            )
        return self._backend.encode(text, add_special_tokens=False)
