"""A line of chat data to the text of a document: the conversation in it, checked, as JSON of one form.

A line is {"conversations": [...]} as MiniMind has it, or {"messages": [...]} as most others do: a list of objects with
"role" and "content". What people write in several ways comes out in one, so that the chat template need not know them:

    tools       of the line, or "tools" or "functions" of a system message; a list, or JSON in a text
    tool_calls  of an assistant's message; a list, or JSON in a text; with "function" around each call, or without
    thoughts    "reasoning_content" of an assistant's message, or <think> ... </think> at the beginning of its content
    content     a text, null, or parts of text
    weight      0 or 1 of an assistant's message, as OpenAI has it; 0: the answer is read and not trained. An answer in which
                nothing is said gets 0 too: a model would learn to be silent
"""

import json
import re
from typing import Any

from common.wording import as_written
from dataset.reading.faults import BadLine

# What a reader is asked for where a document is a conversation, in the place of the field of a text. A line has one of both.
CONVERSATION = "conversations or messages"
FIELDS = ("conversations", "messages")
ROLES = ("system", "user", "assistant", "tool")
# Schemas of tools have about ten levels. Templates walk through them by recursion, which ends at some hundreds.
MOST_LEVELS = 64
# As the chat template writes them.
THOUGHTS = re.compile(r"\A\s*<think>\n?(.*?)\n?</think>\n*", re.DOTALL)


# As JSON gives it
Record = dict[str, Any]


def text_of_conversation(record: Record) -> str:
    """The conversation of a line as JSON, {"messages": [...]} and perhaps "tools".

    Errors: BadLine.
    """
    messages = _messages(record)
    tools = _listed(record.get("tools"), "tools")
    conversation: Record = {"messages": []}
    for number, message in enumerate(messages, 1):
        checked = _checked_message(message, number)
        conversation["messages"].append(checked)
        if checked["role"] == "system" and not tools:
            tools = _listed(message.get("tools") or message.get("functions"), f"message {number}: tools")
    answers = [message for message in conversation["messages"] if message["role"] == "assistant"]
    if not answers:
        raise BadLine("no answer", "no message of the assistant, so there is nothing to learn")
    if not any(is_trained(answer) for answer in answers):
        raise BadLine("no answer", "each answer is empty or has the weight 0, so there is nothing to learn")
    if tools:
        conversation["tools"] = tools
    return json.dumps(conversation, ensure_ascii=False)


def is_trained(answer: Record) -> bool:
    """Whether a message of the assistant is to be learned. answer: as `text_of_conversation` writes it."""
    return bool(answer.get("weight", 1))


def said_in(text: str) -> str:
    """What is said in a conversation, one turn after the other. text: as `text_of_conversation` writes it.

    Names of roles and tools are left out: many conversations have them in common.
    """
    said = []
    for message in json.loads(text)["messages"]:
        said += [message.get("reasoning_content", ""), message["content"]]
        if message.get("tool_calls"):
            said.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return "\n".join(part for part in said if part)


def _messages(record: Record) -> list[Any]:
    """The list of messages, which is not checked yet."""
    # Merged data sets have both, and null or an empty list in the one that a line does not use.
    there = [name for name in FIELDS if record.get(name) is not None]
    for name in there:
        if not isinstance(record[name], list):
            raise BadLine("no conversation", f"{name!r} is no list of messages")
    used = [name for name in there if record[name]]
    if not there:
        keys = ", ".join(repr(key[:80]) for key in list(record)[:5]) or "none"
        raise BadLine("no conversation", f"no 'conversations' and no 'messages' in the object (its keys: {keys})")
    if not used:
        raise BadLine("no conversation", f"{there[0]!r} is an empty list: messages with role and content are wanted")
    if len(used) > 1 and record[used[0]] != record[used[1]]:
        raise BadLine(
            "two conversations", "'conversations' and 'messages' differ: which is meant? Remove the other one"
        )
    messages: list[Any] = record[used[0]]
    return messages


def _checked_message(message: Any, number: int) -> Record:
    """A message with the fields that the template reads, and no others."""
    if not isinstance(message, dict):
        raise BadLine("bad message", f"message {number} is no object with role and content")
    role = message.get("role")
    if role not in ROLES:
        stands_there = f"the role {as_written(role)}" if "role" in message else "no role"
        hint = " (from and value are to be named role and content)" if "from" in message else ""
        raise BadLine(
            "unknown role", f"message {number} has {stands_there} where one of {', '.join(ROLES)} is wanted{hint}"
        )
    checked = {"role": role, "content": _content(message.get("content"), number)}
    if role != "assistant":
        return checked
    thoughts = message.get("reasoning_content") or ""
    if not isinstance(thoughts, str):
        raise BadLine("bad message", f"message {number}: reasoning_content is no text")
    if not thoughts:
        found = THOUGHTS.match(checked["content"])
        if found is not None:
            thoughts = found.group(1)
            checked["content"] = checked["content"][found.end() :]
    if thoughts:
        checked["reasoning_content"] = thoughts
    calls = _listed(message.get("tool_calls"), f"message {number}: tool_calls")
    if calls:
        checked["tool_calls"] = [_checked_call(call, number) for call in calls]
    says_something = checked["content"].strip() or thoughts.strip() or calls
    if not _weight(message.get("weight"), number) or not says_something:
        checked["weight"] = 0
    return checked


def _weight(weight: Any, number: int) -> bool:
    """Whether an answer is trained."""
    if weight is None:
        return True
    if weight not in (0, 1):
        raise BadLine("bad message", f"message {number}: its weight is {as_written(weight)} where 0 or 1 is wanted")
    return bool(weight)


def _content(content: Any, number: int) -> str:
    """The text of a message: many tools write a list of parts, and null where there are calls alone."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise BadLine("content is no text", f"message {number}: its content is neither a text nor parts of text")
        texts.append(text)
    return "".join(texts)


def _checked_call(call: Record, number: int) -> Record:
    """{"name": ..., "arguments": ...} of a call to a function."""
    function = call.get("function") or call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadLine("bad tool call", f"message {number}: a call has no name")
    arguments = function.get("arguments") or {}
    # A text goes into the call as it is.
    if not _is_json(arguments):
        raise BadLine(
            "bad tool call", f"message {number}: the arguments of a call of {function['name']!r:.80} are no JSON"
        )
    return {"name": function["name"], "arguments": arguments}


def _is_json(value: Any) -> bool:
    """Whether a value, or what it spells if it is a text, is JSON to others than Python, which takes NaN and Infinity for it."""
    try:
        read = json.loads(value) if isinstance(value, str) else value
        json.dumps(read, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


def _listed(value: Any, what: str) -> list[Record]:
    """A list of objects that may stand there as JSON in a text; empty where there is none."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadLine("bad tools", f"{what}: neither a list nor JSON of one") from None
    is_blank = isinstance(value, str) and not value.strip()
    if not value or is_blank:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise BadLine("bad tools", f"{what}: no list of objects")
    if _levels(value) > MOST_LEVELS:
        raise BadLine("bad tools", f"{what}: more than {MOST_LEVELS} levels of brackets")
    if not _is_json(value):
        raise BadLine("bad tools", f"{what}: NaN and Infinity are no JSON")
    return value


def _levels(value: Any) -> int:
    """How deep a JSON value is nested; one level beyond MOST_LEVELS stands for all that follow."""
    levels = 0
    layer = [value]
    # Level by level, since a recursion would end where this is to look.
    while layer and levels <= MOST_LEVELS:
        inner: list[Any] = []
        for entry in layer:
            if isinstance(entry, dict):
                inner += entry.values()
            elif isinstance(entry, list):
                inner += entry
        layer = inner
        levels += 1
    return levels
