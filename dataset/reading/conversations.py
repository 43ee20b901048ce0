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

from dataset.reading.faults import BadLine

# What a reader is asked for where a document is a conversation, in the place of the field of a text. A line has one of both.
CONVERSATION = "conversations or messages"
FIELDS = ("conversations", "messages")
ROLES = ("system", "user", "assistant", "tool")
# Schemas of tools have about ten levels. Templates walk through them by recursion, which ends at some hundreds.
MOST_LEVELS = 64
# as the chat template writes them
THOUGHTS = re.compile(r"\A\s*<think>\n?(.*?)\n?</think>\n*", re.DOTALL)

# an object, as JSON gives it
Record = dict[str, Any]


def text_of_conversation(record: Record) -> str:
    """The conversation of a line as JSON, {"messages": [...]} and perhaps "tools".

    Errors: BadLine.
    """
    tools = _listed(record.get("tools"), "tools")
    # Merged data sets have both, and null or an empty list in the one that a line does not use.
    there = [record[name] for name in FIELDS if record.get(name)]
    if not there or not isinstance(there[0], list):
        keys = ", ".join(repr(key[:80]) for key in list(record)[:5]) or "none"
        wanted = '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'
        reason = f"no list of messages in 'conversations' or 'messages' (the keys: {keys}); wanted: {wanted}"
        raise BadLine("no conversation", reason)
    if there[0] != there[-1]:
        raise BadLine(
            "two conversations", "'conversations' and 'messages' differ: which is meant? Remove the other one"
        )
    conversation: Record = {"messages": []}
    for number, message in enumerate(there[0], 1):
        checked = checked_message(message, number)
        conversation["messages"].append(checked)
        if checked["role"] == "system" and not tools:
            tools = _listed(message.get("tools") or message.get("functions"), f"message {number}: tools")
    if not any(message["role"] == "assistant" and is_trained(message) for message in conversation["messages"]):
        raise BadLine(
            "no answer",
            "no message of the assistant that says something and has not the weight 0: there is nothing to learn",
        )
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


def checked_message(message: Any, number: int) -> Record:
    """A message with the fields that the template reads, and no others."""
    if not isinstance(message, dict):
        raise BadLine("bad message", f"message {number} is no object with role and content")
    role = message.get("role")
    if role not in ROLES:
        hint = " (from and value are to be named role and content)" if "from" in message else ""
        wanted = f"where one of {', '.join(ROLES)} is wanted{hint}"
        raise BadLine("unknown role", f"message {number} has the role {role!r:.60} {wanted}")
    # A list of parts, as many tools write it, or null where there are calls alone
    content = message.get("content")
    parts = content if isinstance(content, list) else [""] if content is None else [content]
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise BadLine("content is no text", f"message {number}: its content is neither a text nor parts of text")
    checked = {"role": role, "content": "".join(texts)}
    if role != "assistant":
        return checked
    thoughts = message.get("reasoning_content") or ""
    if not isinstance(thoughts, str):
        raise BadLine("bad message", f"message {number}: reasoning_content is no text")
    found = THOUGHTS.match(checked["content"])
    if found is not None and not thoughts:
        thoughts = found.group(1)
        checked["content"] = checked["content"][found.end() :]
    if thoughts:
        checked["reasoning_content"] = thoughts
    calls = _listed(message.get("tool_calls"), f"message {number}: tool_calls")
    if calls:
        checked["tool_calls"] = [_checked_call(call, number) for call in calls]
    weight = message.get("weight", 1)
    if weight not in (0, 1, None):
        raise BadLine("bad message", f"message {number}: its weight is {weight!r:.60} where 0 or 1 is wanted")
    says_something = checked["content"].strip() or thoughts.strip() or calls
    if weight == 0 or not says_something:
        checked["weight"] = 0
    return checked


def _checked_call(call: Record, number: int) -> Record:
    """{"name": ..., "arguments": ...} of a call to a function."""
    function = call.get("function") or call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadLine("bad tool call", f"message {number}: a call has no name")
    arguments = function.get("arguments") or {}
    try:
        # A text goes into the call as it is. Python alone takes NaN and Infinity for JSON.
        json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments, allow_nan=False)
    except (ValueError, RecursionError):
        raise BadLine(
            "bad tool call", f"message {number}: the arguments of a call of {function['name']!r:.80} are no JSON"
        ) from None
    return {"name": function["name"], "arguments": arguments}


def _listed(value: Any, what: str) -> list[Record]:
    """A list of objects that may stand there as JSON in a text; empty where there is none."""
    try:
        if isinstance(value, str):
            value = json.loads(value) if value.strip() else None
        json.dumps(value, allow_nan=False)
        is_listed = isinstance(value or [], list) and all(isinstance(entry, dict) for entry in value or [])
    except (ValueError, RecursionError):
        is_listed = False
    if not is_listed or _is_deeper(value, MOST_LEVELS):
        wanted = f"no list of objects, or JSON of one, of at most {MOST_LEVELS} levels"
        raise BadLine("bad tools", f"{what}: {wanted}; NaN and Infinity are no JSON")
    return value or []


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value is nested deeper than so many levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deeper(entry, levels - 1) for entry in inner)
