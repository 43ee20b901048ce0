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
import difflib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import simple_parsing
import yaml
from simple_parsing import DashVariant

from common.errors import UserError
from common.files import atomic_file
from common.flags import LONGEST_MESSAGE, HelpWithDefaults, boolean
from common.wording import one_line

MOST_CONFIG_BYTES = 1 << 20
CONFIG_HELP = "a YAML or JSON file of settings, as a run leaves it in {name}.settings.yaml; flags win over it"


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
    options: dict[str, Any] = {"help": help, "type": check or str, "nargs": "+" if several else None}
    if choices is not None:
        options["choices"] = tuple(choices)
    if metavar is not None:
        options["metavar"] = metavar
    default_of_field = {"default": default}
    if isinstance(default, list):
        default_of_field = {"default_factory": partial(list, default)}
        options["required"] = False  # simple_parsing takes an empty list for no default
    metadata = {"may_be_empty": may_be_empty, "first": first, "aliases": tuple(aliases)}
    return simple_parsing.field(**default_of_field, alias=list(aliases) or None, metadata=metadata, **options)


def switch(default: bool, help: str, first: bool = False) -> Any:
    """A field that is true or false: `--use_moe`, `--use_moe True`, `--use_moe 0` all work."""
    # The action is named because simple_parsing would add a second flag, --no_use_moe, for each.
    options = {"type": boolean, "action": "store", "nargs": "?", "const": True, "metavar": "BOOL"}
    metadata = {"may_be_empty": False, "first": first, "aliases": ()}
    return simple_parsing.field(default=default, help=help, metadata=metadata, **options)


@dataclass(kw_only=True)
class Settings:
    """The base of all groups and of the settings of a command."""

    def __post_init__(self) -> None:
        """Errors: ValueError, one line, for settings that do not go together."""
        for group in reversed(type(self).__mro__):
            if "check" in vars(group):
                group.check(self)  # type: ignore[attr-defined]  # it has one, as the line above says


SettingsT = TypeVar("SettingsT", bound=Settings)


def default_of(kind: type[Settings], name: str) -> Any:
    """What a field is where nobody sets it."""
    for field in fields(kind):
        if field.name == name:
            return field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    raise AssertionError(f"{kind.__name__} has no field {name}")


def with_default(kind: type[Settings], name: str, default: Any) -> Any:
    """The field of a group with another default, for a command that wants one."""
    for field in fields(kind):
        if field.name == name:
            custom = dict(field.metadata["custom_args"])
            own = {key: field.metadata[key] for key in ("may_be_empty", "first", "aliases")}
            aliases = list(own["aliases"]) or None
            return simple_parsing.field(default=default, alias=aliases, metadata=own, **custom)
    raise AssertionError(f"{kind.__name__} has no field {name}")


# ------------------------------------------------------------------------------------------- the command line


class SettingsParser(simple_parsing.ArgumentParser):
    """The command line of a Settings class. A wrong flag ends with one line and exit code 2."""

    def __init__(self, kind: type[Settings], prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [--flag value ...]",
            description=description,
            formatter_class=HelpWithDefaults,
            allow_abbrev=False,
            add_option_string_dash_variants=DashVariant.UNDERSCORE,
        )
        self.kind = kind
        self.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
        # The bases stand in the order in which Python looks things up, the last group of the help first.
        for group in reversed(kind.__bases__):
            self.add_arguments(group, dest=group.__name__)
        self._preprocessing(args=[], namespace=None)
        self._name_plainly()
        if any(field.metadata["first"] for field in fields(kind)):
            self._put_first()

    def _put_first(self) -> None:
        """Show the flags that matter first at the top, and --help and --config at the end."""
        first = {field.name for field in fields(self.kind) if field.metadata["first"]}
        top = self.add_argument_group(f"the {len(first)} flags that matter first")
        for group in self._action_groups:
            if group is top:
                continue
            for action in list(group._group_actions):
                if field_name(action) in first:
                    group._group_actions.remove(action)
                    top._group_actions.append(action)
        positionals, options, *others = self._action_groups
        others.remove(top)
        self._action_groups = [positionals, top, *others, options]

    def _name_plainly(self) -> None:
        """What simple_parsing calls by the group's name and the field's is called by the field's alone."""
        titles = {group.__name__: title(group) for group in self.kind.__bases__}
        for group in self._action_groups:
            name = (group.title or "").split(" [")[0]
            if name in titles:
                group.title = titles[name]
                group.description = None
        for action in self._actions:
            takes_a_value = action.option_strings and action.nargs != 0 and action.choices is None
            if takes_a_value and action.metavar in (None, *AUTOMATIC_METAVARS):
                action.metavar = field_name(action).upper()

    def get_settings(self, argv: Sequence[str] | None = None) -> Settings:
        """The settings of a command line, and of the --config file that it names."""
        argv = list(sys.argv[1:] if argv is None else argv)
        config = self._config_of(argv)
        if config is not None:
            # Looked at alone first, so that an error names the file.
            words = words_of_config(config, self)
            self._check_config(config, words)
            argv = [*words, *argv]
        return self._build(argv)

    def _build(self, argv: Sequence[str]) -> Settings:
        try:
            parsed = self.parse_args(argv)
            values: dict[str, Any] = {}
            for group in self.kind.__bases__:
                values |= vars(getattr(parsed, group.__name__))
            self._refuse_empty(values)
            return self.kind(**values)
        except ValueError as error:
            self.error(str(error))

    def _refuse_empty(self, values: dict[str, Any]) -> None:
        """An empty text is what a shell makes of a variable that was never set."""
        for field in fields(self.kind):
            value = values[field.name]
            items = value if isinstance(value, list) else [value]
            if "" in items and not field.metadata["may_be_empty"]:
                names = "/".join([f"--{field.name}", *field.metadata["aliases"]])
                self.error(f"argument {names}: an empty text; was a variable of the shell not set?")

    def _config_of(self, argv: list[str]) -> Path | None:
        before = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        before.add_argument("--config")
        try:
            found, _ = before.parse_known_args(argv)
        except argparse.ArgumentError:  # --config without a file: the whole parser says so
            return None
        if found.config is None or {"-h", "--help"} & set(argv):
            return None
        if not found.config:
            self.error("argument --config: an empty text; was a variable of the shell not set?")
        return Path(found.config)

    def _check_config(self, path: Path, words: list[str]) -> None:
        alone = SettingsParser(self.kind, self.prog, "")
        alone.prefix = f"{path}: "
        for action in alone._actions:
            action.required = False
        try:
            alone.parse_known_args(words)
        except ValueError as error:
            alone.error(str(error))

    prefix = ""  # of an error line: the file that the flags come from

    def error(self, message: str) -> NoReturn:
        message = one_line(f"{self.prefix}{message}")
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[:LONGEST_MESSAGE]} ..."
        print(f"error: {message} (--help lists the flags)", file=sys.stderr)
        sys.exit(2)


# What simple_parsing writes in the place of a value in --help
AUTOMATIC_METAVARS = ("str", "int", "float", "[str]", "[int]", "[float]", "list", "[list]")


def title(group: type[Settings]) -> str:
    """What --help calls a group."""
    return (group.__doc__ or "").strip()


def field_name(action: argparse.Action) -> str:
    """The field that a flag of a SettingsParser sets."""
    return action.dest.rpartition(".")[2]


def parse(kind: type[SettingsT], prog: str, description: str, argv: Sequence[str] | None = None) -> SettingsT:
    """The settings of a command line; argv None: of this process."""
    settings = SettingsParser(kind, prog, description).get_settings(argv)
    assert isinstance(settings, kind)
    return settings


# --------------------------------------------------------------------------------------------------- files


def write_settings(settings: Settings, path: Path) -> None:
    """Write a YAML file that `--config` reads as the same settings. What is not set is left out."""
    values = {name: value for name, value in vars(settings).items() if value is not None}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    with atomic_file(path) as file:
        file.write(text.encode("utf-8", errors="surrogateescape"))


def words_of_config(path: Path, parser: SettingsParser) -> list[str]:
    """The command line that says what a settings file says. Errors: the parser's, naming file and key."""
    content = read_config(path, parser)
    known = {field_name(action): action for action in parser._actions}
    words = []
    for key, value in content.items():
        if not isinstance(key, str) or key not in known or key in ("config", "help"):
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            parser.error(f"{path}: {str(key)[:60]} is no setting of this command{hint}")
        words += words_of_value(path, key, value, known[key], parser)
    return words


def words_of_value(path: Path, key: str, value: Any, action: argparse.Action, parser: SettingsParser) -> list[str]:
    """The flag that gives a setting a value."""
    if value is None:
        return []
    is_list = isinstance(value, list)
    items = value if is_list else [value]
    for item in items:
        if not isinstance(item, str | int | float):
            parser.error(f"{path}: {key} is a {type(item).__name__}; a text, a number or true or false is wanted")
    if is_list and not items:
        return []
    if is_list and action.nargs != "+":
        # A flag whose one text holds several values, as 25,50,100
        return [f"--{key}={','.join(map(str, items))}"]
    if not is_list:
        return [f"--{key}={value}"]
    for item in items:
        if str(item).startswith("-"):
            parser.error(f"{path}: {key}: {str(item)[:60]!r} begins with a dash, as a flag does")
    return [f"--{key}", *map(str, items)]


def read_config(path: Path, parser: SettingsParser) -> dict[Any, Any]:
    """The mapping in a YAML or JSON file. Nothing in it can run code. Errors: the parser's, in one line."""
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_CONFIG_BYTES + 1)
    except OSError as error:
        parser.error(f"argument --config: {path} cannot be read ({error.strerror})")
    if len(content) > MOST_CONFIG_BYTES:
        parser.error(
            f"argument --config: {path} has more than {MOST_CONFIG_BYTES:,} bytes; that is no file of settings"
        )
    try:
        text = content.decode("utf-8-sig")
        found = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = ""
        mark = getattr(error, "problem_mark", None)
        if mark is not None:
            where = f":{mark.line + 1}"
        problem = getattr(error, "problem", None) or type(error).__name__
        parser.error(f"argument --config: {path}{where} is no YAML ({problem})")
    if not isinstance(found, dict):
        parser.error(f"argument --config: {path} holds no settings; lines such as `batch_size: 8` are wanted")
    return found


class PlainLoader(yaml.SafeLoader):
    """YAML without anchors, which a few lines of could fill all memory, and with numbers such as 5e-4."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "an alias", self.peek_event().start_mark)
        return super().compose_node(parent, index)


def must_not_be_given(settings: Settings, name: str, why: str) -> None:
    """Errors: UserError where a setting is not its default."""
    if getattr(settings, name) != default_of(type(settings), name):
        raise UserError(f"--{name} has no effect: {why}; leave it out")
