"""Whether the tokens of a store are what was written, found out beside the training that reads them."""

import threading
from collections.abc import Sequence
from pathlib import Path

from common.errors import DataError
from common.files import file_digest
from dataset.store.format import CHECKED_AT_ONCE
from dataset.store.sharded import ShardedStore, Store, forget


class DigestCheck:
    """Compares the SHA-256 of each store's tokens.bin with the one in its meta.json, in a thread of its own.

    The other files, and the tokens of a small store, are checked when it is opened. The thread starts with the
    first question, so that processes which are forked before have no part in it. Hashing leaves the interpreter to the
    training.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = [store for store in stores if len(store.tokens) * store.tokens.dtype.itemsize > CHECKED_AT_ONCE]
        # What is fetched is compared with its digest then, so shards elsewhere have no `parts`.
        # Of the store, or of a shard of it.
        self.damaged: Path | None = None
        # What is done about it
        self.advice = ""
        self._thread: threading.Thread | None = None

    def raise_if_damaged(self, wait_s: float = 0.0) -> None:
        """Ask what is known by now; wait for at most `wait_s` seconds until all is.

        Errors: DataError once a store has turned out damaged; the next start will make it anew.
        """
        # All were checked when they were opened.
        if not self.stores:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="digest check", daemon=True)
            self._thread.start()
        if wait_s and self._thread.is_alive():
            self._thread.join(wait_s)
        if self.damaged is None:
            return
        raise DataError(
            f"{self.damaged / 'tokens.bin'} is damaged: its content is not what was written. Nothing more is "
            f"saved, and {self.advice}; what this run has saved since it started may have learned from damaged text"
        )

    def _look(self) -> None:
        """The thread: reads the tokens of one store after the other, and stops at the first damaged one."""
        for store in self.stores:
            try:
                for part in store.parts():
                    if file_digest(part.folder / "tokens.bin") != part.meta["sha256"]["tokens.bin"]:
                        self._note(part.folder, store)
                        return
            # A disk that fails now fails the training itself, which says so; so does a shard that is damaged otherwise.
            except (OSError, DataError):
                return

    def _note(self, folder: Path, store: Store) -> None:
        """Keep what is to be said of damaged tokens."""
        if isinstance(store, ShardedStore) and store.stays_as_it_is:
            self.advice = "the folder is to be copied again from where it was made"
        else:
            forget(folder)
            self.advice = "the next start tokenises the data again"
        self.damaged = folder
