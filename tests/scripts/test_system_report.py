"""The table of `make report`, on a CPU: what its checks find, and what may not stand in it."""

import platform
import re
import sys
import tempfile
from pathlib import Path

import pytest

from scripts import system_report
from tests.helpers import ROOT

# In the place of Python: the first check holds, one fails, one crashes, one hangs.
CHECKS = """#!/bin/sh
case "$3" in
  start) echo "training ..."; echo "in bfloat16" ;;
  losses) echo "error: $HOME/my texts/a.jsonl:3: bad|line, says anna@annas-mac.local to 10.0.0.7" >&2; exit 2 ;;
  resume) kill -SEGV $$ ;;
  speed) exec sleep 60 ;;
esac
"""


def table(capsys, *flags):
    """(exit code, {what: what was found}) of the command."""
    code = system_report.main(["--device", "cpu", *flags])
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert (head, line) == ("| what | found |", "|---|---|")
    return code, dict(row.removeprefix("| ").removesuffix(" |").split(" | ") for row in rows)


@pytest.mark.slow
def test_every_check_holds_on_a_cpu(capsys):
    code, found = table(capsys, "--seconds", "1")
    assert code == 0 and list(found) == ["system", "processor", "versions", *system_report.CHECK_NAMES], found
    assert re.fullmatch(r"ok: in torch\.\w+, loss 8\.\d+ to 7\.\d+, \d+ s", found["start"])
    assert re.fullmatch(r"ok: within \S+ of float32 on the CPU .*", found["losses"])
    assert re.fullmatch(r"ok: stopped after update (8|9) of 20: the same weights to the last bit, .*", found["resume"])
    assert re.fullmatch(r"ok: 26 M, .*: [\d,]+ text tokens/s, \d+\.\d% of .*, \d\.\d GB at most, .*", found["speed"])
    secrets = (str(ROOT), str(Path.home()), tempfile.gettempdir(), platform.node())
    assert not [name for name in secrets if name in str(found)]


@pytest.mark.skipif(sys.platform == "win32", reason="a script of a shell")
def test_a_check_that_fails_crashes_or_hangs_is_a_row_without_names(capsys, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(CHECKS)
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(system_report, "SECONDS_OF_A_CHECK", 0.5)
    monkeypatch.setattr(platform, "node", lambda: "annas-mac.local")
    monkeypatch.setenv("USER", "anna")
    code, found = table(capsys, "--seconds", "1")
    assert code == 1 and found["start"] == "ok: in bfloat16, 0 s"
    assert found["losses"] == "FAILED, exit code 2: error: *** bad/line, says ***@***.*** to ***, 0 s"
    assert found["resume"] == "FAILED, exit code -11: , 0 s"
    assert found["speed"] == "FAILED: no end after 1.5 s"
