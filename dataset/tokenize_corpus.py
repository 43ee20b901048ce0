"""Tokenise a corpus ahead of training.

    python dataset/tokenize_corpus.py --data_path dataset/pretrain_hq.jsonl
    python dataset/tokenize_corpus.py --data_path /data/corpus --cache_dir /shared/tokens

The trainers do the same on their first start and find what was made here. Then train with the same --data_path,
--tokenizer_path, --text_field, --text_suffixes, --cache_dir and switches.
"""

import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[1]
# Run by path: dataset/ would come first and could shadow a dependency.
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    from common.start import guard_imports

    guard_imports()

from common.flags import positive
from common.settings import setting
from dataset.reading.settings import DocumentSettings

DESCRIPTION = __doc__ or ""


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
    num_procs: int | None = setting(None, check=positive(int), help="processes (default: one a core)", first=True)


@dataclass(kw_only=True)
class TokenizeSettings(CorpusSettings):
    """All settings of tokenize_corpus.py; --help shows the groups from the last to the first."""

    prog: ClassVar[str] = "tokenize_corpus.py"
    description: ClassVar[str] = DESCRIPTION


if __name__ == "__main__":
    # --help and wrong flags are answered before the libraries of tokenizers are imported.
    TokenizeSettings.parse()

from common.errors import DataError, UserError, user_errors
from common.processes import obey_ctrl_c
from common.wording import announce, counted, one_line
from dataset.shares import group_sources
from dataset.store.deduplicate import notice_of, open_sources
from dataset.store.token_store import StoreOptions
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Tokenise what the flags name (default: the command line's). Returns the exit code."""
    settings = TokenizeSettings.parse(argv)
    with user_errors():
        encoder = DocumentEncoder(load_tokenizer(settings.tokenizer_path), bool(settings.parse_special_tokens))
    options: StoreOptions = {
        "cache_dir": settings.cache_dir,
        "text_field": settings.text_field,
        "skip_bad_lines": settings.skip_bad_lines,
        "num_procs": settings.num_procs,
        "text_suffixes": settings.text_suffixes,
    }
    groups = [source.paths for source in group_sources(settings.data_path)]
    for store in open_sources(groups, encoder, settings.deduplicate, **options):
        for line in store.bad_lines.report():
            announce(line)
        notice = notice_of(store)
        if notice is not None:
            announce(notice)
        announce(f"{store.folder}: {counted(len(store), 'document')}, {counted(len(store.tokens), 'token')}")
    return 0


if __name__ == "__main__":
    try:
        obey_ctrl_c()
        sys.exit(main())
    except (UserError, DataError) as error:
        announce(f"error: {one_line(error)}", to_stderr=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
