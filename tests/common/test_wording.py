"""common/wording.py: what stands in the lines that a person reads."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import errors
from common.flags import Parser
from common.wording import as_written, counted, first_to_last, one_line, printable
from trainer.machine import command_line
from trainer.reporting.reporter import Reporter


def obeyed(character: str) -> bool:
    """Unicode's own word on what a terminal or browser obeys: controls, and what sets a direction of writing."""
    directions = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    marks = "\u061c\u200e\u200f"
    is_control = unicodedata.category(character) == "Cc" and character not in "\n\t"
    return is_control or unicodedata.bidirectional(character) in directions or character in marks


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text):
    assert not any(obeyed(character) for character in printable(text))


def test_each_such_character_is_made_visible_and_others_are_left_alone():
    everything = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for character in everything:
        assert (printable(character) != character) == obeyed(character), ascii(character)


def test_numbers_and_their_nouns_agree():
    assert counted(1, "document") == "1 document"
    assert counted(0, "document") == "0 documents"
    assert counted(1200, "process", "processes") == "1,200 processes"


def test_numbers_that_follow_each_other():
    assert [first_to_last(0, 1200), first_to_last(3, 3)] == ["0 to 1,200", "3"]


def test_a_value_of_a_file_is_told_as_it_stands_there():
    values = json.loads('["a", null, true, 1.5, 1e3, [1], {"a": 1}]')
    assert [as_written(value) for value in values] == ["'a'", "null", "true", "1.5", "1000.0", "a list", "an object"]
    assert len(as_written("x" * 1000)) < 100


def test_an_error_is_one_printable_line():
    assert one_line("a\nb\x1b[2J\tc") == "a b␛[2J c"


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
