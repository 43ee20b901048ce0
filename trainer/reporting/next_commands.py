"""What a user may want to do with a finished run. Each job says it; the start record of its metrics file carries it."""

import re
import shlex
from dataclasses import dataclass

# A metrics file may have been written by anybody, and more than this would be no page for a reader.
MOST = 100
LONGEST = 1000


@dataclass(frozen=True)
class NextCommand:
    """A command for a finished run, and what it is for.

    In the command {top} stands for the folder of the repository as a prefix, empty where it is the current one, {stem}
    for the path of the run's files without their endings, and {folder} for the folder that they are in.
    """

    purpose: str
    command: str

    def as_record(self) -> list[str]:
        """As it stands in the start record of a metrics file."""
        return [self.purpose, self.command]

    def filled(self, places: dict[str, str]) -> str:
        """The command of one run. places: {name without braces: what it stands for}."""

        def fill(word: re.Match[str]) -> str:
            filled = word[0]
            for name, value in places.items():
                filled = filled.replace("{" + name + "}", value)
            # A path may have blanks in it.
            return word[0] if filled == word[0] else shlex.quote(filled)

        return re.sub(r"\S+", fill, self.command)


def commands_of_record(record: object) -> list[NextCommand]:
    """The NextCommands of the entry `next_commands` of a start record; what no run wrote is left out."""
    if not isinstance(record, list) or len(record) > MOST:
        return []
    commands = []
    for entry in record:
        if not isinstance(entry, list) or len(entry) != 2:
            continue
        if all(isinstance(text, str) and len(text) <= LONGEST for text in entry):
            commands.append(NextCommand(*entry))
    return commands
