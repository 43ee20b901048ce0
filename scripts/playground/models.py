"""The models that a page plays with: loaded once, one text at a time each, token by token in turns."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
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
from trainer.machine.random_state import rng_state, set_rng_state

# A prompt is computed in one go, in which nobody can stop it.
MOST_PROMPT_TOKENS = 4096
MOST_NEW_TOKENS = 1024
# How many may wait for a model that is writing.
MOST_WAITING = 8
# Those who wait are told so this often; a page that has left is noticed by it.
SECONDS_BETWEEN_NEWS = 0.5

Message = dict[str, str]


class TooManyError(UserError):
    """So many wait already that one more is turned away."""


class Line:
    """Those who wait for something that one at a time may have, in the order in which they came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    def join(self, most: int | None = None) -> object:
        """A place at the end of the line. Errors: TooManyError if there are `most` already."""
        place = object()
        with self._changed:
            if most is not None and len(self._waiting) >= most:
                raise TooManyError("too many are waiting for this model; try again later")
            self._waiting.append(place)
        return place

    def ahead_of(self, place: object, seconds: float | None = None) -> int:
        """How many come before; waits for `seconds` at most (None: as long as it takes) until nobody does."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] is place, seconds)
            return self._waiting.index(place)

    def leave(self, place: object) -> None:
        with self._changed:
            self._waiting.remove(place)
            self._changed.notify_all()


class Turn:
    """The right to compute: one model at a time, so that each has the random numbers of its own seed.

    torch has one generator of random numbers for all threads. Whoever computes lends the turn to others after each
    token, and finds its own random numbers when it comes back. So two models write side by side, and each writes what
    generate.py would write.

    A page waits in two lines: that of its model for a whole text, and COMPUTING for each token. Pages 1 and 2 ask models A and B:

        what happens                      line of A   line of B   COMPUTING, the first one computes
        1 asks A and computes a token     1           -           1
        2 asks B and waits                1           2           1 2
        1 has its token, tells its page   1           2           2
        1 wants its next token            1           2           2 1
        2 has its token, tells its page   1           2           1
        3 asks A, which writes for 1      1 3         2           1
        1 has its whole text              3           2           3
    """

    def __init__(self, line: Line, device: torch.device) -> None:
        self.line = line
        self.device = device
        self.place = self._take()

    def _take(self) -> object:
        place = self.line.join()
        self.line.ahead_of(place)
        return place

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Within the block others may compute."""
        state = rng_state(self.device)
        self.line.leave(self.place)
        try:
            yield
        finally:
            self.place = self._take()
            set_rng_state(state, self.device)

    def end(self) -> None:
        self.line.leave(self.place)


# In which all models of this process wait for their turn to compute
COMPUTING = Line()


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
