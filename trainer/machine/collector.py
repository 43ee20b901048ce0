"""Python's garbage collector while one thread keeps a GPU busy."""

import gc
from types import TracebackType

# The first updates compile, fill caches and set up what stays.
SETTLED_AFTER = 3
# Updates. A run that is neither evaluated nor saved for long leaves little that only the collector can free, but not nothing.
LOOK_EVERY = 1000


class QuietCollector:
    """Keeps the garbage collector from looking through everything in the middle of training.

    torch, transformers and the compiler leave millions of objects that live as long as the process. A look through all of
    them takes half a second, in which nobody gives the GPU any work. So after the first updates they are declared
    permanent, and the collector works only where the training pauses anyway: at a save and an evaluation. Almost all
    memory in Python is freed without it, as soon as nobody refers to it.

    active: whether there is a GPU to keep busy; otherwise nothing is done. A context manager: a program that calls a
    trainer as a function has its collector back afterwards.
    """

    def __init__(self, active: bool) -> None:
        self.active = active
        self._updates = 0
        self._is_quiet = False
        self._was_enabled = True
        self._is_frozen_by_us = False

    def __enter__(self) -> "QuietCollector":
        self._was_enabled = gc.isenabled()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_quiet:
            return
        self._is_quiet = False
        if self._is_frozen_by_us:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_update(self) -> None:
        """To be called after every update."""
        if not self.active:
            return
        self._updates += 1
        if self._updates == SETTLED_AFTER:
            self._become_quiet()
        elif self._updates % LOOK_EVERY == 0:
            self.look()

    def look(self) -> None:
        """Free what only the collector can free. To be called where the training pauses."""
        if self._is_quiet:
            gc.collect()

    def _become_quiet(self) -> None:
        gc.collect()
        # There is one set of permanent objects, and `unfreeze` empties it: that of another program is left alone.
        if not gc.get_freeze_count():
            gc.freeze()
            self._is_frozen_by_us = True
        gc.disable()
        self._is_quiet = True
