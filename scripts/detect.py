"""Show which words of a text an ELECTRA's discriminator believes to be replaced, and how likely it finds each.

    python scripts/detect.py --model out/electra_small "Return the number of banana bytes that were written to the file."
    python scripts/detect.py --model out/electra_small --corrupt 0.15 --file my.txt --out detect.html
    python scripts/detect.py --model google/electra-small-discriminator --json "The cat sat on the parliament."

Doubted words stand out by colour, or by marks where there is none.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Run by path: nothing in scripts/ may shadow a dependency.
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    from common.start import begin

    begin()
    # --help and wrong flags are answered before torch is imported, which takes seconds.
    from scripts.arguments import detect_parser

    detect_parser().parse_args()

import argparse
import json
from collections.abc import Sequence

from common.errors import UserError
from common.files import read_small
from common.notices import announce
from common.terminal import has_colours, width_of_terminal
from common.wording import counted
from model.electra.detection import Passage
from scripts.arguments import detect_parser
from trainer.electra.detector import open_detector
from trainer.electra.passages import PARAGRAPH_END, passage_lines, summary
from trainer.machine.command_line import run_cli
from trainer.machine.devices import pick_device

__all__ = ["main"]

# Of all texts together: a page with more would be no page for a reader.
MOST_BYTES = 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    args = detect_parser().parse_args(argv)
    if args.out is not None and Path(args.out).suffix != ".html":
        raise UserError(f"--out {args.out}: a name that ends in .html is wanted")
    texts = texts_of(args)
    detector = open_detector("--model", args.model, pick_device(args.device))
    if args.corrupt is not None and detector.generator is None:
        announce("no generator lies beside the discriminator: words are replaced at random", to_stderr=True)
    passages = []
    for number, text in enumerate(texts):
        passages.append(detector.passage(text, args.corrupt or 0.0, args.seed + number, args.threshold))
    unknown = sum(not detector.knows(text) for text in texts)
    if unknown:
        announce(
            f"warning: the tokenizer of {args.model} knows less than half of {counted(unknown, 'text')}: what is said of "
            "unknown words means nothing",
            to_stderr=True,
        )
    if args.json:
        for passage in passages:
            # ASCII alone: nothing in it can be obeyed by a terminal.
            announce(json.dumps(passage.as_record()))
    else:
        announce(passage_lines(passages, width_of_terminal(), has_colours(sys.stdout)))
    if args.out is not None:
        write_page(args.out, args.model, passages)
        announce(f"page: {args.out}", to_stderr=args.json)
    return 0


def texts_of(args: argparse.Namespace) -> list[str]:
    """What is to be read. Errors: UserError."""
    if args.texts and args.file is not None:
        raise UserError(f"--file {args.file}: a text on the command line stands in its place; drop one of them")
    if args.file is not None:
        texts = paragraphs(read_file(Path(args.file)))
        what = f"--file {args.file}"
    elif args.texts:
        texts = args.texts
        what = "the texts"
    else:
        if sys.stdin is None or sys.stdin.isatty():
            raise UserError("no text to read: write one behind the command, in quotes, or name a file with --file")
        what = "the standard input"
        content = sys.stdin.buffer.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UserError(f"{what}: at most {MOST_BYTES:,} bytes are read; cut it")
        texts = paragraphs(decoded(content, what))
    if not texts:
        raise UserError(f"{what}: no text in there")
    return texts


def read_file(path: Path) -> str:
    """Errors: UserError."""
    try:
        return decoded(read_small(path, MOST_BYTES), f"--file {path}")
    except OSError as error:
        raise UserError(f"--file {path} cannot be read ({error.strerror or error})") from error


def decoded(content: bytes, what: str) -> str:
    """Errors: UserError."""
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{what}: byte {error.start} is no UTF-8") from error


def paragraphs(text: str) -> list[str]:
    """The texts of a file: what blank lines divide."""
    return [part.strip("\n") for part in PARAGRAPH_END.split(text) if part.strip()]


def write_page(path: str, model: str, passages: Sequence[Passage]) -> None:
    """Errors: UserError where the page cannot be written."""
    # It brings matplotlib along, which takes a second to import.
    from trainer.reporting.html_report import write_page_of_flag

    write_page_of_flag(
        "--out",
        "detect.html",
        path,
        Path(__file__).parent,
        said=f"{model}: {summary(passages)}",
        passages=passages,
        is_corrupted=passages[0].is_corrupted,
    )


if __name__ == "__main__":
    run_cli(main)
