"""Tokenise a corpus ahead of training, on one machine or in shards on many.

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
from common.notices import announce
from common.processes import obey_ctrl_c
from common.wording import counted, one_line
from dataset.reading.settings import OFF
from dataset.shares import group_sources, name_of
from dataset.store.deduplicate import check_library, notice_of, without_copies
from dataset.store.sharded import ShardedStore, Store
from dataset.store.token_store import StoreOptions, build_shard
from dataset.tokenize_arguments import parse_args
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Tokenise what the flags name (default: the command line's). Returns the exit code."""
    settings = parse_args(argv)
    with user_errors():
        encoder = DocumentEncoder(load_tokenizer(settings.tokenizer_path), bool(settings.parse_special_tokens))
    options: StoreOptions = {
        "cache_dir": settings.cache_dir,
        "cache_gb": settings.cache_gb,
        "text_field": settings.text_field,
        "skip_bad_lines": settings.skip_bad_lines,
        "num_procs": settings.num_procs,
        "text_suffixes": settings.text_suffixes,
    }
    check_library(settings.deduplicate)
    groups = [source.paths for source in group_sources(settings.data_path)]
    whole = []
    for paths in groups:
        store = build_shard(paths, encoder, settings.shard, **options)
        if store is None:
            part, n_parts = settings.shard or (0, 0)
            announce(f"{name_of(paths)}: part {part} of {n_parts} is done; the last one puts the store together")
            continue
        for line in store.bad_lines.report():
            announce(line)
        tell(store)
        whole.append(store)
    if settings.deduplicate == OFF or len(whole) < len(groups):
        return 0
    for store in without_copies(whole, groups, encoder, settings.deduplicate, **options):
        notice = notice_of(store)
        if notice is not None:
            announce(notice)
        tell(store)
    return 0


def tell(store: Store) -> None:
    """Where a store is, and how large."""
    where = store.place if isinstance(store, ShardedStore) else store.folder
    announce(f"{where}: {counted(len(store), 'document')}, {counted(len(store.tokens), 'token')}")


if __name__ == "__main__":
    try:
        obey_ctrl_c()
        sys.exit(main())
    except (UserError, DataError) as error:
        announce(f"error: {one_line(error)}", to_stderr=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
