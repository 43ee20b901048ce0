"""common/terminal.py: nothing in a line is obeyed by a terminal."""

from common.notices import announce
from trainer.reporting.reporter import Reporter


def test_what_a_terminal_would_obey_is_spelt_out(capsys):
    for say in (announce, Reporter(is_main=True).say):
        say("\x1b[31mdoubted\x1b[2J")
        assert capsys.readouterr().out == "␛[31mdoubted␛[2J\n"
