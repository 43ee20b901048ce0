"""The flags of tokenize_corpus.py. Nothing here needs the libraries of tokenizers, so `--help` answers at once."""

import argparse
from pathlib import Path

from common.flags import Parser, positive
from dataset.reading.file_kinds import TEXT_SUFFIXES_HELP, text_suffix

ROOT = Path(__file__).resolve().parents[1]
DESCRIPTION = """Tokenise a corpus ahead of training, on one machine or in shards on many.

    python dataset/tokenize_corpus.py --data_path dataset/pretrain_hq.jsonl
    python dataset/tokenize_corpus.py --data_path /data/corpus --cache_dir /shared/tokens --shard 3/16

The trainers do the same on their first start and find what was made here. With --shard k/n (k from 1 to n) this
process tokenises its part of the work; the runs share the folder of the token store, in any order and at any time,
and the last to finish puts the store together, byte for byte that of a single run. Then train with the same
--data_path, --tokenizer_path, --text_field, --text_suffixes, --cache_dir and switches.
"""


def build_parser() -> Parser:
    options = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    p = Parser(prog="tokenize_corpus.py", description=DESCRIPTION, **options)
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
