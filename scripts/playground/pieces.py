"""What a model writes, in pieces of whole characters, each with the probability of its tokens and of others.

A Chinese character has three bytes, which may be spread over several tokens. Such tokens are one piece: half a character
is never shown. The probabilities are the model's own, before the temperature and top_p change them.
"""

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.logits_process import LogitsProcessor

from dataset.tokenizing.byte_level_bpe import bytes_of_characters
from scripts.generate import TextStream

# Of the likeliest tokens, how many are shown.
ALTERNATIVES = 6
# SentencePiece's name of a byte that it has no other token for
BYTE_ENTRY = re.compile(r"<0x([0-9A-F]{2})>")
# What the bytes of a character that has not come to its end decode to
REPLACEMENT = "\ufffd"

# (what the token would add to the text, its probability)
Likely = tuple[str, float]


@dataclass(frozen=True)
class Token:
    """A token that was drawn. label: what it adds to the text, its name if it is a special one, or its bytes.

    likeliest: the tokens of the highest probability in its place, the likeliest first.
    """

    label: str
    probability: float
    likeliest: list[Likely]


@dataclass(frozen=True)
class Piece:
    """A stretch of text and the tokens that gave it; text: "" for special tokens, which are no text."""

    text: str
    tokens: list[Token]


class Probabilities(LogitsProcessor):
    """Keeps the probabilities of each token that `generate` computes until the token has come."""

    def __init__(self) -> None:
        # On a Mac's GPU transformers hands on a token only when the next one is computed, so there may be two.
        self.of_coming: deque[torch.Tensor] = deque()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """scores: [1, vocabulary], which is left as it is."""
        self.of_coming.append(scores[0].float().softmax(-1))
        return scores


class PieceStream(TextStream):
    """Calls `write` with the pieces that each token has ended: none while a character is not whole.

    A token goes through these states:

        computed     its probabilities are known (`probabilities.of_coming`), it has not come yet
        unfinished   it has come and its text is not whole: a Token in `_unfinished`, its id in `held_back`
        finished     its text is whole, or it is special and has none: part of a Piece in `_finished`
        handed on    `write` has got that piece
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, probabilities: Probabilities, write: Callable[[list[Piece]], object]
    ) -> None:
        super().__init__(tokenizer, self._keep)
        self.probabilities = probabilities
        self.write_pieces = write
        self.names_of_special = {int(i): str(tokenizer.convert_ids_to_tokens(i)) for i in tokenizer.all_special_ids}
        # Tokens whose text is not whole yet, and pieces that are.
        self._unfinished: list[Token] = []
        self._finished: list[Piece] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with each new token."""
        if not self.prompt_came:
            super().put(value)
            return
        (token_id,) = value.tolist()
        # Before the token is held back with the others: what it and the others would add is told from here.
        self._unfinished.append(self._token(token_id))
        super().put(value)
        # Special tokens are no text, so the stream would hold them back until the next word.
        if token_id in self.names_of_special and len(self._unfinished) == 1:
            self._keep("")
        self._hand_on()

    def end(self) -> None:
        """Hand on what was held back, be it whole or not."""
        super().end()
        self._hand_on()

    def _token(self, token_id: int) -> Token:
        probabilities = self.probabilities.of_coming.popleft()
        best = probabilities.topk(min(ALTERNATIVES, len(probabilities)))
        likeliest = []
        for other, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            likeliest.append((self._label(other), probability))
        return Token(self._label(token_id), float(probabilities[token_id]), likeliest)

    def _label(self, token_id: int) -> str:
        if token_id in self.names_of_special:
            return self.names_of_special[token_id]
        before = self._text_of(self.shown)
        text = self._text_of([*self.shown, *self.held_back, token_id])[len(before) :]
        # A model may have more embeddings than its tokenizer has entries.
        entry = str(self.tokenizer.convert_ids_to_tokens(token_id) or f"[{token_id}]")
        if text.endswith(REPLACEMENT):
            return bytes_of_entry(entry)
        return text or entry

    def _keep(self, text: str) -> None:
        """Called by the stream with text that has come to its end."""
        if self._unfinished:
            self._finished.append(Piece(text, self._unfinished))
            self._unfinished = []

    def _hand_on(self) -> None:
        pieces = self._finished
        self._finished = []
        self.write_pieces(pieces)


def bytes_of_entry(entry: str) -> str:
    """An entry of a vocabulary that is no whole text, as its bytes: "E4 BD"; as it is where it does not tell them."""
    single = BYTE_ENTRY.fullmatch(entry)
    if single:
        return single[1]
    byte_of = bytes_of_characters()
    if all(character in byte_of for character in entry):
        return " ".join(f"{byte_of[character]:02X}" for character in entry)
    return entry
