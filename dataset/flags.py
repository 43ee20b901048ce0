"""What the flags of all commands share: a parser that answers in one line, and types with clear errors."""

import argparse
import math
import sys

from dataset.wording import one_line


def boolean(text):
    """`--flag`, `--flag true`, `--flag 0` ...: bool("False") would be true."""
    values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return values[text.lower()]


def positive(kind):
    def convert(text):
        value = kind(text)
        if not (value > 0 and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
        return value

    convert.__name__ = f"positive {kind.__name__}"  # what argparse calls it in its message
    return convert


def not_negative(kind):
    def convert(text):
        value = kind(text)
        if not (value >= 0 and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text} must be a number from 0 up")
        return value

    convert.__name__ = f"non-negative {kind.__name__}"
    return convert


def share(text: str) -> float:
    """A part of a whole, above 0 and up to all of it."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return value


def fraction(text):
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and below 1")
    return value


def seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and below 2**32")
    return value


class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Adds each flag's default to its help, unless the help tells it in words or there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told_in_words = "default" in (action.help or "")
        has_none = action.default is None or action.default == []
        if told_in_words or has_none:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """One line for a wrong flag, and a bare form for booleans."""

    def error(self, message):
        print(f"error: {one_line(message)} (--help lists the flags)", file=sys.stderr)
        sys.exit(2)

    def switch(self, group, name, default, help):
        group.add_argument(name, type=boolean, nargs="?", const=True, default=default, metavar="BOOL", help=help)
