"""The scripts of findings/ have the form that findings/README.md asks for. They are not run here: they install packages."""

import os
import re

import pytest

from tests.helpers import ROOT


@pytest.mark.parametrize("path", sorted((ROOT / "findings").glob("*.sh")), ids=lambda path: path.stem)
def test_a_finding_has_its_form_and_a_line_in_the_documents(path):
    head, code = path.read_text(encoding="utf-8").split("set -eu\n")
    parts = ["#!/usr/bin/env bash", "One would guess: ", "What happens: ", "In a run: ", "Instead: "]
    assert sorted(parts, key=head.find) == parts and all(part in head for part in parts)
    (packages,) = re.findall(r"pip install --quiet --no-compile (.*)", code)
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", package) for package in packages.split())
    assert "assert " in code and os.access(path, os.X_OK)
    assert f"findings/{path.name}" in (ROOT / "docs" / "libraries.md").read_text(encoding="utf-8")
