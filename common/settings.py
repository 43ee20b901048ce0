"""Settings: dataclasses whose fields are the flags of a command, and the keys of its `--config` file.

A field declares its name, type, default, check and help in one place. The settings of a command are one flat dataclass that
inherits its *groups*: one dataclass per concern, whose docstring is the group's title in --help:

    @dataclass(kw_only=True)
    class MachineSettings(Settings):
        num_workers: int = setting(1, check=workers, help="processes that load batches; 0: none")

    @dataclass(kw_only=True)
    class PretrainSettings(MachineSettings, DataSettings, OutputSettings):
        prog = "train_pretrain.py"
        description = "Pretrain a MiniMind."

    settings = PretrainSettings.parse(argv)
    settings.num_workers

Nothing here imports torch or transformers, so that `--help` answers at once.
"""

import argparse
import contextlib
import glob
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from numbers import Number
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from common.errors import UserError
from common.files import atomic_file, read_small
from common.flags import BOOLEANS, SWITCH, Parser

# Names of the settings that are paths
PATHS = re.compile(r"(?!overwrite)\w+_(dir|path|file|config)|mixture|from_weight")
CONFIG_HELP = "YAML or JSON file of settings, such as the {name}.settings.yaml of a run; flags override it"


def setting(
    default: Any,
    help: str,
    check: Callable[[str], Any] | None = None,
    choices: Sequence[str] | None = None,
    several: bool = False,
    aliases: Sequence[str] = (),
    may_be_empty: bool = False,
    first: bool = False,
    metavar: str | None = None,
    may_be_path: Callable[[Any], bool] | None = None,
) -> Any:
    """A field of a Settings dataclass.

    default: MISSING for a required flag. check: parses the text of the flag, and raises argparse.ArgumentTypeError for an
    invalid one; default: str. several: the flag takes one or more values and may be repeated. may_be_empty: an empty value
    is valid. first: --help shows it at the top. may_be_path: whether a value is a path, which it need not be.
    """
    options = {"help": help, "type": check or str, "choices": choices, "metavar": metavar}
    if choices and "0" in choices:
        # As sweeps write a 0: False
        spellings = {word: str(int(value)) for word, value in BOOLEANS.items()}
        options["type"] = lambda text: spellings.get(text.lower(), text)
    if several:
        options |= {"nargs": "+", "action": "extend"}
    metadata = {"options": options, "aliases": tuple(aliases), "may_be_empty": may_be_empty, "first": first}
    metadata |= {"may_be_path": may_be_path}
    if isinstance(default, list):
        # a fresh list for each settings object
        return field(default_factory=partial(list, default), metadata=metadata)
    return field(default=default, metadata=metadata)


def switch(default: bool | None, help: str, first: bool = False, aliases: Sequence[str] = ()) -> Any:
    """A boolean field: `--use_moe`, `--use_moe True`, `--use_moe 0` all work. None: not given."""
    metadata = {"options": {"help": help, **SWITCH}, "aliases": tuple(aliases), "may_be_empty": False, "first": first}
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class Settings:
    """The base of all groups and of the settings of a command."""

    # name and purpose of the command
    prog: ClassVar[str]
    description: ClassVar[str]

    # Names of the settings that the user sets, by a flag or a --config file; `replace` keeps it.
    user_set: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    # Of a call from Python: its current folder, and its paths, {flag: (as it was given, absolute)}
    folder: str = field(default="", repr=False, compare=False)
    given: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the given settings, then fill in those that follow from them.

        Groups do this in their methods `check` and `fill_in`. Errors: ValueError, one line, for incompatible settings.
        """
        for step in ("check", "fill_in"):
            for group in reversed(type(self).__mro__):
                # Not getattr: a step would run again for each class that inherits it.
                if step in vars(group):
                    vars(group)[step](self)

    @classmethod
    def groups(cls) -> tuple[type["Settings"], ...]:
        """The groups of a command, the last one of the help first. Overridden if a command inherits another command."""
        return cls.__bases__

    @classmethod
    def parse(cls, argv: Sequence[str] | None = None) -> Self:
        """Returns the settings of a command line; None: sys.argv."""
        return SettingsParser(cls).read(argv)

    @classmethod
    def of_call(cls, values: Mapping[str, object]) -> tuple[Self, list[str]]:
        """(settings of {flag: value} from Python, with fixed paths; their command line). Errors: UserError."""
        parser = SettingsParser(cls)
        parser.raises = True
        words = parser.words_of(values)
        settings = parser.read(words)
        settings.fix_paths()
        return settings, words

    @classmethod
    def of_file(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The fields that {setting: value} of a --config file gives."""
        return values

    def fix_paths(self) -> None:
        """Make paths absolute: the program that calls may change its current folder. `values` has them as they were given."""
        # OSError: the current folder was removed, and no relative path leads anywhere.
        with contextlib.suppress(OSError):
            self.folder = os.getcwd()
        for name, value in self.values().items():
            may_be_path = type(self).__dataclass_fields__[name].metadata.get("may_be_path")
            if value and (may_be_path(value) if may_be_path else PATHS.fullmatch(name)):
                is_text = isinstance(value, str)
                fixed = absolute(value, self.folder) if is_text else [absolute(text, self.folder) for text in value]
                self.given = {**self.given, name: (value, fixed)}
                setattr(self, name, fixed)

    def values(self) -> dict[str, Any]:
        """{flag: value}; paths as they were given, unless they have changed since."""
        values = {name: getattr(self, name) for name in flags_of(type(self))}
        return values | {name: given for name, (given, fixed) in self.given.items() if values[name] == fixed}


def absolute(text: str, folder: str) -> str:
    """A path, a pattern or a path with shares, as seen from a folder ("": as it is); addresses stay."""
    path = text.removeprefix("file://")
    # The name of the folder is no pattern.
    top = glob.escape(folder) if glob.has_magic(path) else folder
    return text if "://" in path or not folder else str(Path(top, os.path.expanduser(path)))


def flags_of(settings_class: type[Settings]) -> list[str]:
    """Names of the flags of a group or of a command."""
    return [field.name for field in fields(settings_class) if field.metadata]


def field_default(settings_class: type[Settings], name: str) -> Any:
    """Returns the default of a field; MISSING: its flag is required."""
    declared = settings_class.__dataclass_fields__[name]
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    return declared.default


def with_default(settings_class: type[Settings], name: str, default: Any, aliases: Sequence[str] = ()) -> Any:
    """Returns a copy of a group's field with another default. aliases: more names of its flag."""
    metadata = settings_class.__dataclass_fields__[name].metadata
    return field(default=default, metadata={**metadata, "aliases": (*metadata["aliases"], *aliases)})


# ------------------------------------------------------------------------------------------- the command line


class SettingsParser(Parser):
    """The command line of a Settings class."""

    def __init__(self, settings_class: type[Settings]) -> None:
        super().__init__(
            prog=settings_class.prog,
            description=settings_class.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.settings_class = settings_class
        declared = {name: settings_class.__dataclass_fields__[name].metadata for name in flags_of(settings_class)}
        self.may_be_empty = tuple(name for name, metadata in declared.items() if metadata["may_be_empty"])
        # The usage line has only the required flags: all of them would be ten lines that nobody reads.
        self.required = [name for name in declared if field_default(settings_class, name) is MISSING]
        must = "".join(f"--{name} {name.upper()} " for name in self.required)
        self.usage = f"{settings_class.prog} {must}[--flag value ...]"
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=CONFIG_HELP)
        n_first = sum(metadata["first"] for metadata in declared.values())
        top = self.add_argument_group(f"the {n_first} most important flags")
        # The bases are in method resolution order, the last group of the help first.
        for group in reversed(settings_class.groups()):
            flags = self.add_argument_group((group.__doc__ or "").strip())
            for name in flags_of(group):
                # Not the group's field: the command's may have another default.
                metadata = declared[name]
                options = dict(metadata["options"])
                if options.get("choices") is None and options["metavar"] is None:
                    options["metavar"] = name.upper()
                default = field_default(settings_class, name)
                if default not in (MISSING, None, []) and "default" not in options["help"]:
                    options["help"] += f" (default: {default})".replace("%", "%%")
                # SUPPRESS leaves out a flag that is not given: the field has the default.
                (top if metadata["first"] else flags).add_argument(
                    f"--{name}", *metadata["aliases"], dest=name, default=argparse.SUPPRESS, **options
                )

    def read(self, argv: Sequence[str] | None) -> Any:
        """See Settings.parse."""
        values = vars(self.parse_args(argv))
        try:
            if "config" in values:
                values = {**self._settings_in(Path(values.pop("config"))), **values}
            missing = [f"--{name}" for name in self.required if name not in values]
            if missing:
                self.error(f"the following arguments are required: {', '.join(missing)}")
            return self.settings_class(**values, user_set=frozenset(values))
        except OSError as error:
            # Settings may check their files. The reason comes first, since a long message is cut.
            self.error(f"{error.strerror}: {error.filename}")
        except ValueError as error:
            # A UserError of the parser has its prefix already.
            self.error_prefix = ""
            self.error(str(error))

    def words_of(self, values: Mapping[str, object]) -> list[str]:
        """The command line of {flag: value}: a text, a number, a boolean, a path, or a list of these; None: not given."""
        take_several = {name for action in self._actions if action.nargs == "+" for name in action.option_strings}
        words = []
        for name, value in values.items():
            items = value if isinstance(value, list | tuple) else [value]
            if value is None or not items:
                continue
            if not all(isinstance(item, str | Number | os.PathLike) for item in items):
                self.error(f"{name}: expected a text, a number, true or false, or a list of these")
            texts = [str(item) for item in items]
            if f"--{name}" not in take_several:
                # a flag with several values in one text, such as 25,50,100
                texts = [",".join(texts)]
            # `--name=text`, since the text may start with "-"
            words += [f"--{name}={text}" for text in texts]
        return words

    def _settings_in(self, path: Path) -> dict[str, Any]:
        """Returns {setting: value} of a YAML or JSON file. Errors: UserError, one line that names the file."""
        entries = read_plain(path, "argument --config:")
        if not isinstance(entries, dict):
            raise UserError(f"argument --config: {path} holds no settings; expected lines such as `batch_size: 8`")
        self.error_prefix = f"{path}: "
        values = vars(self.parse_args(self.words_of(entries)))
        if "config" in values:
            self.error("config: not possible within a settings file")
        self.error_prefix = ""
        return self.settings_class.of_file(values)


# ---------------------------------------------------------------------------------------------------- files of settings

NULL = "tag:yaml.org,2002:null"


class PlainLoader(yaml.BaseLoader):
    """YAML in which null is None and every other value is text. It ignores tags, so it runs no code."""


PlainLoader.add_implicit_resolver(NULL, re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""])
PlainLoader.add_constructor(NULL, lambda loader, node: None)


def write_settings(settings: Any, path: Path) -> None:
    """Write a YAML file that `--config` reads as the same Settings. Those that are None are left out."""
    values = {name: value for name, value in settings.values().items() if value is not None}
    # U+0085 is a line end for YAML: PyYAML reads it as a space unless it is escaped.
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode="\\x85" not in repr(values))
    # A run killed here leaves the previous run's file or a complete new one.
    with atomic_file(path) as file:
        file.write(text.encode())


def read_plain(path: Path, flag: str) -> object:
    """Returns the content of a YAML or JSON file, numbers as text. flag: prefix of messages. Errors: UserError, one line."""
    file_format = "JSON" if path.suffix == ".json" else "YAML"
    try:
        text = read_small(path).decode("utf-8-sig")
        # The YAML loader reads nearly all JSON too, but json's errors are clearer.
        if file_format == "JSON":
            return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
        return yaml.load(text, Loader=PlainLoader)
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{flag} {path} is not {file_format} ({error})") from None
