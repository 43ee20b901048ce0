"""Settings: dataclasses whose fields are the flags of a command, and the keys of its `--config` file.

A field says once what it is: its name, type, default, what values it takes, and its help. The settings of a command are one
flat dataclass that inherits its *groups*, a dataclass for each concern, whose docstring is the group's title in --help:

    @dataclass(kw_only=True)
    class MachineSettings(Settings):
        num_workers: int = setting(1, check=workers, help="processes that load batches; 0: none")

    @dataclass(kw_only=True)
    class PretrainSettings(MachineSettings, DataSettings, OutputSettings): ...

    settings = parse(PretrainSettings, "train_pretrain.py", "Pretrain a MiniMind.", argv)
    settings.num_workers

Nothing here imports torch or transformers, so that `--help` answers at once.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from common.errors import UserError
from common.flags import EMPTY_TEXT, SWITCH, HelpWithDefaults, Parser, boolean
from common.settings_files import Entry, read_entries

CONFIG_HELP = "a YAML or JSON file of settings, as a run leaves it in {name}.settings.yaml; flags win over it"
# Of what a file calls a setting, in an error line
LONGEST_NAME = 60


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
) -> Any:
    """A field of a Settings dataclass.

    default: MISSING for a flag that must be given. check: makes the value from the text of the flag, and raises
    argparse.ArgumentTypeError for one that it does not take; default: text as it is. several: the flag takes one or more
    values. may_be_empty: an empty text means something. first: --help shows it at the top.
    """
    options: dict[str, Any] = {"help": help, "type": check or str}
    if several:
        options["nargs"] = "+"
    if choices is not None:
        options["choices"] = tuple(choices)
    if metavar is not None:
        options["metavar"] = metavar
    metadata = {"options": options, "aliases": tuple(aliases), "may_be_empty": may_be_empty, "first": first}
    if isinstance(default, list):
        # Each settings object gets a list of its own.
        return field(default_factory=partial(list, default), metadata=metadata)
    return field(default=default, metadata=metadata)


def switch(default: bool | None, help: str, first: bool = False, aliases: Sequence[str] = ()) -> Any:
    """A field that is true or false: `--use_moe`, `--use_moe True`, `--use_moe 0` all work. None: not given."""
    metadata = {"options": {"help": help, **SWITCH}, "aliases": tuple(aliases), "may_be_empty": False, "first": first}
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class Settings:
    """The base of all groups and of the settings of a command."""

    def __post_init__(self) -> None:
        """Check the settings as they were given, then fill in what follows from them.

        A group does the one in its `check`, the other in its `fill_in`. Errors: ValueError, one line, for settings that do not
        go together.
        """
        for step in ("check", "fill_in"):
            for group in reversed(type(self).__mro__):
                # A class that only inherits a step is passed over; otherwise the step would run twice.
                if step in vars(group):
                    vars(group)[step](self)

    @classmethod
    def groups(cls) -> tuple[type["Settings"], ...]:
        """The groups of a command's settings, the last one of the help first. Settings that take over those of another
        command say them themselves.
        """
        return cls.__bases__


SettingsT = TypeVar("SettingsT", bound=Settings)


def field_of(kind: type[Settings], name: str) -> "Field[Any]":
    """The field of that name."""
    for one in fields(kind):
        if one.name == name:
            return one
    raise AssertionError(f"{kind.__name__} has no field {name}")


def default_of(kind: type[Settings], name: str) -> Any:
    """What a field is where nobody sets it."""
    return default_of_field(field_of(kind, name))


def default_of_field(one: "Field[Any]") -> Any:
    """MISSING: its flag must be given."""
    if one.default_factory is not MISSING:
        return one.default_factory()
    return one.default


def with_default(kind: type[Settings], name: str, default: Any, aliases: Sequence[str] = ()) -> Any:
    """The field of a group with another default, for a command that wants one. aliases: further names of its flag."""
    metadata = field_of(kind, name).metadata
    return field(default=default, metadata={**metadata, "aliases": (*metadata["aliases"], *aliases)})


# ------------------------------------------------------------------------------------------- the command line


class SettingsHelp(HelpWithDefaults, argparse.RawDescriptionHelpFormatter):
    """Each flag's default behind its help, and the lines of a description as they are."""


class SettingsParser(Parser):
    """The command line of a Settings class."""

    def __init__(self, kind: type[Settings], prog: str, description: str) -> None:
        super().__init__(prog, description, SettingsHelp)
        self.kind = kind
        self.may_be_empty = tuple(one.name for one in fields(kind) if one.metadata["may_be_empty"])
        self.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
        # The bases stand in the order in which Python looks things up, the last group of the help first.
        for group in reversed(kind.groups()):
            self._add_group(group)
        self.usage = self._short_usage()
        if any(one.metadata["first"] for one in fields(kind)):
            self._put_first()

    def _add_group(self, group: type[Settings]) -> None:
        """A flag for each field of a group."""
        flags = self.add_argument_group((group.__doc__ or "").strip())
        for one in fields(group):
            options = dict(one.metadata["options"])
            if "choices" not in options:
                options.setdefault("metavar", one.name.upper())
            default = default_of_field(one)
            if default is MISSING:
                options["required"] = True
            else:
                options["default"] = default
            flags.add_argument(f"--{one.name}", *one.metadata["aliases"], dest=one.name, **options)

    def _short_usage(self) -> str:
        """The flags that must be given. All others would be ten lines that nobody reads."""
        words = [self.prog]
        for action in self._actions:
            if action.required:
                words += [action.option_strings[0], action.dest.upper()]
        return " ".join([*words, "[--flag value ...]"])

    def _put_first(self) -> None:
        """Show the flags that matter first at the top, and --help and --config at the end."""
        # argparse has no public way to move a flag to another group, or a group to another place.
        first = {one.name for one in fields(self.kind) if one.metadata["first"]}
        top = self.add_argument_group(f"the {len(first)} flags that matter first")
        for group in self._action_groups:
            if group is top:
                continue
            for action in list(group._group_actions):
                if action.dest in first:
                    group._group_actions.remove(action)
                    top._group_actions.append(action)
        # The first two are argparse's own: arguments without a dash, of which there are none, and --help.
        positionals, options, *others = self._action_groups
        others.remove(top)
        self._action_groups = [positionals, top, *others, options]

    def get_settings(self, argv: Sequence[str] | None = None) -> Settings:
        """The settings of a command line, and of the --config file that it names."""
        argv = list(sys.argv[1:] if argv is None else argv)
        try:
            config = self._config_of(argv)
            if config is not None:
                self._take_defaults_of(config)
            values = vars(self.parse_args(argv))
            del values["config"]
            return self.kind(**values)
        except OSError as error:
            # Settings may look for the files that they name. What is wrong comes first, since a long message is cut.
            self.error(f"{error.strerror}: {error.filename}")
        except ValueError as error:
            self.error(str(error))

    def given(self, argv: Sequence[str] | None = None) -> frozenset[str]:
        """The names of the settings that are said by a flag or by the --config file. Errors: ValueError, UserError."""
        argv = list(sys.argv[1:] if argv is None else argv)
        actions = self._actions_by_key()
        # argparse takes nothing that begins with two dashes for a value.
        said = {argument.partition("=")[0].removeprefix("--") for argument in argv if argument.startswith("--")}
        config = self._config_of(argv)
        if config is not None:
            for name, entry in read_entries(config).items():
                if entry is not None and entry != []:
                    said.add(name)
        return frozenset(actions[name].dest for name in said if name in actions)

    def _config_of(self, argv: list[str]) -> Path | None:
        """The file behind --config. Errors: ValueError."""
        # A parser that knows this flag alone: whatever is wrong with the others is told once the file is read.
        before = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        before.add_argument("--config")
        try:
            found, _ = before.parse_known_args(argv)
        except argparse.ArgumentError:
            # --config without a file: the whole parser says so.
            return None
        if found.config is None or {"-h", "--help"} & set(argv):
            return None
        if not found.config:
            raise ValueError(f"argument --config: {EMPTY_TEXT}")
        return Path(found.config)

    def _take_defaults_of(self, path: Path) -> None:
        """Make the values in a settings file the defaults, so that flags win over them. Errors: UserError."""
        actions = self._actions_by_key()
        for name, entry in read_entries(path).items():
            if name not in actions:
                raise UserError(f"{path}: {name[:LONGEST_NAME]} is no setting of this command{self.nearest([name])}")
            if entry is None or entry == []:
                continue
            action = actions[name]
            try:
                value = self._value_of(action, entry)
                self.refuse_empty(action, value)
            except (ValueError, argparse.ArgumentError) as error:
                raise UserError(f"{path}: {error}") from None
            action.default = value
            action.required = False

    def _actions_by_key(self) -> dict[str, argparse.Action]:
        """{what a settings file may call it: flag}"""
        actions: dict[str, argparse.Action] = {}
        for action in self._actions:
            if action.dest in ("config", "help"):
                continue
            for option in action.option_strings:
                actions[option.removeprefix("--")] = action
        return actions

    def _value_of(self, action: argparse.Action, entry: Entry) -> Any:
        """What a flag makes of an entry of a settings file. Errors: argparse.ArgumentError."""
        items = entry if isinstance(entry, list) else [entry]
        if action.type is not boolean and any(isinstance(item, bool) for item in items):
            told = "true and false mean nothing here; put a text such as no or off in quotes"
            raise argparse.ArgumentError(action, told)
        texts = [str(item) for item in items]
        if action.nargs == "+":
            return [self._checked(action, text) for text in texts]
        # A flag whose one text holds several values, as 25,50,100
        return self._checked(action, ",".join(texts))

    def _checked(self, action: argparse.Action, text: str) -> Any:
        """Errors: argparse.ArgumentError, with the message that the flag gives."""
        # argparse's own steps for a value on the command line; it offers no public function for them.
        value = self._get_value(action, text)
        self._check_value(action, value)
        return value


def parse(kind: type[SettingsT], prog: str, description: str, argv: Sequence[str] | None = None) -> SettingsT:
    """The settings of a command line; argv None: of this process."""
    settings = SettingsParser(kind, prog, description).get_settings(argv)
    assert isinstance(settings, kind)
    return settings
