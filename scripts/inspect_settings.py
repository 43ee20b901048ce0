"""The settings of inspect_data.py. Nothing here needs torch, so `--help` and a wrong flag are answered at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.flags import not_negative, seed
from common.paths import ROOT
from common.settings import Settings, SettingsParser, parse, setting, switch
from trainer.pretrain.settings import DataSettings, ValidationDataSettings

PROG = "inspect_data.py"
DESCRIPTION = """Look at the data before training on it.

    python scripts/inspect_data.py --data_path my.jsonl
    python scripts/inspect_data.py --data_path zh.jsonl:0.7 code/:0.3 --row 0 --out data.html
    python scripts/inspect_data.py --data_path chats.jsonl --row 0

Sources, tokenizer and rows are those of train_pretrain.py with the same flags, of conversations those of train_sft.py, and
the token store that is made here is the one that it opens.
"""


@dataclass(kw_only=True)
class LookSettings(Settings):
    """what to look at"""

    row: list[int] = setting(
        [],
        check=not_negative(int),
        several=True,
        metavar="N",
        help="show rows N of the first epoch",
        first=True,
    )
    texts: bool = switch(True, help="look at all texts: near copies, languages, odd documents; 0: only count")
    examples: int = setting(3, check=not_negative(int), help="of each kind of finding")
    out: str | None = setting(None, metavar="PAGE", help="also write an HTML page, as data.html", first=True)


@dataclass(kw_only=True)
class RowSettings(Settings):
    """rows"""

    tokenizer_path: str = setting(str(ROOT / "model"), help="folder of a Hugging Face tokenizer")
    seed: int = setting(42, check=seed, help="of the run whose rows are shown")
    conversations: bool | None = switch(
        None,
        help="read conversations, of which the answers are trained, as train_sft.py does (default: where the first line is "
        "one)",
    )


@dataclass(kw_only=True)
class InspectSettings(RowSettings, ValidationDataSettings, DataSettings, LookSettings):
    """All settings of inspect_data.py; --help shows the groups from the last to the first."""


def parser() -> SettingsParser:
    """The command line of inspect_data.py."""
    return SettingsParser(InspectSettings, PROG, DESCRIPTION)


def parse_args(argv: Sequence[str] | None = None) -> InspectSettings:
    """The settings of a command line; None: of this process."""
    return parse(InspectSettings, PROG, DESCRIPTION, argv)
