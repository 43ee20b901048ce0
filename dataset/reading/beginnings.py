"""Lines on files of plain text that, by their beginnings, are files of another kind or hold many documents."""

import re
from collections.abc import Sequence
from pathlib import Path

from dataset.reading.file_kinds import FileKind, kind_of
from dataset.reading.settings import BLANK, LINES, PARAGRAPHS
from dataset.reading.streams import open_stream

# Bytes of a file, and files of a corpus, that are looked at
BEGINNING_BYTES, MAX_FILES = 1 << 17, 200
# A JSON object, or an array of objects or strings
JSON = re.compile(r'\s*(\{\s*"[^"\n]*"\s*:|\[\s*[{"])')
# Names of columns, which begin with a letter; in prose a space follows a comma.
HEADER = re.compile(r'"?[^\W\d][\w .-]*"?(,"?[^\W\d][\w .-]*"?)+')
WITH_TABS = re.compile(r"[^\W\d].*\t|\t.*[^\W\d]")
# Marks between documents in public text files, in those of WikiExtractor, Common Crawl (WET), chess (PGN) and FASTA too
MARK = re.compile(
    r"(?im)<\|end_?of_?(?:text|document)\|>|</s>|<eos>|\[EOS\]|</doc>|^WARC/1\.\d|^\[Event |^>(?=.*\n[A-Z*-]{8,}\r?$)"
)
# Fewer are mentioned rather than used.
MIN_MARKS = 3
# So many lines that have so few characters on average are names or verses, not prose; so many of so many may be articles.
MIN_LINES, SHORT_LINE, MIN_LONG, LONG_LINE = 1000, 60, 30, 250


def notices_on_texts(files: Sequence[Path], document_end: str | None) -> list[str]:
    """Lines on the text files of a run, one for each advice. files: all of the run; document_end: as in `read_documents`."""
    texts = [file for file in files if kind_of(file).is_text]
    if document_end not in (None, PARAGRAPHS) and not texts:
        return [f"warning: --split_text {document_end} has no effect on {files[0]}: it is no plain text"]
    files_of: dict[str, list[Path]] = {}
    for file in texts[:: len(texts) // MAX_FILES + 1]:
        kind = kind_of(file)
        with open_stream(file, kind.compression) as (stream, _):
            beginning = stream.read(BEGINNING_BYTES).decode("utf-8-sig", "ignore")
        if advice := advice_on(beginning, kind, document_end):
            files_of.setdefault(advice, []).append(file)
    lines = []
    for advice, (first, *more) in files_of.items():
        lines.append(f"warning: {first}{f' and {len(more):,} more' if more else ''}: {advice}")
    return lines


def advice_on(beginning: str, kind: FileKind, document_end: str | None) -> str:
    """What to do about a text file; "": nothing."""
    if document_end not in (None, LINES, BLANK, PARAGRAPHS) and document_end not in beginning:
        return f"no {document_end} of --split_text in its first {BEGINNING_BYTES >> 10} kB"
    # Code may begin like a table.
    if kind.is_source:
        return ""
    lines = [line.strip() for line in beginning.split("\n") if line.strip()]
    right_suffix = ""
    if JSON.match(beginning):
        right_suffix = ".jsonl" if re.fullmatch(r"\{.*\}", lines[0]) else ".json"
    elif len(lines) > 2 and WITH_TABS.search(lines[0]) and len({line.count("\t") for line in lines[:50]}) == 1:
        right_suffix = ".tsv"
    elif len(lines) > 2 and HEADER.fullmatch(lines[0]) and all("," in line for line in lines[:50]):
        right_suffix = ".csv"
    if right_suffix:
        return f"read as plain text, marks and labels included, but it looks like {right_suffix}: give it that suffix"
    if document_end not in (None, PARAGRAPHS):
        return ""
    marks = MARK.findall(beginning)
    if len(marks) >= MIN_MARKS:
        return f"read as one document with many {marks[0]}: if they divide its texts, add --split_text '{marks[0]}'"
    blocks = len(re.findall(r"\n\s*\n", beginning.strip())) + 1
    is_split = document_end == PARAGRAPHS and blocks > 1
    if blocks == 1 and len(lines) >= MIN_LONG and len(beginning) > LONG_LINE * len(lines):
        return f"read as one document of long lines: if each is a text, add --split_text {LINES}"
    if is_split or len(lines) < MIN_LINES or len(beginning) > SHORT_LINE * len(lines):
        return ""
    # Poems have up to 50 lines on average; blank lines among names are fewer.
    value = BLANK if len(lines) < 50 * blocks < 35 * len(lines) else LINES
    return f"read as one document of many short lines: if they are several texts, add --split_text {value}"
