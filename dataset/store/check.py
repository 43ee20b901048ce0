"""Whether the tokens of a store are what was written, found out beside the training that reads them."""

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

from common.errors import DataError
from common.files import file_digest
from dataset.store.format import CHECKED_AT_ONCE, TokenStore


class DigestCheck:
    """Compares the SHA-256 of each store's tokens.bin with the one in its meta.json, in a thread of its own.

    The other files, and the tokens of a small store, are checked when it is opened. The thread starts with the
    first question, so that processes which are forked before have no part in it. Hashing leaves the interpreter to the
    training.
    """

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        self.stores = [store for store in stores if store.tokens.nbytes > CHECKED_AT_ONCE]
        # The folder of a damaged store.
        self.damaged: Path | None = None
        self._thread: threading.Thread | None = None

    def raise_if_damaged(self, wait_s: float = 0.0) -> None:
        """Ask what is known by now; wait for at most `wait_s` seconds until all is.

        Errors: DataError once a store has turned out damaged; the next start will make it anew.
        """
        if not self.stores:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="digest check", daemon=True)
            self._thread.start()
        if wait_s and self._thread.is_alive():
            self._thread.join(wait_s)
        if self.damaged is not None:
            raise DataError(
                f"{self.damaged / 'tokens.bin'} is damaged: its content is not what was written. Nothing more is saved, and the "
                "next start tokenises the data again; what this run has saved since it started may have learned from damaged "
                "text"
            )

    def _look(self) -> None:
        """The thread: reads the tokens of one store after the other, and stops at the first damaged one."""
        # A disk that fails now fails the training itself, which says so.
        with contextlib.suppress(OSError):
            for store in self.stores:
                if file_digest(store.folder / "tokens.bin") != store.meta["sha256"]["tokens.bin"]:
                    # The next start finds no store there.
                    (store.folder / "meta.json").unlink(missing_ok=True)
                    self.damaged = store.folder
                    return
