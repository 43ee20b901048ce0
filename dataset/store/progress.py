"""What a user sees while a corpus is tokenised."""

import sys
import time
from typing import Any

from tqdm import tqdm

from common.notices import announce
from common.wording import counted

LINE_EVERY_S = 60


class Progress:
    """A bar on a terminal, otherwise one plain line a minute and one at the end."""

    def __init__(self, name: str, total: int, num_procs: int, shown: bool) -> None:
        """name: of the data. total: bytes of source to tokenise. shown: False: say nothing."""
        self.name = name
        self.total = total
        self.shown = shown
        self.start = time.monotonic()
        self.last_line = self.start
        self.done = 0
        self.state = ""
        # Set when the store is there: a build that ends before that says nothing at its end.
        self.complete = False
        self.bar: tqdm[Any] | None = None
        if shown and sys.stderr.isatty():
            self.bar = tqdm(total=total, unit="B", unit_scale=True, desc=f"tokenising {name}", dynamic_ncols=True)
        elif shown:
            announce(f"tokenising {name}: {total / 1e6:.1f} MB, {counted(num_procs, 'process', 'processes')}")

    def advance(self, source_bytes: int, documents: int, tokens: int) -> None:
        """So many more bytes of source are done, and so many documents and tokens in all."""
        self.done += source_bytes
        now = time.monotonic()
        seconds = max(now - self.start, 1e-9)
        counts = f"{counted(documents, 'document')}, {counted(tokens, 'token')}"
        self.state = f"{counts}, {self.done / 1e6 / seconds:.1f} MB/s"
        if self.bar is not None:
            self.bar.update(source_bytes)
            self.bar.set_postfix_str(counts, refresh=False)
        elif self.shown and now - self.last_line > LINE_EVERY_S:
            self.last_line = now
            seconds_left = seconds * max(self.total - self.done, 0) / max(self.done, 1)
            announce(f"tokenising {self.name}: {self.state}, {seconds_left / 60:.0f} min left")

    def close(self) -> None:
        """End the bar, and say what was done where it was."""
        if self.bar is not None:
            self.bar.close()
        if self.shown and self.complete:
            announce(f"tokenised {self.name}: {self.state}, {time.monotonic() - self.start:.1f} s")
