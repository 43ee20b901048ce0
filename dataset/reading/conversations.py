"""Converts a line of chat data to the text of a document: its conversation, validated, as JSON in one form.

chat_forms.py finds its messages. Their variants, which docs/sft.md lists, are normalized, so that the chat template need not
know them. An answer of weight 0 is read but not trained; an empty one gets 0 too: a model would learn to be silent.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from common.wording import counted, one_line
from dataset.reading.bad_lines import BadLine
from dataset.reading.chat_forms import COMPARED, SYSTEM_FIELDS, JsonObject, Shape, keys_of, messages_of, shape_of, take

# `text_field` if a document is a conversation
CONVERSATION = "conversations or messages"
# roles of messages whose content is a call
CALLING_ROLES = ("function_call", "tool_call")
# {role of a message in lower case: role in the template}
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", *CALLING_ROLES), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "function_response", "ipython"), "tool"),
}
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
# False by `truth_of`: the answer or line is not trained. Of OpenAI; ms-swift and XTuner; axolotl (two); others.
WEIGHTS = ("weight", "loss", "train", "training", "trainable", "loss_mask", "output_with_loss")
TOOL_FIELDS = ("tools", "functions")
ARGUMENT_FIELDS = ("arguments", "parameters", "args")
# false: an undesirable answer, in data for KTO (TRL and ms-swift; LLaMA-Factory)
DESIRABLE = ("label", "kto_tag")
# {what these and WEIGHTS may say: whether it is trained}
YES_OR_NO = dict.fromkeys(("true", "yes", "desirable", "1"), True)
YES_OR_NO |= dict.fromkeys(("false", "no", "undesirable", "0"), False)
# In JSON, a field of WEIGHTS with a number besides 0 and 1: its numbers are measured, such as losses. Not "weight": one of 0 is
# none, whatever the others are.
MEASURED = re.compile(rb'"(%s)"\s*+:\s*+"?\s*+(?![01](\.0*)?[\s",}\]])[+-]?[\d.]' % "|".join(WEIGHTS[1:]).encode())
# types of the parts of a content
TEXT_PARTS = (None, "text", "input_text", "output_text")
# Maximum nesting of tools: schemas have about ten levels; templates recurse into them, which fails at some hundreds.
MAX_TOOL_DEPTH = 64
# in the chat template's spelling
THOUGHTS = re.compile(r"\A\s*<think>\n?(.*?)\n?</think>\n*", re.DOTALL)

# These change what is trained; data that has none of them is read as it always was.
FOLLOWED_FIELDS = {*DESIRABLE, *SYSTEM_FIELDS, *THOUGHT_FIELDS[1:], *WEIGHTS[1:], "mask_history", "function_call"}
# {(what happened, to which field): number of lines}, for the user
Notes = Counter[tuple[str, str]]
READ_AS, LEFT_OUT, FOLLOWED, PASSED_OVER = "read as", "left out", "followed", "passed over"
# Entries: the names of fields are the data's.
MAX_NOTES = 50


def truth_of(value: Any, may_be_number: bool = True) -> bool | None:
    """Whether a field says yes or no, as a boolean, a 1 or 0 of any type, or a text of one; None: neither.

    may_be_number: False where numbers mean something else.
    """
    # pandas writes 1.0.
    text = re.sub(r"\.0*$", "", str(value).strip().lower())
    return YES_OR_NO.get(text) if may_be_number or text not in ("0", "1") else None


def text_of_conversation(
    line: JsonObject, notes: Notes | None = None, shape: Shape | None = None, measured: Collection[str] = ()
) -> str:
    """The conversation of a line as JSON, {"messages": [...]} and perhaps "tools"; "" if the line is to be left out.

    notes: gets what is to be said of the line. shape: that of the file's first line. measured: names of WEIGHTS whose numbers
    are no truth values in this file, such as losses. Errors: BadLine.
    """
    # A flag or a score of such a name compares nothing.
    if any(isinstance(value, str | list | dict) and value and COMPARED.fullmatch(key) for key, value in line.items()):
        raise BadLine(
            "preferences",
            "preference data (chosen and rejected, or the like): it compares answers, for DPO or a reward model, which are not "
            'trained here; to fine-tune on the better answers alone, write each as {"messages": [...]}',
        )
    line_shape = shape_of(line)
    if line_shape is None:
        raise BadLine(
            "no conversation",
            f"no list of messages in 'conversations' or 'messages', and no question with its answer (the keys: {keys_of(line)}); "
            'expected: {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}, from and value '
            "(ShareGPT), instruction and output (Alpaca), question and answer, prompt and completion, or another form of docs/sft.md",
        )
    if shape not in (None, line_shape):
        raise BadLine("another shape", f"{name_of_shape(line_shape)}, where the first line has {name_of_shape(shape)}")
    notes = Counter() if notes is None else notes
    # What is read is taken out, so what remains is passed over.
    left = dict(line)
    for name in (*DESIRABLE, *WEIGHTS):
        # A label of 0 or 1 may be a class.
        is_wanted = truth_of(left.get(name), may_be_number=name not in ("label", *measured))
        if is_wanted is None:
            continue
        del left[name]
        if not is_wanted:
            notes[LEFT_OUT, f"{name} false"] += 1
            return ""
    tools = _listed(take(left, TOOL_FIELDS), "tools")
    trains_last_only = truth_of(left.get("mask_history"))
    if trains_last_only is not None:
        del left["mask_history"]
    system = take(left, SYSTEM_FIELDS)
    read = line.keys() - left.keys()
    messages: list[JsonObject] = []
    remaining = [left]
    for number, message in enumerate(messages_of(left, line_shape), 1):
        left = dict(message) if isinstance(message, dict) else {}
        messages.append(checked_message(left, number, measured))
        if messages[-1]["role"] == "system" and not tools:
            tools = _listed(take(left, TOOL_FIELDS), f"message {number}: tools")
        read |= message.keys() - left.keys()
        remaining.append(left)
    if system:
        first = checked_message({"role": "system", "content": system}, 0)
        if any(message["role"] == "system" and message != first for message in messages):
            raise BadLine("two system messages", "'system' of the line and its system message differ: remove one")
        if messages[:1] != [first]:
            messages.insert(0, first)
    answers = [message for message in messages if message["role"] == "assistant"]
    for answer in answers[:-1] if trains_last_only else []:
        answer["weight"] = 0
    if not any(map(is_trained, answers)):
        raise BadLine("no answer", "no assistant message says or calls anything, or all have the weight 0")
    conversation: JsonObject = {"messages": messages}
    if tools:
        conversation["tools"] = tools
    seen = {(READ_AS, name_of_shape(line_shape)), *((FOLLOWED, name) for name in FOLLOWED_FIELDS & read)}
    for left in remaining:
        seen |= {(PASSED_OVER, name) for name, value in left.items() if value not in (None, "", [], {})}
    add_notes(notes, dict.fromkeys(sorted(seen), 1))
    return json.dumps(conversation, ensure_ascii=False)


def add_notes(notes: Notes, more: Mapping[tuple[str, str], int]) -> None:
    """Add the counts of other lines."""
    for entry, lines in more.items():
        is_other = entry[0] == PASSED_OVER and entry not in notes and len(notes) >= MAX_NOTES
        notes[(PASSED_OVER, "other fields") if is_other else entry] += lines


def name_of_shape(shape: Shape) -> str:
    """A shape for the user."""
    return f"{shape[0]} ({', '.join(shape[1:])})" if len(shape) > 1 else shape[0]


def report_of(notes: Notes) -> list[str]:
    """Printable lines, one for all that happened alike: "passed over: category (300 lines), images (6 lines)"."""
    fields: dict[str, list[str]] = {READ_AS: [], LEFT_OUT: [], FOLLOWED: [], PASSED_OVER: []}
    for (happened, name), lines in notes.most_common():
        fields[happened].append(f"{one_line(name)[:80]} ({counted(lines, 'line')})")
    return [f"{happened}: {', '.join(names)}" for happened, names in fields.items() if names]


def is_trained(answer: JsonObject) -> bool:
    """True if a message of the assistant is trained. answer: as `text_of_conversation` writes it."""
    return bool(answer.get("weight", 1))


def conversation_text(text: str) -> str:
    """The contents of a conversation, turn by turn. text: as `text_of_conversation` writes it.

    Roles and lists of tools are left out: many conversations share them.
    """
    said = []
    for message in json.loads(text)["messages"]:
        said += [message.get("reasoning_content", ""), message["content"]]
        if message.get("tool_calls"):
            said.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return "\n".join(part for part in said if part)


def checked_message(message: JsonObject, number: int, measured: Collection[str] = ()) -> JsonObject:
    """A message with only the fields that the template reads, which are taken out of `message`. measured: as above."""
    name = message.pop("role", None)
    role = ROLES.get(str(name).lower())
    if role is None:
        wanted = f"where one of {', '.join(dict.fromkeys(ROLES.values()))} is expected"
        raise BadLine("unknown role", f"message {number} has the role {name!r:.60} {wanted}")
    content = message.pop("content", None)
    if str(name).lower() in CALLING_ROLES:
        message["function_call"], content = content, None
    # A list of parts, as many tools write it, or null beside calls
    parts = content if isinstance(content, list) else [""] if content is None else [content]
    texts = list(map(_text_of_part, parts))
    thoughts = (take(message, THOUGHT_FIELDS) or "") if role == "assistant" else ""
    if not all(isinstance(text, str) for text in [*texts, thoughts]):
        raise BadLine("content is no text", f"message {number}: its content or reasoning_content is no text")
    checked: JsonObject = {"role": role, "content": "".join(texts)}
    truths = {name: truth_of(message.get(name), name not in measured) for name in WEIGHTS}
    # Only answers are trained, so a 1 elsewhere is passed over. Other values of these names, but of "weight", mean something else.
    for name in [name for name, truth in truths.items() if truth is False or (truth and role == "assistant")]:
        del message[name]
    if role != "assistant":
        return checked
    if str(message.get("weight") or "nan") != "nan":
        raise BadLine("bad message", f"message {number}: the weight {message['weight']!r:.60} is neither 0 nor 1")
    if match := THOUGHTS.match(checked["content"]):
        thoughts = thoughts or match[1]
        checked["content"] = checked["content"][match.end() :]
    if thoughts:
        checked["reasoning_content"] = thoughts
    calls = _listed(take(message, ("tool_calls", "function_call")), f"message {number}: tool_calls")
    if calls:
        checked["tool_calls"] = [_checked_call(call, number) for call in calls]
    says_something = checked["content"].strip() or thoughts.strip() or calls
    if False in truths.values() or not says_something:
        checked["weight"] = 0
    return checked


def _text_of_part(part: Any) -> Any:
    """The text of a part of a content; no string if it is something else, such as an image."""
    if not isinstance(part, dict):
        return part
    return part.get("text", part.get("value")) if part.get("type") in TEXT_PARTS else None


def _checked_call(call: JsonObject, number: int) -> JsonObject:
    """{"name": ..., "arguments": ...} of a call to a function."""
    function = call.get("function") or call
    try:
        name, arguments = function["name"], take(dict(function), ARGUMENT_FIELDS) or {}
        # A string is used unchanged. Only Python accepts NaN and Infinity as JSON.
        json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments, allow_nan=False)
        is_call = isinstance(name, str) and isinstance(arguments, str | dict)
    except (KeyError, TypeError, ValueError, RecursionError):
        is_call = False
    if not is_call:
        raise BadLine("bad tool call", f"message {number}: a call has no name, or its arguments are no JSON object")
    return {"name": name, "arguments": arguments}


def _listed(value: Any, what: str) -> list[JsonObject]:
    """A list of objects, or of the one that is given by itself, possibly as a JSON string; empty if there is none."""
    try:
        if isinstance(value, str):
            value = json.loads(value.strip() or "[]")
        listed = [value] if value and isinstance(value, dict) else value or []
        json.dumps(listed, allow_nan=False)
        is_listed = isinstance(listed, list) and all(isinstance(entry, dict) for entry in listed)
    except (ValueError, RecursionError):
        is_listed = False
    if not is_listed or _is_deeper(listed, MAX_TOOL_DEPTH):
        wanted = f"no list of objects, or JSON of one, of at most {MAX_TOOL_DEPTH} levels"
        raise BadLine("bad tools", f"{what}: {wanted}; NaN and Infinity are no JSON")
    return listed


def _is_deeper(value: Any, levels: int) -> bool:
    """True if a JSON value is nested deeper than `levels`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deeper(entry, levels - 1) for entry in inner)
