"""Lines on files of plain text that, by their beginnings, are files of another kind or hold many documents."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from dataset.reading.file_kinds import TEXT_SUFFIXES, kind_of
from dataset.reading.settings import BLANK, LINES, PARAGRAPHS
from dataset.reading.streams import open_stream

# Bytes of a file, and files of a corpus, that are looked at
BEGINNING_BYTES, MOST_FILES = 1 << 17, 200
# A JSON object, or an array of objects or strings
JSON = re.compile(r'\s*(\{\s*"[^"\n]*"\s*:|\[\s*[{"])')
# Ends of documents in public text files; fewer are mentioned rather than used.
END_MARK = re.compile(r"<\|end_?of_?(?:text|document)\|>|</s>|<eos>|\[EOS\]", re.IGNORECASE)
FEWEST_MARKS = 3
# So many lines that have so few characters on average are names or verses, not prose.
FEWEST_LINES, SHORT_LINE = 1000, 60


def notices_on_texts(files: Sequence[Path], split_text: str | None) -> list[str]:
    """Lines on the text files of a corpus, one for each advice."""
    texts = [file for file in files if kind_of(file).is_text]
    if split_text and not texts:
        return [f"warning: --split_text {split_text} has no effect: no file is plain text"]
    files_of: dict[str, list[Path]] = {}
    for file in texts[:: len(texts) // MOST_FILES + 1]:
        kind = kind_of(file)
        with open_stream(file, kind.compression) as (stream, _):
            beginning = stream.read(BEGINNING_BYTES).decode("utf-8-sig", "ignore")
        if advice := advice_on(beginning, kind.suffix, split_text):
            files_of.setdefault(advice, []).append(file)
    lines = []
    for advice, (first, *more) in files_of.items():
        lines.append(f"warning: {first}{f' and {len(more):,} more' if more else ''}: {advice}")
    return lines


def advice_on(beginning: str, suffix: str, split_text: str | None) -> str:
    """What to do about a text file; "": nothing."""
    lines = [line.strip() for line in beginning.splitlines() if line.strip()]
    right_suffix = suffix_of_table(lines[:50])
    if JSON.match(beginning):
        right_suffix = ".jsonl" if re.fullmatch(r"\{.*\}", lines[0]) else ".json"
    if right_suffix:
        return f"read as plain text, marks and labels included, but it looks like {right_suffix}: give it that suffix"
    marks = END_MARK.findall(beginning)
    if split_text and split_text not in (LINES, BLANK, *re.findall(re.escape(split_text), beginning)):
        return f"no {split_text} of --split_text in its first {BEGINNING_BYTES >> 10} kB"
    if split_text or (suffix in TEXT_SUFFIXES and suffix != ".txt"):
        return ""
    if len(marks) >= FEWEST_MARKS:
        return f"read as one document with many {marks[0]}: if they end its parts, add --split_text '{marks[0]}'"
    blocks = len(re.findall(r"\n\s*\n", beginning.strip())) + 1
    is_split = split_text == PARAGRAPHS and blocks > 1
    if is_split or len(lines) < FEWEST_LINES or len(beginning) > SHORT_LINE * len(lines):
        return ""
    value = BLANK if FEWEST_LINES < 10 * blocks < 7 * len(lines) else LINES
    return f"read as one document of many short lines: if they are several texts, add --split_text {value}"


def suffix_of_table(lines: Sequence[str]) -> str:
    """.tsv or .csv if the lines are rows of as many fields each, in a .csv below a header; else ""."""
    for suffix, delimiter in ((".tsv", "\t"), (".csv", ",")):
        try:
            names, *rows, _ = csv.reader(lines, delimiter=delimiter)
        except (csv.Error, ValueError):
            # A field is too long, or there are fewer than two lines.
            continue
        # A pair of short fields may be a name.
        is_named = all(re.fullmatch(r"[\w.-]+( [\w.-]+)?", name.strip()) for name in names)
        is_sure = delimiter == "\t" or (is_named and any(len(cell) > 20 for row in rows for cell in row))
        if len(rows) > 1 and len(names) > 1 and is_sure and {len(row) for row in rows} == {len(names)}:
            return suffix
    return ""
