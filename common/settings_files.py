"""Files of settings: what `--config` reads, and what a run writes beside its weights.

A value is read as the text that stands in the file, and the flag of the same name makes a number of it. So a file and a
command line mean the same: YAML alone would read 012 as ten, 1:30 as ninety and 2026-11-21 as a date.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from common.errors import UserError
from common.files import atomic_file
from common.paths import similar_file

# No settings are this long; a data file that was named by mistake is.
MOST_BYTES = 1 << 20
# What a message on the file of --config begins with, as those that argparse writes.
CONFIG = "argument --config:"
# What a file says of one setting; None: nothing. Numbers are text here.
Item = str | bool
Entry = Item | list[Item] | None


def write_settings(settings: object, path: Path) -> None:
    """Write a YAML file that `--config` reads as the same settings. What is not set is left out."""
    values = {name: value for name, value in vars(settings).items() if value is not None}
    text = yaml.dump(values, Dumper=PlainDumper, sort_keys=False, allow_unicode=True)
    # A run that is killed here leaves the file of the run before it, or a whole new one.
    with atomic_file(path) as file:
        file.write(text.encode())


class PlainDumper(yaml.SafeDumper):
    """YAML in which a text comes back as it was.

    PyYAML writes line separators such as U+0085 as they are, and reads them as line feeds.
    """

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


PlainDumper.add_representer(str, PlainDumper.represent_str)


def read_entries(path: Path) -> dict[str, Entry]:
    """{setting: what a YAML or JSON file says of it}. Nothing in the file can run code, or take much memory.

    Errors: UserError, one line that names the file.
    """
    found = parse_text(read_text(path), path)
    if not isinstance(found, Mapping):
        raise UserError(f"argument --config: {path} holds no settings; lines such as `batch_size: 8` are wanted")
    entries: dict[str, Entry] = {}
    for key, value in found.items():
        name = str(key)
        is_list = isinstance(value, list)
        for item in value if is_list else [value]:
            # `device:` alone says nothing of the device. In a list there is no such thing as no value.
            is_nothing = item is None and not is_list
            if not is_nothing and not isinstance(item, Item):
                raise UserError(f"{path}: {name}: a text, a number, true or false, or a list of these is wanted")
        entries[name] = value
    return entries


def read_text(path: Path, flag: str = CONFIG) -> str:
    """The text of the file that a flag names. flag: what a message begins with. Errors: UserError."""
    try:
        # A script reads its flags twice: before the long imports and after them. A pipe would be empty by then.
        if path.exists() and not path.is_file():
            raise UserError(f"{flag} {path} is not a regular file")
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read ({error.strerror}){similar_file(path)}") from None
    if len(content) > MOST_BYTES:
        raise UserError(f"{flag} {path} has more than {MOST_BYTES:,} bytes; that is no file of settings")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path} is not in UTF-8") from None


def parse_text(text: str, path: Path, flag: str = CONFIG) -> object:
    """What the text of a file holds. flag: what a message begins with. Errors: UserError."""
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        # JSON is nearly a part of YAML, but its errors are clearer from its own reader.
        if kind == "JSON":
            return json.loads(text, object_pairs_hook=no_key_twice, parse_int=str, parse_float=str, parse_constant=str)
        return yaml.load(text, Loader=PlainLoader)
    except json.JSONDecodeError as error:
        fail(flag, path, error.lineno, kind, error.msg)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        fail(flag, path, line, kind, error.problem or "unknown")
    except yaml.reader.ReaderError as error:
        fail(flag, path, None, kind, error.reason)
    except KeyTwiceError as error:
        raise UserError(f"{flag} {path}: {error} stands there twice") from None
    except ValueError as error:
        # A tag of YAML asks for a kind that the value is not of, as in `!!int abc`.
        fail(flag, path, None, kind, str(error))
    except (LookupError, AttributeError, ArithmeticError):
        # What PyYAML raises where it does not look first, as for `!!bool maybe`.
        fail(flag, path, None, kind, "a value is not of the kind that its tag !!... names")
    except RecursionError:
        fail(flag, path, None, kind, "too many brackets within each other")


def fail(flag: str, path: Path, line: int | None, kind: str, why: str) -> NoReturn:
    place = f"{path}:{line}" if line else str(path)
    raise UserError(f"{flag} {place} is no {kind} ({why})")


class KeyTwiceError(Exception):
    """A key of a file that has it twice: which of its values was meant, nobody can tell."""


def no_key_twice(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file. Errors: KeyTwiceError."""
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise KeyTwiceError(name)
        content[name] = value
    return content


class PlainLoader(yaml.SafeLoader):
    """YAML in which true, false and null are themselves and every other value is text.

    It takes no aliases, with which a few lines could fill all memory.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "an alias", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        content = super().construct_mapping(node, deep)
        # PyYAML takes the last of several values without a word.
        seen: set[object] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise KeyTwiceError(key.value)
            seen.add(key.value)
        return content


KEPT_TAGS = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:null")
# PyYAML looks up by a value's first character what the value may be.
PlainLoader.yaml_implicit_resolvers = {}
for _character, _resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
    _kept = [(tag, pattern) for tag, pattern in _resolvers if tag in KEPT_TAGS]
    PlainLoader.yaml_implicit_resolvers[_character] = _kept
