"""Tables of examples: the benchmark's TSVs, and the .tsv and .jsonl files of one's own tasks.

In a TSV, as in the benchmark's, a quote is text like any other. A line of a .jsonl file is an object. What a file holds is
checked as it is read, and a fault names its line.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.errors import DataError
from common.wording import counted
from dataset.glue.glue_tasks import Task, Words

# Scores are kept in float32, and the loss adds up their squares there.
LARGEST_SCORE = 1e16
# Characters of a sentence: what a tokenizer holds of one beside its ids is many times as large.
LONGEST_SENTENCE = 1 << 20
# Of a field that an error line shows.
LONGEST_SHOWN = 60

# (line number, the task's sentences and behind them the label; None: a line that is left out)
Record = tuple[int, list[str] | None]


class Rows(NamedTuple):
    """What a file holds: sentences (one list for each column of the task's `text`), labels (class numbers or scores;
    empty for a test file) and the number of lines that were skipped."""

    sentences: list[list[str]]
    labels: list[float]
    skipped: int


def read_rows(path: Path, task: Task, labelled: bool = True) -> Rows:
    """The Rows of a file. Errors: DataError that names file and line."""
    sentences: list[list[str]] = [[] for _ in task.text]
    labels: list[float] = []
    skipped = 0
    for number, fields in records(path, task, labelled):
        if fields is None:
            skipped += 1
            continue
        if max(map(len, fields)) > LONGEST_SENTENCE:
            raise DataError(f"{path}:{number}: a sentence of more than {LONGEST_SENTENCE:,} characters; mend the line")
        for column, field in zip(sentences, fields, strict=False):
            column.append(field)
        if labelled:
            labels.append(label_of(task, fields[-1], f"{path}:{number}"))
    return Rows(sentences, labels, skipped)


def words_of_labels(path: Path, task: Task) -> Words:
    """The different words in the column of the label, sorted: the classes of one's own task. Errors: DataError."""
    found: set[str] = set()
    for number, fields in records(path, task, labelled=True):
        assert fields is not None
        word = fields[-1]
        # A file of predictions has a label a line, behind a tab.
        if not word.strip() or any(sign in word for sign in "\t\n\r"):
            raise DataError(f"{path}:{number}: {word[:LONGEST_SHOWN]!r} cannot be the name of a class; mend the line")
        found.add(word)
    return tuple(sorted(found))


def label_of(task: Task, word: str, place: str) -> float:
    """The class number or the score that a word means. Errors: DataError for one that means none; `place` begins it."""
    if not task.is_regression:
        if word in task.labels:
            return task.labels.index(word)
        wanted = f"one of {', '.join(task.labels)}"
    else:
        low, high = max(task.bounds[0], -LARGEST_SCORE), min(task.bounds[1], LARGEST_SCORE)
        try:
            # NaN is not between them either. Python would take 4_5 for 45.
            if "_" not in word and low <= float(word) <= high:
                return float(word)
        except ValueError:
            pass
        wanted = f"a number from {low:g} to {high:g}"
    raise DataError(f"{place}: label {word[:LONGEST_SHOWN]!r} is not {wanted[:200]}; mend the line")


def records(path: Path, task: Task, labelled: bool) -> Iterator[Record]:
    """The Records of a file. Errors: DataError, also where there is none."""
    try:
        content = path.read_bytes()
        # Not splitlines(): a sentence may hold a U+2028.
        lines = [line.removesuffix("\r") for line in content.decode("utf-8-sig").split("\n")]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{number}: not UTF-8 text; mend the line") from None
    while lines and not lines[-1]:
        lines.pop()
    n_examples = 0
    if lines:
        for number, fields in (json_records if path.suffix == ".jsonl" else tsv_records)(path, lines, task, labelled):
            n_examples += fields is not None
            yield number, fields
    if not n_examples:
        raise DataError(f"{path}: no example in there")


def tsv_records(path: Path, lines: list[str], task: Task, labelled: bool) -> Iterator[Record]:
    """Of the lines of a TSV."""
    # Some files have no header where they have labels.
    has_header = not (labelled and task.names)
    header = lines[0].split("\t") if has_header else list(task.names)
    wanted = (*task.text, task.label) if labelled else task.text
    for name in wanted:
        if header.count(name) != 1:
            raise DataError(
                f"{path}:1: {header.count(name) or 'no'} columns {name!r} in the header ({', '.join(header)[:200]}); --text "
                f"and --label name those of a task of your own, and this is no {task.folder} file"
            )
    columns = [header.index(name) for name in wanted]
    for number, line in enumerate(lines[has_header:], 1 + has_header):
        fields = line.split("\t")
        if len(fields) == len(header):
            yield number, [fields[column] for column in columns]
        elif task.skip_short_lines and labelled and len(fields) < len(header):
            yield number, None
        else:
            raise DataError(
                f"{path}:{number}: {counted(len(fields), 'column')} where {len(header)} are wanted; mend the line"
            )


def json_records(path: Path, lines: list[str], task: Task, labelled: bool) -> Iterator[Record]:
    """Of the lines of a .jsonl file. A label may be a number, or a truth value as JSON spells it."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            fields = [record[name] for name in task.text]
            if labelled:
                label = record[task.label]
                fields.append(label if isinstance(label, str) else json.dumps(label))
            # A half of a surrogate pair is no character.
            "".join(fields).encode()
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            absent = f"{error} is not there; --text and --label name other fields"
            fault = absent if isinstance(error, KeyError) else f"not this ({str(error)[:LONGEST_SHOWN]}); mend the line"
            wanted = f"an object with the texts {', '.join(task.text)}{f' and {task.label}' * labelled} is wanted"
            raise DataError(f"{path}:{number}: {wanted}, and {fault}") from None
        yield number, fields
