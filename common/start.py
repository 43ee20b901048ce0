"""First steps of a command, before its slow imports; runs in Python 3.7 too."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
# Scripts import this file first: the other imports take seconds.
STARTED = time.monotonic()


def guard_imports() -> None:
    """End the command with one line and exit code 2 if Python is too old or a package is missing.

    During the imports Ctrl-C kills the process at once; `run_cli` restores KeyboardInterrupt.
    """
    open_standard_streams()
    # For the whole process, not only while a run listens to it: a scheduler may send it in the last moment.
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs where the others cannot
        stop("Python 3.11 or newer is needed, and this is {}.{}".format(*sys.version_info[:2]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.excepthook = missing_package_hook


def open_standard_streams() -> None:
    """Open those that a shell's 2>&- or pythonw has left closed. A data file would get their numbers, and what C code prints."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # open() takes the lowest free number.
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def missing_package_hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook that prints one line for a missing package, and a traceback for everything else."""
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or (ROOT / package).exists():
        sys.__excepthook__(kind, error, trace)
        return
    environment = ROOT / ".venv"
    command = f"pip install -r {script_path('requirements.txt')}"
    if environment.is_dir() and Path(sys.prefix) != environment:
        shown = environment.name if Path.cwd() == ROOT else str(environment)
        command = f"{shown}\\Scripts\\activate" if os.name == "nt" else f". {shown}/bin/activate"
    stop(f"this Python has no package {package}; run this first: {command}")


def script_path(script: str) -> str:
    """A file of the repository, as typed in the current folder."""
    with contextlib.suppress(OSError):
        # OSError: the current folder was removed.
        if Path.cwd() == ROOT:
            return script
    return str(ROOT / script)


def shell_line(words: Iterable[str]) -> str:
    """A command, quoted for the shell of this system."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def next_command(purpose: str, script: str, *words: str | Path) -> tuple[str, str]:
    """(purpose, a command as typed in the current folder). script: its path in the repository."""
    return purpose, shell_line(["python", script_path(script), *map(str, words)])


def stop(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
