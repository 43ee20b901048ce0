"""Train a tokenizer (byte-level BPE, or WordPiece for ELECTRA), or compare tokenizers on a text.

The committed model/tokenizer.json (a minute on two cores, 3.3 GB of memory), where $C is the folder of the corpora
that docs/corpora.md describes:
    python trainer/train_tokenizer.py --out_dir model --vocab_size 6400 --sample_mb 90 \\
        --data_path $C/en_wiki.train.jsonl $C/en_novels.train.jsonl $C/zh_wiki.train.jsonl \\
                    $C/zh_lctt_tech.train.jsonl $C/zh_laws.train.jsonl $C/code_python.train.jsonl \\
        --weights 35 9 35 10.5 1.5 9

On your own text:
    python trainer/train_tokenizer.py --data_path my_corpus.jsonl --vocab_size 6400 --out_dir out/my_tokenizer
    python trainer/train_tokenizer.py --type wordpiece --data_path my_corpus.jsonl --vocab_size 8192 --out_dir out/my_wordpiece

Bytes per token of several tokenizers, as a markdown table:
    python trainer/train_tokenizer.py --compare model out/my_tokenizer --data_path my_corpus.jsonl
"""

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if __name__ == "__main__":
    from common.start import begin

    # Ctrl-C ends the process within the library that trains, too; nothing is written before the end.
    begin()

from common.errors import DataError, UserError, user_errors
from common.flags import Parser, positive
from common.wording import announce, one_line
from dataset.reading.file_kinds import TEXT_SUFFIXES_HELP, text_suffix
from dataset.tokenizing.byte_level_bpe import PIECE_RULES, SPECIAL_TOKENS, save, train_bpe
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.sample import TextSource, draw_sample
from dataset.tokenizing.wordpiece import WORDPIECE_TOKENS, save_wordpiece, train_wordpiece

# The flags that only training reads
TRAINING_FLAGS = ("sample_mb", "weights", "type", "lower_case", "vocab_size", "pieces")
# Documents encoded at a time by --compare.
BATCH = 1000


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="train_tokenizer.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    g = parser.add_argument_group("data")
    paths = "the sources: each a file, a folder or a glob; dataset/README.md lists the kinds of files"
    g.add_argument("--data_path", nargs="+", required=True, metavar="PATH", help=paths)
    g.add_argument("--text_field", default="text", help="name of the field that holds the text (default: text)")
    g.add_argument("--text_suffixes", type=text_suffix, nargs="+", metavar="SUFFIX", help=TEXT_SUFFIXES_HELP)
    parser.switch(
        g, "--skip_bad_lines", False, "pass over faulty lines and report them, instead of stopping at the first"
    )
    size = "size of the sample in MB (10^6 bytes of UTF-8), at most all the text; memory is 40 times it (default: 60)"
    g.add_argument("--sample_mb", type=positive(float), default=60, metavar="MB", help=size)
    shares = (
        "share of each source in the sample, in any unit; a source too small for its share is repeated (default: equal)"
    )
    g.add_argument("--weights", type=positive(float), nargs="+", metavar="W", help=shares)
    g = parser.add_argument_group("vocabulary")
    kinds = "bpe: byte-level, for the main trainer; wordpiece: as BERT's, for trainer/train_electra.py (default: bpe)"
    g.add_argument("--type", choices=("bpe", "wordpiece"), default="bpe", help=kinds)
    cased = "wordpiece: lower-case the text and strip its accents, as bert-base-uncased does (default: true)"
    parser.switch(g, "--lower_case", True, cased)
    entries = "number of entries, special tokens and (bpe) the 256 bytes included (default: 6400)"
    g.add_argument("--vocab_size", type=positive(int), default=6400, metavar="N", help=entries)
    rule = "bpe: the rule that cuts text into pieces; llama-bpe and qwen2 are known to llama.cpp and Ollama, compact is not, but gives the most bytes per token (default: llama-bpe)"
    g.add_argument("--pieces", choices=tuple(PIECE_RULES), default="llama-bpe", help=rule)
    g = parser.add_argument_group("what to do (one of these)").add_mutually_exclusive_group(required=True)
    g.add_argument("--out_dir", help="train, and write tokenizer.json and tokenizer_config.json to this folder")
    table = "train nothing; print bytes per token of the tokenizers in these folders on the data, as a markdown table"
    g.add_argument("--compare", nargs="+", metavar="FOLDER", help=table)
    return parser


def compare(folders: list[str], sources: list[TextSource]) -> str:
    """A markdown table: bytes of UTF-8 per token without BOS and EOS; speed of encode_batch_fast over all sources.

    Errors: UserError where a folder has no fast tokenizer, DataError where there is no text in a source.
    """
    names = []
    for source in sources:
        one_file = len(source.files) == 1
        names.append(source.files[0].name.split(".jsonl")[0] if one_file else source.name)
    lines = [f"| tokenizer | {' | '.join(names)} | MB/s | M tokens/s |", "|---|" + "---|" * (len(sources) + 2)]
    sizes = [source.count_bytes() for source in sources]
    for folder in folders:
        with user_errors():
            loaded = load_tokenizer(folder)
            if not loaded.is_fast:
                raise ValueError(
                    f"{folder}: a tokenizer in Python, which --compare does not time; a tokenizer.json is wanted"
                )
        tokenizer = loaded.backend_tokenizer
        # `<|im_end|>` in a text is ten characters there, and not the end of anything.
        tokenizer.encode_special_tokens = True
        ratios = []
        all_tokens = 0
        seconds = 0.0
        for source, n_bytes in zip(sources, sizes, strict=True):
            n_tokens = 0
            documents = source.documents()
            while batch := list(islice(documents, BATCH)):
                start = time.perf_counter()
                # Only this is timed: reading the files is not the tokenizer's work.
                encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
                seconds += time.perf_counter() - start
                n_tokens += sum(len(encoding.ids) for encoding in encodings)
            if not n_tokens:
                raise DataError(f"{source.name}: the tokenizer {folder} makes no token of its text")
            ratios.append(f"{n_bytes / n_tokens:.3f}")
            all_tokens += n_tokens
        speed = f"{sum(sizes) / 1e6 / seconds:.1f} | {all_tokens / 1e6 / seconds:.2f}"
        lines.append(f"| {folder} | {' | '.join(ratios)} | {speed} |")
    return "\n".join(lines)


def check_effect(args: argparse.Namespace) -> None:
    """UserError for a flag that was given and that this kind of work does not read."""
    unread: Sequence[str]
    if args.compare:
        unread = TRAINING_FLAGS
        reason = "--compare trains nothing"
    elif args.type == "wordpiece":
        unread = ("pieces",)
        reason = "--type is wordpiece"
    else:
        unread = ("lower_case",)
        reason = "--type is bpe"
    default = build_parser().get_default
    for name in unread:
        if getattr(args, name) != default(name):
            raise UserError(f"--{name} has no effect: {reason}; leave it out")


def run(args: argparse.Namespace) -> None:
    """Train or compare. Errors: UserError and DataError, in one line, for what a user can mend."""
    check_effect(args)
    sources = [TextSource(path, args.text_field, args.skip_bad_lines, args.text_suffixes) for path in args.data_path]
    if args.compare:
        announce(compare(args.compare, sources))
        return
    weights = args.weights or [1.0] * len(sources)
    if len(weights) != len(sources):
        raise UserError(f"--weights has {len(weights)} values for {len(sources)} sources; one for each --data_path")
    # The 256 bytes are always there, so that a byte-level tokenizer can write any text.
    smallest = len(WORDPIECE_TOKENS) + 1 if args.type == "wordpiece" else len(SPECIAL_TOKENS) + 256
    if args.vocab_size < smallest:
        raise UserError(
            f"--vocab_size is {args.vocab_size}, but it must be at least {smallest}: special tokens and characters"
        )
    sample = draw_sample(sources, weights, args.sample_mb * 1e6)
    if args.type == "wordpiece":
        wordpiece = train_wordpiece(sample, args.vocab_size, args.lower_case)
        with user_errors():
            save_wordpiece(wordpiece, Path(args.out_dir))
        announce(f"wrote {len(wordpiece)} entries to {Path(args.out_dir) / 'vocab.txt'}")
        return
    # A text may be too small for so many entries, and a folder may take no file.
    with user_errors():
        tokenizer = train_bpe(sample, args.vocab_size, pieces=args.pieces)
        save(tokenizer, Path(args.out_dir))
    announce(f"wrote {tokenizer.get_vocab_size()} entries to {Path(args.out_dir) / 'tokenizer.json'}")


def main(argv: list[str] | None = None) -> int:
    """Run with the given flags (default: the command line's). Returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        run(args)
    except (UserError, DataError) as error:
        announce(f"error: {one_line(error)}", to_stderr=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
