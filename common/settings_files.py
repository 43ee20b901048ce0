"""Files of settings: what `--config` reads, and what a run writes beside its weights.

A value is read as the text that stands in the file, and the flag of the same name makes a number of it. So a file and a
command line mean the same: YAML alone would read 012 as ten, 1:30 as ninety and 2026-11-21 as a date.
"""

import json
import re
from pathlib import Path

import yaml

from common.errors import UserError
from common.files import atomic_file, read_small
from common.paths import similar_file

# No settings are this long; a data file that was named by mistake is.
MOST_BYTES = 1 << 20
NULL = "tag:yaml.org,2002:null"


class PlainDumper(yaml.SafeDumper):
    """YAML in which a text comes back as it was.

    PyYAML writes line separators such as U+0085 as they are, and reads them as line feeds.
    """

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


PlainDumper.add_representer(str, PlainDumper.represent_str)


class PlainLoader(yaml.BaseLoader):
    """YAML in which null is None and every other value is text. It runs no code, since it passes over tags."""


PlainLoader.add_implicit_resolver(NULL, re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""])
PlainLoader.add_constructor(NULL, lambda loader, node: None)


def write_settings(settings: object, path: Path) -> None:
    """Write a YAML file that `--config` reads as the same settings. What is not set is left out."""
    values = {name: value for name, value in vars(settings).items() if value is not None}
    text = yaml.dump(values, Dumper=PlainDumper, sort_keys=False, allow_unicode=True)
    # A run that is killed here leaves the file of the run before it, or a whole new one.
    with atomic_file(path) as file:
        file.write(text.encode())


def read_plain(path: Path, flag: str) -> object:
    """What a YAML or JSON file holds, numbers as text. flag: what a message begins with. Errors: UserError, one line."""
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        text = read_small(path, MOST_BYTES).decode("utf-8-sig")
        # JSON is nearly a part of YAML, but its errors are clearer from its own reader.
        if kind == "JSON":
            return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
        return yaml.load(text, Loader=PlainLoader)
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read ({error.strerror}){similar_file(path)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{flag} {path} is no {kind} ({error})") from None
