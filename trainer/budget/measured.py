"""What was measured on a machine, remembered in the folder of the compiler's cache."""

import contextlib
import getpass
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from common.files import atomic_file, read_object
from trainer.machine.compiling import COMPILE_SECONDS

# Start of the names of seconds of compiling, and the end of one: of code that is not in the cache
COMPILING = "seconds to compile "
NEW = "new code"
# Assumed seconds of code in the cache, relative to those when it was new
CACHED_SHARE = 0.15
# More means that other programs disturbed it, and no run would be compiled any more.
MAX_SECONDS = 2 * COMPILE_SECONDS


class Measured:
    """{name of a measurement: its number}. machine: all that these depend on. Each has a file, which goes as the cache is emptied."""

    def __init__(self, machine: str) -> None:
        user = "unknown_user"
        # A container may have no name for its user.
        with contextlib.suppress(KeyError, OSError):
            user = getpass.getuser()
        # torch's own function for this folder loads the compiler, which takes a second.
        default = Path(tempfile.gettempdir()) / f"torchinductor_{user}"
        name = f"measured_{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"
        self.path = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", default)) / name
        self.numbers = self._read()

    def _read(self) -> dict[str, float]:
        # Whatever stands there was of use for speed alone.
        with contextlib.suppress(OSError, ValueError):
            known = read_object(self.path).items()
            return {name: number for name, number in known if isinstance(number, float) and 0 <= number < math.inf}
        return {}

    def least_to_compile(self) -> float:
        """Seconds of the code that compiles fastest."""
        return min((self.numbers[name] for name in self.numbers if COMPILING in name), default=COMPILE_SECONDS)

    def seconds_to_compile(self, key: str) -> float:
        """Seconds to compile the code of this key the next time."""
        return self.numbers.get(COMPILING + key, self.numbers.get(COMPILING + NEW, COMPILE_SECONDS))

    def remember_compiling(self, key: str, seconds: float) -> None:
        """Record a difference of two times, which may be noise where the process has compiled the code before."""
        seconds = min(max(seconds, 1.0), MAX_SECONDS)
        if COMPILING + key in self.numbers:
            self.remember({COMPILING + key: seconds})
        else:
            new = min(seconds, self.numbers.get(COMPILING + NEW, seconds))
            self.remember({COMPILING + NEW: new, COMPILING + key: CACHED_SHARE * seconds})

    def remember(self, numbers: Mapping[str, float]) -> None:
        """Record measurements. If the folder cannot be written, they are kept for this process alone."""
        # Another process may have recorded others.
        self.numbers |= {**self._read(), **numbers}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self.path) as file:
                file.write(json.dumps(self.numbers).encode())
