"""common/wording.py: nothing that commands print can be obeyed by a terminal, and nobody has to read it."""

import io
import subprocess
import sys
import unicodedata
from unittest import mock

import pytest

from common import errors
from common.flags import Parser
from common.wording import announce, printable
from tests.helpers import ROOT, write_weights
from trainer.machine import command_line
from trainer.reporting.reporter import Reporter


@pytest.mark.slow
def test_a_reader_who_leaves_does_not_end_the_work_and_gets_no_false_line(tmp_path):
    """Whatever the names of folders: a terminal would obey this one."""
    folder = tmp_path / "out\x1b[0m"
    flags = ["--weight", write_weights(tmp_path / "pretrain_32", vocab_size=6400), "--out_dir", folder]
    command = [sys.executable, ROOT / "scripts" / "export_hf.py", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=120) == 0, errors
    assert b"roken pipe" not in errors and b"Traceback" not in errors
    assert (folder / "model.safetensors").exists()


def test_a_stream_that_cannot_show_a_character_spells_it(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", stream)
    announce("这 caf\udce9 \x9b", to_stderr=True)
    assert stream.buffer.getvalue() == b"\\u8fd9 caf\\udce9 <U+009B>\n"


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


def test_error_lines_and_log_lines_show_control_characters(capsys):
    with pytest.raises(SystemExit):
        command_line.run_cli(mock.Mock(side_effect=errors.UserError("bad\x1b[31mname\n\u202e")))
    assert capsys.readouterr().err == "error: bad<U+001B>[31mname <U+202E>\n"
    with pytest.raises(SystemExit):
        Parser().parse_args(["\x9b31m"])
    assert capsys.readouterr().err.startswith("error: unrecognized arguments: <U+009B>31m")
    Reporter(is_main=True).say("weights: \x1b]0;title\x07.pth")
    assert capsys.readouterr().out == "weights: <U+001B>]0;title<U+0007>.pth\n"
