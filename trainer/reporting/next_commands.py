"""What a user may want to do with a finished run. Each job says it, and the report shows it."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from common.paths import ROOT


class NextCommand(NamedTuple):
    """A command for a finished run, and what it is for.

    In the command {top} stands for the folder of the repository as a prefix, {stem} for the path of the run's files without
    their endings, and {folder} for the folder that they are in.
    """

    purpose: str
    command: str


def filled(commands: Iterable[NextCommand], started: str, stem: Path) -> list[NextCommand]:
    """The commands that work in the current folder; first the one that goes on with the run. started: the command of its start."""
    top = "" if Path.cwd() == ROOT else f"{ROOT}/"
    places = {"{top}": top, "{stem}": str(stem), "{folder}": str(stem.parent)}

    def fill(word: re.Match[str]) -> str:
        text = word[0]
        for place, value in places.items():
            text = text.replace(place, value)
        # A path may have blanks in it.
        return word[0] if text == word[0] else shlex.quote(text)

    # The flag may stand there with a value, with `=`, or alone.
    again = re.sub(r" --from_resume(=\S+|( (?!-)\S+))?(?= |$)", "", started)
    own = [NextCommand(purpose, re.sub(r"\S+", fill, command)) for purpose, command in commands]
    return [NextCommand("train on, after a stop or for longer", f"{again} --from_resume 1"), *own]
