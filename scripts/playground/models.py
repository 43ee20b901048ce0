"""The models that a page plays with: loaded once, one text at a time each, token by token in turns."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.errors import UserError
from common.wording import counted
from dataset.tokenizing.encoder import DocumentEncoder
from scripts.chat_template import can_chat
from scripts.foreign_config import end_ids
from scripts.generate import Sampling, TurnsEncoder, chat_ids, generate, room, turns_encoder
from scripts.playground.pieces import Piece, PieceStream, Probabilities
from scripts.playground.turns import COMPUTING, Line, Turn

# A prompt is computed in one go, in which nobody can stop it.
MOST_PROMPT_TOKENS = 4096
MOST_NEW_TOKENS = 1024
# How many may wait for a model that is writing.
MOST_WAITING = 8
# Those who wait are told so this often; a page that has left is noticed by it.
SECONDS_BETWEEN_NEWS = 0.5

Message = dict[str, str]


@dataclass(frozen=True)
class Request:
    """What a page asks for. Either `text` is to be continued, or the last of `messages` answered."""

    text: str | None
    messages: list[Message]
    sampling: Sampling
    seed: int


@dataclass(frozen=True)
class Outcome:
    """How a text has ended. reason: "end" for the model's own end of the text, "length"."""

    reason: str
    prompt_tokens: int
    tokens: int
    seconds: float


class PlayedModel:
    """A model with its tokenizer, and the line of those who want a text of it."""

    def __init__(
        self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, encoder: DocumentEncoder
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.line = Line()

    @property
    def can_chat(self) -> bool:
        return can_chat(self.tokenizer)

    @cached_property
    def turns_encoder(self) -> TurnsEncoder:
        """What makes ids of a conversation, for a tokenizer with a chat template."""
        return turns_encoder(self.tokenizer)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def prompt_ids(self, request: Request) -> list[int]:
        """The ids that the model goes on from. Errors: UserError for a prompt that is too long or has none."""
        fit = min(room(self.model, request.sampling), MOST_PROMPT_TOKENS)
        if request.text is None:
            if not self.can_chat:
                raise UserError("the tokenizer of this model has no chat template, so it cannot chat")
            ids = chat_ids(self.turns_encoder, request.messages, fit)
        else:
            ids = self.encoder.prompt_ids(request.text)
        if len(ids) > fit:
            raise UserError(f"the text has {counted(len(ids), 'token')}, and {fit:,} fit; make it shorter")
        if not ids:
            raise UserError("this model begins no text by itself: write something first")
        return ids

    def write(self, request: Request, tell: Callable[[list[Piece]], None], wait: Callable[[int], None]) -> Outcome:
        """Write what was asked for; `tell` gets the pieces after each token, `wait` how many come before.

        Whatever `tell` or `wait` raises ends the writing at once. Errors: UserError as `prompt_ids`; TooManyError.
        """
        place = self.line.join(most=MOST_WAITING + 1)
        try:
            while ahead := self.line.ahead_of(place, SECONDS_BETWEEN_NEWS):
                wait(ahead)
            return self._write(request, tell)
        finally:
            self.line.leave(place)

    def _write(self, request: Request, tell: Callable[[list[Piece]], None]) -> Outcome:
        ids = self.prompt_ids(request)
        turn = Turn(COMPUTING, self.model.device)
        start = time.perf_counter()

        def tell_in_between(pieces: list[Piece]) -> None:
            # A page that reads slowly keeps nobody else waiting.
            with turn.lent():
                tell(pieces)

        probabilities = Probabilities()
        stream = PieceStream(self.tokenizer, probabilities, tell_in_between)
        try:
            torch.manual_seed(request.seed)
            found = generate(self.model, self.tokenizer, ids, request.sampling, stream, probabilities)
        finally:
            turn.end()
        ended = found[0, -1].item() in end_ids(self.model, self.tokenizer.eos_token_id)
        seconds = time.perf_counter() - start
        return Outcome("end" if ended else "length", len(ids), stream.count, seconds)

    def warm_up(self) -> None:
        """The first text of a process takes longer, by what libraries import and set up for it."""
        request = Request("a", [], Sampling(max_new_tokens=2, temperature=0.8, top_p=0.9), seed=0)
        self.write(request, lambda pieces: None, lambda ahead: None)
