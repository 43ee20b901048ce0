"""Seconds that compiling takes on this machine, remembered in the folder of the compiler's cache."""

import contextlib
import getpass
import json
import os
import tempfile
from pathlib import Path

from common.files import atomic_file, read_object
from trainer.machine.compiling import COMPILE_SECONDS

FILE_NAME = "compile_seconds.json"
# Key of code that is not in the cache
NEW = "new"
# Assumed seconds of code in the cache, relative to those when it was new
CACHED_SHARE = 0.15
# More means that other programs disturbed it, and no run would be compiled any more.
MAX_SECONDS = 2 * COMPILE_SECONDS
MIN_SECONDS = 1.0


class CompileTimes:
    """{key of some code: seconds to expect the next time}. Once the cache is emptied, the file is gone too."""

    def __init__(self) -> None:
        user = "unknown_user"
        # A container may have no name for its user.
        with contextlib.suppress(KeyError, OSError):
            user = getpass.getuser()
        # torch's own function for this folder loads the compiler, which takes a second.
        default = Path(tempfile.gettempdir()) / f"torchinductor_{user}"
        self.path = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", default)) / FILE_NAME
        self.seconds: dict[str, float] = {}
        # Whatever stands there was of use for speed alone.
        with contextlib.suppress(OSError, ValueError):
            known = read_object(self.path)
            self.seconds = {name: seconds for name, seconds in known.items() if isinstance(seconds, float)}

    def least(self) -> float:
        """Seconds of the code that compiles fastest."""
        return min(self.seconds.values(), default=COMPILE_SECONDS)

    def expected(self, key: str) -> float:
        """Seconds to compile the code of this key."""
        return self.seconds.get(key, self.seconds.get(NEW, COMPILE_SECONDS))

    def remember(self, key: str, seconds: float) -> None:
        """Record how long it took. If the folder cannot be written, nothing is remembered."""
        # A difference of two times, which may be noise where the process has compiled the code before
        seconds = min(max(seconds, MIN_SECONDS), MAX_SECONDS)
        if key in self.seconds:
            self.seconds[key] = seconds
        else:
            self.seconds |= {NEW: min(seconds, self.seconds.get(NEW, seconds)), key: CACHED_SHARE * seconds}
        with contextlib.suppress(OSError), atomic_file(self.path) as file:
            file.write(json.dumps(self.seconds).encode())
