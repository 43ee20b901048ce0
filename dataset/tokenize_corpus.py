"""Tokenise a corpus ahead of training.

The flags, and what they do, stand in dataset/tokenize_arguments.py.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Run by path: dataset/ would come first and could shadow a dependency.
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    from common.start import begin

    begin()
    # --help and wrong flags are answered before the libraries of tokenizers are imported.
    from dataset.tokenize_arguments import parse_args

    parse_args()

from common.errors import DataError, UserError, user_errors
from common.processes import obey_ctrl_c
from common.wording import announce, counted, one_line
from dataset.shares import group_sources
from dataset.store.deduplicate import notice_of, open_sources
from dataset.store.token_store import StoreOptions
from dataset.tokenize_arguments import parse_args
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Tokenise what the flags name (default: the command line's). Returns the exit code."""
    settings = parse_args(argv)
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
