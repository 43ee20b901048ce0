"""The forms in which data sets write a conversation, and their conversion to messages with "role" and "content"."""

import re
from collections.abc import Sequence
from typing import Any

from dataset.reading.bad_lines import BadLine

JsonObject = dict[str, Any]
# (name of a form, names of its fields in a file)
Shape = tuple[str, ...]

# Names of fields. Where an object has several of a kind, the first of the tuple counts.
LISTS = ("conversations", "messages", "conversation", "dialog", "dialogue", "chat", "turns", "data")
SPEAKERS = ("role", "from", "speaker")
CONTENTS = ("content", "value", "text")
QUESTIONS = (
    "instruction", "question", "query", "prompt", "problem", "input", "inputs", "human", "user", "q", "指令", "问题", "问", "输入",
)  # fmt: skip
# the second part of a question
CONTEXTS = ("input", "context", "输入")
ANSWERS = (
    "output", "response", "solution", "answer", "completion", "target", "targets", "assistant", "bot", "a",
    "回答", "答案", "答", "输出",
)  # fmt: skip
SYSTEM_FIELDS = ("system", "system_prompt")
# Fields of data that compares answers.
COMPARED = re.compile(
    r"chosen|(all_)?reject(ed)?(_\w+)?|(non_)?preferred_output|(worse|negative)_(answer|output|response)|"
    r"(response|answer|completion|conversation|human_ref)_[012abjk]",
    re.IGNORECASE,
)
# Names of forms
MESSAGES, TEXTS_IN_TURN = "lists of messages", "lists of texts in turn"
QUESTIONS_WITH_ANSWERS = "questions with answers"


def take(fields: JsonObject, names: Sequence[str]) -> Any:
    """The value of the first of these fields that has one, taken out; None if none has."""
    return next((fields.pop(name) for name in names if fields.get(name)), None)


def keys_of(line: JsonObject) -> str:
    """The first keys of a line, for the user."""
    return ", ".join(repr(key[:80]) for key in list(line)[:5]) or "none"


def shape_of(line: JsonObject) -> Shape | None:
    """The form of a line and the names of its fields; None for a line in none of the forms."""
    list_name = _name_of_list(line)
    first = line[list_name][0] if list_name else line
    if isinstance(first, str):
        return (TEXTS_IN_TURN,)
    # {name in lower case: name}. Merged data sets have null in the fields of the others.
    keys = [key for key in first if list_name or first[key] is not None] if isinstance(first, dict) else []
    present = {key.lower(): key for key in keys}
    # A, B, C ... are options to choose from.
    if "b" in present:
        present.pop("a", None)
    forms = {MESSAGES: (SPEAKERS, CONTENTS)} if list_name else {}
    for form, kinds in {**forms, QUESTIONS_WITH_ANSWERS: (QUESTIONS, ANSWERS)}.items():
        fields = [next((present[name] for name in names if name in present), "") for names in kinds]
        # A whole .json file may be {"data": [{"question": ...}, ...]}: no conversation.
        if all(fields) and (list_name, form) != ("data", QUESTIONS_WITH_ANSWERS):
            return (form, *fields)
    # A message that lacks one of its fields; an object with a text alone is none.
    is_message = list_name and present.keys() & {*SPEAKERS, "content", "value"}
    return (MESSAGES, "role", "content") if is_message else None


def messages_of(line: JsonObject, shape: Shape) -> list[Any]:
    """The messages of a line; what has them is taken out of it. Errors: BadLine."""
    form, *fields = shape
    turns = [dict(line)]
    if list_name := _name_of_list(line):
        turns = line.pop(list_name)
    else:
        line.clear()
    # Merged data sets have both lists, with null or an empty list in one of them, or the same.
    if (line.pop(LISTS[1], None) or turns) != turns:
        raise BadLine("two conversations", "'conversations' and 'messages' differ: which is meant? Remove one of them")
    if form == TEXTS_IN_TURN:
        return _texts_in_turn(turns)
    if not all(isinstance(turn, dict) for turn in turns):
        raise BadLine("another shape", "a turn of the conversation is no object")
    if form == MESSAGES:
        new = dict(zip(fields, ("role", "content"), strict=True))
        return [{new.get(name, name): turn[name] for name in turn} for turn in turns]
    messages = []
    for turn in turns:
        left = dict(turn)
        messages += _question_with_answer(left, *fields)
        line.update(left)
    return messages


def _name_of_list(line: JsonObject) -> str:
    """The name of the field with the turns; "" if there is none."""
    return next((name for name in LISTS if isinstance(line.get(name), list) and line[name]), "")


def _texts_in_turn(texts: list[Any]) -> list[Any]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def _question_with_answer(turn: JsonObject, question: str, answer: str) -> list[Any]:
    """The messages of a turn; what has them is taken out of it. All other fields that an answer may have are of its answer."""
    messages: list[Any] = []
    if system := take(turn, SYSTEM_FIELDS):
        messages.append({"role": "system", "content": system})
    history = turn.pop("history", None) or []
    for past in history if isinstance(history, list) else [history]:
        messages += _texts_in_turn(past) if isinstance(past, list) else [past]
    asked, answered = turn.pop(question, None), turn.pop(answer, None)
    answers = answered if isinstance(answered, list) else [{"role": "assistant", "content": answered}]
    if isinstance(asked, list):
        # TRL: a prompt of messages is not trained.
        messages += [{**message, "weight": 0} if isinstance(message, dict) else message for message in asked]
    elif {"role": "user", "content": asked} not in answers:
        context = take(turn, CONTEXTS)
        messages.append({"role": "user", "content": [asked, "\n", context] if asked and context else asked or context})
    of_answer = {name: turn.pop(name) for name in turn.keys() - {"role", "content"}}
    return messages + [{**of_answer, **message} if isinstance(message, dict) else message for message in answers]
