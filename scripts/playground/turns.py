"""Who may compute, and who has to wait: one text at a time for each model, one token at a time for all of them."""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator

import torch

from common.errors import UserError
from trainer.machine.random_state import rng_state, set_rng_state


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
