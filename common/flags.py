"""Flags of all commands: a parser with one-line errors, and argparse types with clear messages."""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from common.errors import UserError
from common.wording import one_line

Number = TypeVar("Number", int, float)

# Upper bound of numeric flags: a typo ends in an error, not in an overflow, an endless loop or a full memory.
MAX_INT = 10**9
# maximum characters of an error line: a value pasted by mistake can be a whole file
MAX_MESSAGE = 300
# value of a flag that leaves the decision to the command
AUTO = "auto"
# {pattern of other programs' flags: the same here}
OTHER_NAMES = Path(__file__).with_name("other_names.yaml")
BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def boolean(text: str) -> bool:
    """Parse 1/0, true/false, yes/no or on/off; bool("False") would be true."""
    if text.lower() not in BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return BOOLEANS[text.lower()]


# argparse options of a boolean flag: `--use_moe`, `--use_moe True`, `--use_moe 0` all work.
SWITCH: dict[str, Any] = {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL"}


def number(kind: Callable[[str], Number], fits: Callable[[Number], bool], condition: str) -> Callable[[str], Number]:
    """An argparse type for numbers that pass `fits`. condition: the same in words, for the error message."""

    def convert(text: str) -> Number:
        value = kind(text)
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text} must be {condition}")
        return value

    # The name in argparse's message for a text that is not a number
    convert.__name__ = kind.__name__
    return convert


def positive(kind: Callable[[str], Number], most: int = MAX_INT) -> Callable[[str], Number]:
    """An argparse type for numbers above 0."""
    return number(kind, lambda value: 0 < value <= most, f"a number above 0 and at most {most:,}")


def at_least(least: int, reason: str) -> Callable[[str], int]:
    """An argparse type for integers from `least` on. reason: the end of the error message."""
    return number(int, lambda value: least <= value <= MAX_INT, f"at least {least} {reason}")


def not_negative(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """An argparse type for numbers from 0 on."""
    return number(kind, lambda value: 0 <= value <= MAX_INT, f"a number from 0 to {MAX_INT:,}")


def quantity(text: str) -> float:
    """A number that may end in k, M, G or B, or T: 200k is 200,000."""
    size = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}.get(text[-1:].lower())
    return float(text[:-1]) * size if size else float(text)


# argparse types for the intervals (0, 1], [0, 1) and (0, 1)
share = number(float, lambda value: 0 < value <= 1, "above 0 and at most 1")
fraction = number(float, lambda value: 0 <= value < 1, "at least 0 and below 1")
open_fraction = number(float, lambda value: 0 < value < 1, "above 0 and below 1")
seed = number(int, lambda value: 0 <= value < 2**32, "at least 0 and below 2**32")


class Parser(argparse.ArgumentParser):
    """ArgumentParser with one-line errors, exit code 2, and no abbreviated flags.

    An empty value is an error, since in a shell it usually is a variable that was never set. `may_be_empty` names the
    arguments that may be empty.
    """

    may_be_empty: tuple[str, ...] = ()
    # prefix of error messages: the settings file that is being read
    error_prefix = ""
    # Errors are UserErrors: the flags come from Python, not from a shell.
    raises = False

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self.nearest(unknown)}")
        for action in self._actions:
            value = getattr(parsed, action.dest, None)
            if "" in (value if isinstance(value, list) else [value]) and action.dest not in self.may_be_empty:
                reason = "an empty text; was a variable of the shell not set?"
                self.error(str(argparse.ArgumentError(action, reason)))
        return parsed

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """That of the base, which drops the value of `--flag=--` before Python 3.13."""
        if arg_strings != ["--"] or not action.option_strings:
            return super()._get_values(action, arg_strings)
        value = self._get_value(action, "--")
        self._check_value(action, value)
        return [value] if action.nargs == "+" else value

    def nearest(self, words: Sequence[str]) -> str:
        """Returns what the error for unknown flags advises; "" if no known flag does the same or is spelt alike."""
        known = [name[2:] for action in self._actions for name in action.option_strings if name.startswith("--")]
        # Not when this file is imported: `--help` has no need of it.
        other_names = yaml.safe_load(OTHER_NAMES.read_text(encoding="utf-8"))
        meant = []
        # Not their values. Texts from the web have dashes of print.
        for word in filter(re.compile("[-–—]").match, words):
            name = word.partition("=")[0].lstrip("-–—").replace("-", "_")
            others = [names for pattern, names in other_names.items() if re.fullmatch(pattern, name)]
            # A slip of the finger; another word or letter in front would be more.
            alike = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            close = [ours for ours in alike if ours[0] == name[:1] and abs(len(ours) - len(name)) <= 2]
            if name not in known and others:
                # A flag of earlier versions
                if isinstance(others[0], str):
                    return f"; {others[0]}"
                close = [ours for ours in others[0] if ours.split()[0] in known]
            meant += [f"--{ours}" for ours in close[:1]]
        return f"; did you mean {' '.join(meant)}?" if meant else ""

    def error(self, message: str) -> NoReturn:
        message = one_line(f"{self.error_prefix}{message}")
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]} ..."
        if self.raises:
            raise UserError(message)
        print(f"error: {message} (--help lists the flags)", file=sys.stderr)
        sys.exit(2)


def as_text(value: object) -> str:
    """A value as a flag takes it."""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
