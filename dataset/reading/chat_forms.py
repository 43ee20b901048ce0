"""The forms in which data sets write a conversation, and their conversion to messages with "role" and "content"."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dataset.reading.faults import BadLine

# a JSON object
Record = dict[str, Any]
# (name of one of FORMS, names of its fields in a file)
Shape = tuple[str, ...]

# Names of fields. Where an object has several of a kind, the first of the tuple counts.
LISTS = ("conversations", "messages", "conversation", "dialog", "dialogue", "chat", "turns", "data")
SPEAKERS = ("role", "from", "speaker")
CONTENTS = ("content", "value", "text")
QUESTIONS = (
    "instruction", "question", "query", "prompt", "problem", "input", "inputs", "human", "user", "指令", "问题", "问", "输入",
)  # fmt: skip
# the second part of a question
CONTEXTS = ("input", "context", "输入")
ANSWERS = (
    "output", "response", "answer", "completion", "solution", "target", "targets", "assistant", "bot",
    "回答", "答案", "答", "输出",
)  # fmt: skip
SYSTEM_FIELDS = ("system", "system_prompt")
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
# 0 or false: the answer is not trained. Of OpenAI; ms-swift and XTuner; axolotl (two); others.
WEIGHTS = ("weight", "loss", "train", "training", "trainable", "loss_mask", "output_with_loss")
ANSWER_FIELDS = (*THOUGHT_FIELDS, *WEIGHTS, "tool_calls", "function_call")
# Fields of data that compares answers.
COMPARED = re.compile(r"chosen|rejected(_\w+)?|(response|answer|completion|conversation|human_ref)_[0abjk]", re.I)


def _messages(turns: list[Any], speaker: str, content: str) -> list[Any]:
    new = {speaker: "role", content: "content"}
    return [{new.get(name, name): turn[name] for name in turn} if isinstance(turn, dict) else turn for turn in turns]


def _questions_with_answers(turns: list[Any], question: str, answer: str) -> list[Any]:
    messages: list[Any] = []
    for turn in turns:
        if not isinstance(turn, dict) or question not in turn or answer not in turn:
            raise BadLine("another shape", f"a turn has no {question!r} or no {answer!r}, which the first one has")
        of_answer = dict(turn)
        if system := take(of_answer, SYSTEM_FIELDS):
            messages.append({"role": "system", "content": system})
        history = of_answer.pop("history", None) or []
        for pair in history if isinstance(history, list) else [history]:
            messages += _texts(pair) if isinstance(pair, list) else _messages([pair], "role", "content")
        asked, answered = of_answer.pop(question), of_answer.pop(answer)
        if isinstance(asked, list):
            # TRL: a prompt of messages is not trained.
            messages += [{**message, "weight": 0} if isinstance(message, dict) else message for message in asked]
        else:
            parts = [part for part in (asked, *(of_answer.pop(name, None) for name in CONTEXTS)) if part]
            messages.append({"role": "user", "content": [text for part in parts for text in ("\n", part)][1:]})
        answers = answered if isinstance(answered, list) else [{**of_answer, "role": "assistant", "content": answered}]
        messages += _messages(answers, "role", "content")
    return messages


def _refuse(turns: list[Any]) -> list[Any]:
    raise BadLine(
        "preferences",
        "preference data (chosen and rejected, or the like): it compares answers, for DPO or a reward model, which are not trained "
        'here; to fine-tune on the better answers alone, write each as {"messages": [...]}',
    )


def _texts(turns: list[Any]) -> list[Any]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)]


class Form(NamedTuple):
    """A form of lines.

    is_list: the line has a list of turns; else it is a turn itself. turn: type of a turn in JSON. fields: the names that
    each of its fields may have. convert: (turns, a name for each of the fields) -> messages.
    """

    is_list: bool
    turn: type
    fields: tuple[tuple[str, ...], ...]
    convert: Callable[..., list[Any]]


FORMS = {
    "lists of messages": Form(True, dict, (SPEAKERS, CONTENTS), _messages),
    "lists of questions with answers": Form(True, dict, (QUESTIONS, ANSWERS), _questions_with_answers),
    "lists of texts in turn": Form(True, str, (), _texts),
    "comparisons of answers": Form(False, type(None), (), _refuse),
    "questions with answers": Form(False, dict, (QUESTIONS, ANSWERS), _questions_with_answers),
}


def take(record: Record, names: Sequence[str]) -> Any:
    """The value of the first of the fields that has one, taken out of the record; None if none has."""
    return next((record.pop(name) for name in names if record.get(name)), None)


def list_of(record: Record) -> list[Any]:
    """The list of turns of a line; empty if there is none."""
    return next((record[name] for name in LISTS if isinstance(record.get(name), list) and record[name]), [])


def messages_of(record: Record, shape: Shape) -> list[Any]:
    """The messages of a line, new objects; the fields that have them are taken out of the record. Errors: BadLine."""
    form = FORMS[shape[0]]
    if not form.is_list:
        read = (*shape[1:], *CONTEXTS, "history", *ANSWER_FIELDS)
        return form.convert([{name: record.pop(name) for name in read if record.get(name) is not None}], *shape[1:])
    turns = list_of(record)
    # Merged data sets have several lists: with null or an empty one where another is used, or the same one.
    for name in [name for name in LISTS if record.get(name) == turns]:
        del record[name]
    if any(record.get(name) for name in LISTS[:2]):
        raise BadLine(
            "two conversations", "'conversations' and 'messages' differ: which is meant? Remove the other one"
        )
    return form.convert(turns, *shape[1:])


def shape_of(record: Record) -> Shape | None:
    """The form of a line and the names of its fields; None for a line in none of the forms."""
    if any(record[key] and COMPARED.fullmatch(key) for key in record):
        return ("comparisons of answers",)
    turns = list_of(record)
    first = turns[0] if turns else record
    for name, form in FORMS.items():
        if form.is_list == bool(turns) and isinstance(first, form.turn):
            # {name in lower case: name}
            present = {key.lower(): key for key in first} if isinstance(first, dict) else {}
            fields = tuple(next((present[name] for name in names if name in present), "") for names in form.fields)
            if all(fields):
                return (name, *fields)
    return ("lists of messages", "role", "content") if turns else None
