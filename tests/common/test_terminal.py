"""common/terminal.py: what stands out on a terminal. References: the text itself, and lines that are filled word by word."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.notices import announce
from common.terminal import Style, TerminalText, filled, has_colours, marked
from common.wording import printable
from trainer.reporting.reporter import Reporter

RED = Style("31", ">>", "<<")
CODES = re.compile("\x1b\\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colours_are_for_a_terminal_and_for_those_who_want_them(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colours(Terminal())
    assert not has_colours(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colours(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colours(Terminal())
    # The standard has it so: an empty one says nothing.
    monkeypatch.setenv("NO_COLOR", "")
    assert has_colours(Terminal())


def test_a_mark_is_around_a_text_that_nothing_obeys():
    text = "a\x1b[2J\u202eb\x9b"
    assert marked(text, None, True) == printable(text)
    assert marked(text, RED, False) == f">>{printable(text)}<<"
    assert marked(text, RED, True) == f"\x1b[31m{printable(text)}\x1b[0m"


@given(
    st.lists(st.tuples(st.sampled_from(["", " ", "  ", "\n", " \n ", "\t"]), st.text(min_size=1), st.booleans())),
    st.integers(20, 60),
    st.booleans(),
)
def test_lines_hold_all_words_in_order_and_none_is_wider_than_it_must_be(entries, width, in_colour):
    words = [
        (before, text.replace("\n", " ").replace("\t", " "), RED if is_red else None)
        for before, text, is_red in entries
    ]
    lines = filled("label", 8, words, width, in_colour)
    assert lines[0].startswith("label")
    shown = [marked(text, style, in_colour) for _, text, style in words]
    squeezed = "".join("".join(lines).removeprefix("label").split())
    assert squeezed == "".join("".join(shown).split())
    longest = max((len(CODES.sub("", text)) for text in shown), default=0)
    for line in lines:
        # A gap is part of a line only where a word follows it.
        assert len(CODES.sub("", line)) <= max(width, 8 + longest + 4)


def test_a_word_that_does_not_fit_begins_the_next_line_and_colours_take_no_room():
    words = [(" ", "aaaa", None), (" ", "bbbb", RED), (" ", "cccc", None), ("\n    ", "dd", None)]
    assert filled("text", 6, words, 15, False) == ["text  aaaa", "      >>bbbb<<", "      cccc", "          dd"]
    in_colour = filled("text", 6, words, 15, True)
    assert in_colour == ["text  aaaa \x1b[31mbbbb\x1b[0m", "      cccc", "          dd"]


def test_a_line_breaks_at_a_blank_where_it_can():
    """A sign that stands right behind a word stays there: a break before it would show a blank that is not in the text."""
    words = [(" ", "aaaa", None), (" ", "bbbb", RED), ("", "!", None), ("", "?", RED)]
    assert filled("", 2, words, 17, False) == ["  aaaa", "  >>bbbb<<!>>?<<"]
    assert filled("", 2, words, 13, True) == ["  aaaa \x1b[31mbbbb\x1b[0m!\x1b[31m?\x1b[0m"]
    assert filled("", 2, words, 12, True) == ["  aaaa", "  \x1b[31mbbbb\x1b[0m!\x1b[31m?\x1b[0m"]
    # A text without blanks, as Chinese is, fills its lines.
    assert filled("", 2, [("", sign, None) for sign in "abcdefgh"], 7, False) == ["  abcde", "  fgh"]


def test_what_is_ready_is_printed_as_it_is_and_all_else_is_made_printable(capsys):
    ready = marked("doubted", RED, True)
    for say in (announce, Reporter(is_main=True).say):
        say(ready)
        assert capsys.readouterr().out == "\x1b[31mdoubted\x1b[0m\n"
        say(str(ready))
        assert capsys.readouterr().out == "␛[31mdoubted␛[0m\n"
        # What is made of it is a plain text again.
        say(ready + "\x1b[2J")
        assert "\x1b" not in capsys.readouterr().out


def test_a_terminal_text_says_so():
    assert isinstance(marked("a", None, False), TerminalText)
    with pytest.raises(AttributeError):
        TerminalText("a").more = 1
