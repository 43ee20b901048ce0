"""Questions whose answers are pieces of a text, in the format of SQuAD 1.1: reading them, and their features.

A text that is longer than an example is cut into windows, which overlap: each begins `stride` tokens behind the one before.
The question stands first in every window. An answer's label is the positions of its first and last token; in a window
that does not hold all of it, both are 0, the position of CLS.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.errors import DataError
from common.wording import counted
from dataset.glue.features import Features, id_type
from dataset.glue.glue_tasks import Windows
from dataset.glue.tables import check_text, read_bytes
from dataset.reading.faults import BadLine
from dataset.reading.json_lines import BOM, json_type, record_of_line
from dataset.reading.limits import MAX_DOCUMENT_BYTES
from dataset.store.interface import Ints
from dataset.tokenizing.long_texts import TooLongToEncode
from dataset.tokenizing.sentence_encoder import SentenceEncoder
from dataset.tokenizing.windows import windows_of

# Fewest tokens of the text that a window has room for.
LEAST_TEXT = 8


class Answer(NamedTuple):
    text: str
    # Its first character in the context; None: it does not stand where the file says.
    begin: int | None


class Question(NamedTuple):
    key: str
    question: str
    # The text that the answer is a piece of.
    context: str
    # All that count as right; none in a test file.
    answers: list[Answer]

    @property
    def placed(self) -> Answer | None:
        """The first answer that stands where the file says, which can be trained; None: there is none."""
        return next((answer for answer in self.answers if answer.begin is not None), None)


def read_questions(path: Path, labelled: bool = True) -> list[Question]:
    """The questions of a file, {"data": [{"paragraphs": [{"context", "qas": [{"id", "question", "answers"}]}]}]}.

    labelled: each has an answer. Errors: DataError that names the file and the place in it, or the question.
    """
    found = []
    keys: set[str] = set()
    for place, paragraph in paragraphs(path):
        context = check_text(member(paragraph, "context", place), "'context'", place)
        for i, entry in enumerate(items(paragraph, "qas", place)):
            where = f"{place}, qas[{i}]"
            key = check_text(member(entry, "id", where), "'id'", where)
            where = f"{path}: question {key[:80]!r}"
            if key in keys:
                raise DataError(f"{where} is in there twice; give each its own id")
            keys.add(key)
            question = check_text(member(entry, "question", where), "'question'", where)
            answers = answers_of(entry, context, where) if labelled else []
            found.append(Question(key, question, context, answers))
    if not found:
        raise DataError(f"{path}: no question in there")
    return found


def paragraphs(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, paragraph) of each paragraph of a file. Errors: DataError."""
    content = read_bytes(path)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise DataError(f"{path}: more than {MAX_DOCUMENT_BYTES >> 20} MB; cut it into several files")
    try:
        top = record_of_line(content.removeprefix(BOM), keys_once=True)
    except BadLine as bad:
        raise DataError(f"{path}: {bad.args[1]}; a file in the format of SQuAD 1.1 is wanted") from None
    for i, article in enumerate(items(top, "data", str(path))):
        place = f"{path}: data[{i}]"
        for j, paragraph in enumerate(items(article, "paragraphs", place)):
            yield f"{place}, paragraphs[{j}]", paragraph


def member(record: object, name: str, place: str) -> Any:
    """What an object has under a name. Errors: DataError."""
    if not isinstance(record, dict):
        raise DataError(f"{place}: a JSON {json_type(record)} where an object with {name!r} is wanted")
    if name not in record:
        raise DataError(f"{place}: no {name!r} in the object; a file in the format of SQuAD 1.1 is wanted")
    return record[name]


def items(record: object, name: str, place: str) -> list[Any]:
    """The list that an object has under a name. Errors: DataError."""
    found = member(record, name, place)
    if not isinstance(found, list):
        raise DataError(f"{place}: {name!r} is a {json_type(found)}, not a list")
    return found


def answers_of(entry: dict[str, Any], context: str, place: str) -> list[Answer]:
    """The answers of a question, one at least. Errors: DataError."""
    if entry.get("is_impossible"):
        raise DataError(f"{place} has no answer in its text, as in SQuAD 2.0; every question must have one")
    answers = []
    for record in items(entry, "answers", place):
        text = check_text(member(record, "text", place), "an answer's 'text'", place)
        begin = member(record, "answer_start", place)
        if not isinstance(begin, int) or isinstance(begin, bool):
            raise DataError(f"{place}: 'answer_start' is a {json_type(begin)}, not a whole number")
        if not text:
            raise DataError(f"{place}: an answer has no text; mend it")
        # Public files have some that are off by a character or two.
        is_there = begin >= 0 and context.startswith(text, begin)
        answers.append(Answer(text, begin if is_there else None))
    if not answers:
        raise DataError(f"{place} has no answer; every question must have one")
    return answers


# ----------------------------------------------------------------------------------------------- features


def n_with_gaps(features: Features, windows: Windows, max_seq_len: int) -> int:
    """How many questions have windows that do not overlap, so that an answer on the border of two is in neither."""
    room = max_seq_len - 3 - features.first
    n_windows = np.bincount(features.part_of)[features.part_of]
    return len(np.unique(features.part_of[(n_windows > 1) & (windows.stride >= room)]))


def without_misplaced(features: Features, questions: Sequence[Question], path: Path) -> tuple[Features, str | None]:
    """The Features of those questions that have an answer to be trained, and a line on the others. path: of their file.

    Errors: DataError where none has.
    """
    misplaced = [number for number, question in enumerate(questions) if question.placed is None]
    if not misplaced:
        return features, None
    reason = f"their answer does not stand at its 'answer_start', first {questions[misplaced[0]].key[:80]!r}"
    if len(misplaced) == len(questions):
        raise DataError(f"{path}: no question can be trained, since {reason}")
    # The tokens stay, where nobody points to them.
    keep = ~np.isin(features.part_of, misplaced)
    trained = features._replace(
        begin=features.begin[keep],
        first=features.first[keep],
        second=features.second[keep],
        labels=features.labels[keep],
        part_of=features.part_of[keep],
    )
    return trained, f"{path}: left {counted(len(misplaced), 'question')} out of the training, since {reason}"


def label_of(places: Ints, answer: Answer | None, window: tuple[int, int], first: int) -> tuple[int, int]:
    """(position of an answer's first token in a window's row, of its last), or (0, 0) where the window does not hold all
    of it. places: where the text's tokens begin and end, [tokens, 2]. first: position of the window's first token."""
    if answer is None or answer.begin is None:
        return 0, 0
    touched = (places[:, 1] > answer.begin) & (places[:, 0] < answer.begin + len(answer.text))
    tokens = touched.nonzero()[0]
    begin, end = window
    if not len(tokens) or tokens[0] < begin or tokens[-1] >= end:
        return 0, 0
    return first + int(tokens[0]) - begin, first + int(tokens[-1]) - begin


def encode_questions(
    questions: Sequence[Question], windows: Windows, encoder: SentenceEncoder, max_seq_len: int
) -> Features:
    """The Features of questions: CLS question SEP window SEP. Errors: ValueError where no window has room, or for a
    tokenizer that does not say where its tokens stand; TooLongToEncode."""
    if max_seq_len < LEAST_TEXT + 4:
        raise ValueError(f"--max_seq_len {max_seq_len} leaves no room for a text; {LEAST_TEXT + 4} and more are wanted")
    tokens: list[Ints] = []
    all_places: list[Ints] = []
    first: list[int] = []
    second: list[int] = []
    labels: list[tuple[int, int]] = []
    part_of: list[int] = []
    # Questions on one text follow each other: it is encoded once.
    context: str | None = None
    asked = encoder.encode([question.question for question in questions])
    for number, question in enumerate(questions):
        if question.context != context:
            context = question.context
            try:
                text, places = encoder.encode_with_places(context)
            except TooLongToEncode as error:
                raise TooLongToEncode(f"question {question.key[:80]!r}: its context is {error}") from error
        longest = min(windows.longest_question, max_seq_len - 3 - LEAST_TEXT)
        begin_of_row = np.array(asked[number][:longest], dtype=np.int64)
        n = len(begin_of_row)
        answer = question.placed
        for begin, end in windows_of(len(text), max_seq_len - 3 - n, windows.stride):
            tokens += [begin_of_row, text[begin:end]]
            # The question's tokens stand nowhere in the text.
            all_places += [np.zeros((n, 2), dtype=np.int64), places[begin:end]]
            first.append(n)
            second.append(end - begin)
            labels.append(label_of(places, answer, (begin, end), first=n + 2))
            part_of.append(number)
    sizes = np.array(first, dtype=np.int64) + np.array(second, dtype=np.int64)
    return Features(
        tokens=np.concatenate(tokens).astype(id_type(encoder)),
        begin=np.cumsum(sizes) - sizes,
        first=np.array(first, dtype=np.int64),
        second=np.array(second, dtype=np.int64),
        labels=np.array(labels, dtype=np.int64),
        pair=np.array(True),
        skipped=np.array(0),
        part_of=np.array(part_of, dtype=np.int64),
        places=np.concatenate(all_places).astype(np.uint32),
    )
