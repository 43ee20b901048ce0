"""common/wording.py: what stands in the lines that a person reads."""

import unicodedata

import pytest

from common import errors
from common.flags import Parser
from common.wording import printable
from trainer.machine import command_line
from trainer.reporting.reporter import Reporter


def obeyed(character: str) -> bool:
    """Unicode's own word on what a terminal or browser obeys: controls, and what sets a direction of writing."""
    directions = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    marks = "\u061c\u200e\u200f"
    is_control = unicodedata.category(character) == "Cc" and character not in "\n\t"
    return is_control or unicodedata.bidirectional(character) in directions or character in marks


def test_each_such_character_is_made_visible_and_others_are_left_alone():
    everything = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for character in everything:
        assert (printable(character) != character) == obeyed(character), ascii(character)


def test_error_lines_and_log_lines_show_control_characters(monkeypatch, capsys):
    def fail():
        raise errors.UserError("bad\x1b[31mname\n\u202e")

    with pytest.raises(SystemExit):
        command_line.run_cli(fail)
    assert capsys.readouterr().err == "error: bad␛[31mname <U+202E>\n"
    with pytest.raises(SystemExit):
        Parser().parse_args(["\x9b31m"])
    assert capsys.readouterr().err.startswith("error: unrecognized arguments: <U+009B>31m")
    Reporter(is_main=True).say("weights: \x1b]0;title\x07.pth")
    assert capsys.readouterr().out == "weights: ␛]0;title␇.pth\n"
