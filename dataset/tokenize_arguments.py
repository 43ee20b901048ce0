"""The settings of tokenize_corpus.py. Nothing here needs the libraries of tokenizers, so `--help` answers at once."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass

from common.flags import positive
from common.paths import ROOT
from common.settings import Settings, SettingsParser, parse, setting
from dataset.reading.settings import DocumentSettings

PROG = "tokenize_corpus.py"
DESCRIPTION = """Tokenise a corpus ahead of training.

    python dataset/tokenize_corpus.py --data_path dataset/pretrain_hq.jsonl
    python dataset/tokenize_corpus.py --data_path /data/corpus --cache_dir /shared/tokens

The trainers do the same on their first start and find what was made here. Then train with the same --data_path,
--tokenizer_path, --text_field, --text_suffixes, --cache_dir and switches.
"""


@dataclass(kw_only=True)
class CorpusSettings(DocumentSettings):
    """data"""

    # MISSING: no default, so the flag must be given.
    data_path: list[str] = setting(
        MISSING,
        several=True,
        help="as the trainer's: files of the kinds in dataset/README.md, folders, globs; with shares each gets a store",
        first=True,
    )
    tokenizer_path: str = setting(str(ROOT / "model"), help="folder of a Hugging Face tokenizer")


@dataclass(kw_only=True)
class WorkSettings(Settings):
    """work"""

    num_procs: int | None = setting(None, check=positive(int), help="processes (default: one a core)", first=True)


@dataclass(kw_only=True)
class TokenizeSettings(WorkSettings, CorpusSettings):
    """All settings of tokenize_corpus.py; --help shows the groups from the last to the first."""


def parser() -> SettingsParser:
    """The command line of tokenize_corpus.py."""
    return SettingsParser(TokenizeSettings, PROG, DESCRIPTION)


def parse_args(argv: Sequence[str] | None = None) -> TokenizeSettings:
    """The settings of a command line; None: of this process."""
    return parse(TokenizeSettings, PROG, DESCRIPTION, argv)
