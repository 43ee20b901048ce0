"""Tokenise a corpus ahead of training, on one machine or in shards on many.

    python dataset/tokenize_corpus.py --data_path dataset/pretrain_hq.jsonl
    python dataset/tokenize_corpus.py --data_path /data/corpus --cache_dir /shared/tokens --shard 3/16

The trainers do the same on their first start and find what was made here. With --shard k/n (k from 1 to n) this
process tokenises its part of the work; the runs share the folder of the token store, in any order and at any time,
and the last to finish puts the store together, byte for byte that of a single run. Then train with the same
--data_path, --tokenizer_path, --text_field, --text_suffixes, --cache_dir and switches.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):  # run by path: dataset/ would come first and could shadow a dependency
    sys.path[0] = str(ROOT)

from dataset.corpus import group_sources, name_of
from dataset.encoder import DocumentEncoder, load_tokenizer
from dataset.file_kinds import TEXT_SUFFIXES_HELP, text_suffix
from dataset.flags import Parser, positive
from dataset.notices import announce
from dataset.token_store import open_or_build
from dataset.wording import counted, one_line


def build_parser() -> Parser:
    options = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    p = Parser(prog="tokenize_corpus.py", description=__doc__, **options)
    p.add_argument(
        "--data_path",
        nargs="+",
        required=True,
        help="as the trainer's: files of the kinds in dataset/README.md, folders, globs; with shares each gets a store",
    )
    p.add_argument("--tokenizer_path", default=str(ROOT / "model"), help="folder of a Hugging Face tokenizer")
    p.add_argument("--text_field", default="text", help="the field that holds the text")
    p.add_argument("--text_suffixes", type=text_suffix, nargs="+", metavar="SUFFIX", help=TEXT_SUFFIXES_HELP)
    p.add_argument("--cache_dir", help="folder for tokenised data (default: .token_store beside the data)")
    p.add_argument("--shard", type=shard, help="k/n: do part k (from 1) of n")
    p.add_argument("--num_procs", type=positive(int), help="processes (default: one a core)")
    p.switch(p, "--skip_bad_lines", False, "skip and count faulty lines instead of stopping at the first")
    p.switch(p, "--parse_special_tokens", False, "special tokens spelt out inside a text become those tokens")
    return p


def shard(value: str) -> tuple[int, int]:
    k, slash, n = value.partition("/")
    if not (slash and k.isdigit() and n.isdigit() and 1 <= int(k) <= int(n)):
        raise argparse.ArgumentTypeError(f"{value!r} is not k/n with k from 1 to n, such as 3/16")
    return int(k), int(n)


def main(argv=None) -> int:
    args = build_parser().parse_args(argv)
    encoder = DocumentEncoder(load_tokenizer(args.tokenizer_path), args.parse_special_tokens)
    for paths, _ in group_sources(args.data_path):
        options = (args.cache_dir, args.text_field, args.skip_bad_lines, args.num_procs)
        store = open_or_build(paths, encoder, *options, shard=args.shard, text_suffixes=args.text_suffixes)
        if store is None:
            announce(
                f"{name_of(paths)}: part {args.shard[0]} of {args.shard[1]} is done; the last one puts the store together"
            )
            continue
        for line in store.bad_lines.report():
            announce(line)
        announce(f"{store.folder}: {counted(len(store), 'document')}, {counted(len(store.tokens), 'token')}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:  # what the user can mend: DataError, no tokenizer there
        announce(f"error: {one_line(error)}", to_stderr=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
