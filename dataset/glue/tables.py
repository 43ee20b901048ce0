"""Tables of examples: the benchmark's TSVs, and the .csv, .tsv and .jsonl files of anyone's own task.

In a TSV, as in the benchmark's, a quote is text like any other; a CSV is read with Python's csv module, so that a quoted
field may hold commas, quotes and line breaks; a .jsonl file has an object a line. What a file holds is checked as it
is read: whoever made it may have meant something else.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common.errors import DataError
from common.wording import counted
from dataset.glue.glue_tasks import REGRESSION, TASKS, Task
from dataset.reading.csv_files import CsvRows, columns_shown, field_of_row
from dataset.reading.faults import BadLine, line_at, nul_in_text
from dataset.reading.json_lines import BOM, check_surrogates, json_type, record_of_line
from dataset.reading.line_reader import WHITE_SPACE, LineReader

# Suffixes of the files of one's own task; the benchmark's are all TSVs.
TABLES = (".csv", ".tsv", ".jsonl")
# Scores are kept in float32, and the loss adds up their squares there.
LARGEST_SCORE = 1e16
# Python's float also takes 4_5 for 45, and digits of other alphabets.
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# Of a field that an error line shows.
LONGEST_SHOWN = 60
# What helps where an object of a .jsonl file lacks a field. (Those of the benchmark are all TSVs.)
OTHER_FIELD = "mend the line, or name another field by --text or --label"

# (line number, fields in the order of the wanted columns; None: a line that is left out)
Record = tuple[int, list[str] | None]


class Rows(NamedTuple):
    """What a file holds: sentences (one list per column of the task's `text`), labels (class numbers or scores; empty
    for a test file) and the number of lines that were skipped."""

    sentences: list[list[str]]
    labels: list[float]
    skipped: int


def read_rows(path: str | Path, task: Task, labelled: bool = True) -> Rows:
    """The Rows of a file. Errors: DataError that names file and line, where one is not UTF-8, has another number of
    columns or no such label."""
    path = Path(path)
    sentences: list[list[str]] = [[] for _ in task.text]
    labels: list[float] = []
    skipped = 0
    for number, fields in records(path, task, labelled):
        if fields is None:
            skipped += 1
            continue
        for sentence, field in zip(sentences, fields[: len(task.text)], strict=True):
            sentence.append(field)
        if labelled:
            labels.append(label_of(task, fields[-1], f"{path}:{number}"))
    if not sentences[0]:
        raise DataError(f"{path}: no example in there")
    return Rows(sentences, labels, skipped)


def words_of_labels(path: Path, task: Task) -> list[str]:
    """The different words in the column of the label, sorted. Errors: DataError for one that is no name of a class, and where
    there is none."""
    found: set[str] = set()
    for number, fields in records(path, task, labelled=True):
        if fields is None:
            continue
        fault = fault_of_label(fields[-1])
        if fault is not None:
            raise DataError(f"{path}:{number}: the label {fault}; mend the line")
        found.add(fields[-1])
    if not found:
        raise DataError(f"{path}: no example in there")
    return sorted(found)


def fault_of_label(word: str) -> str | None:
    """Why a word is no name of a class, in a part of a line; None: it is one."""
    if not word.strip():
        return "is blank"
    # A file of predictions has a label a line, behind a tab.
    if any(sign in word for sign in "\t\n\r"):
        return f"{word[:LONGEST_SHOWN]!r} holds a tab or a line break"
    return None


def records(path: Path, task: Task, labelled: bool) -> Iterator[Record]:
    """The fields of each line: the task's text, and behind it, where the file is labelled, the label. Errors: DataError."""
    wanted = (*task.text, task.label) if labelled else task.text
    if path.suffix == ".csv":
        return _csv_records(path, task, wanted)
    if path.suffix == ".jsonl":
        return _json_records(path, wanted, task.label)
    return _tsv_records(path, task, wanted, labelled)


def label_of(task: Task, word: str, place: str) -> float:
    """The class number or the score that a word means. Errors: DataError for one that means none; `place` begins it."""
    if task.kind != REGRESSION:
        if word in task.labels:
            return task.labels.index(word)
        wanted = f"one of {', '.join(task.labels)}"
    else:
        low, high = task.bounds
        value = _number(word)
        # NaN is not between them either.
        if max(low, -LARGEST_SCORE) <= value <= min(high, LARGEST_SCORE):
            return value
        kind = "score" if math.isfinite(low) else "number"
        wanted = f"a {kind} from {max(low, -LARGEST_SCORE):g} to {min(high, LARGEST_SCORE):g}"
    raise DataError(f"{place}: label {word[:LONGEST_SHOWN]!r} is not {wanted[:200]}; mend the line")


def _number(word: str) -> float:
    """The number that a text spells, or NaN."""
    word = word.strip()
    return float(word) if NUMBER.fullmatch(word) else math.nan


def columns_of(path: Path, line: int, header: Sequence[str], wanted: Sequence[str], task: Task) -> list[int]:
    """Where the wanted columns stand. Errors: DataError for one that is not there, or there twice."""
    for name in wanted:
        if header.count(name) == 1:
            continue
        what = "no column" if name not in header else "more than one column"
        meant = f"this is no {task.folder} file"
        if task not in TASKS.values():
            meant = "name the columns of your task by --text and --label"
        raise DataError(f"{path}:{line}: {what} {name!r} in the header (its columns: {columns_shown(header, meant)})")
    return [header.index(name) for name in wanted]


# ---------------------------------------------------------------------------------------------------- formats


def _tsv_records(path: Path, task: Task, wanted: Sequence[str], labelled: bool) -> Iterator[Record]:
    """Of a TSV: fields lie between tabs, a quote is text, a BOM and CRLF are taken off."""
    lines = _lines(path)
    # Some files have no header where they have labels.
    first_line = 1
    header = list(task.names)
    if not (labelled and task.names):
        header = lines[0].split("\t") if lines else []
        first_line = 2
    columns = columns_of(path, 1, header, wanted, task)
    for number, line in enumerate(lines[first_line - 1 :], first_line):
        fields = line.split("\t")
        if len(fields) == len(header):
            yield number, [fields[column] for column in columns]
        elif task.skip_short_lines and labelled and len(fields) < len(header):
            yield number, None
        else:
            raise DataError(
                f"{path}:{number}: {counted(len(fields), 'column')} where {len(header)} are wanted; mend the line"
            )


def _csv_records(path: Path, task: Task, wanted: Sequence[str]) -> Iterator[Record]:
    """Of a CSV with a header."""
    check_file(path)
    with open(path, "rb") as stream:
        rows = CsvRows(stream, ",")
        try:
            header = rows.next() or []
            columns = columns_of(path, rows.first_line, header, wanted, task)
            while (row := rows.next()) is not None:
                yield rows.first_line, [field_of_row(row, len(header), column) for column in columns]
        except BadLine as bad:
            raise DataError(f"{path}:{rows.first_line}: {bad.args[1]}; mend the line") from None


def _json_records(path: Path, wanted: Sequence[str], label: str) -> Iterator[Record]:
    """Of a .jsonl file. A label may be a number, or a truth value as JSON spells it; a text may not."""
    for number, record in json_objects(path):
        fields = []
        for name in wanted:
            if name not in record:
                raise DataError(f"{path}:{number}: no {name!r} in the object; {OTHER_FIELD}")
            value = record[name]
            if name == label and isinstance(value, bool):
                value = "true" if value else "false"
            elif name == label and isinstance(value, int | float):
                value = str(value)
            fields.append(check_text(value, repr(name), f"{path}:{number}"))
        yield number, fields


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """(line number, object) of each line of a .jsonl file that is not blank. Errors: DataError."""
    check_file(path)
    with open(path, "rb") as stream:
        for number, raw in LineReader(stream).lines():
            if raw is None:
                raise DataError(f"{path}:{number}: the line is too long; no example is")
            line = raw.removeprefix(BOM).strip(WHITE_SPACE)
            if not line:
                continue
            try:
                record = record_of_line(line, keys_once=True)
            except BadLine as bad:
                raise DataError(f"{path}:{number}: {bad.args[1]}; mend the line") from None
            if not isinstance(record, dict):
                raise DataError(f"{path}:{number}: a JSON {json_type(record)} where an object is wanted")
            yield number, record


def check_text(value: object, what: str, place: str) -> str:
    """A text of a JSON file. `what` and `place` name it. Errors: DataError for what is no text that UTF-8 can spell."""
    if not isinstance(value, str):
        raise DataError(f"{place}: {what} is a {json_type(value)}, not a string; mend it")
    try:
        check_surrogates(value)
    except BadLine as bad:
        raise DataError(f"{place}: {what} has {bad.args[1]}; mend it") from None
    return value


def check_file(path: Path) -> None:
    """Errors: DataError for what is no file that can be read: a folder, or a pipe, which would be waited for; and for an empty
    one."""
    if not path.is_file():
        reason = "not a regular file" if path.exists() else "No such file or directory"
        raise DataError(f"{path}: cannot be read ({reason})")
    if not path.stat().st_size:
        raise DataError(f"{path}: no example in there; the file is empty")


def read_bytes(path: str | Path) -> bytes:
    """The content of a file. Errors: DataError."""
    check_file(Path(path))
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _lines(path: Path) -> list[str]:
    """The lines of a file without their ends; not the empty ones at its end. Errors: DataError."""
    content = read_bytes(path)
    nul = content.find(b"\0")
    if nul >= 0:
        raise DataError(f"{path}:{line_at(content, nul)}: {nul_in_text().args[1]}")
    try:
        # Not splitlines(): a sentence may hold a U+2028.
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{line_at(content, error.start)}: not UTF-8 text; mend the line") from None
    lines = [line.removesuffix("\r") for line in lines]
    while lines and not lines[-1]:
        lines.pop()
    return lines
