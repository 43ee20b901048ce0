"""Converts a line of chat data to the text of a document: its conversation, validated, as JSON in one form.

A line is {"conversations": [...]} as in MiniMind, or {"messages": [...]} as in most other data: a list of objects with
"role" and "content". Common variants are normalized, so that the chat template need not know them:

    tools       of the line, or "tools" or "functions" of a system message; a list, or a JSON string
    tool_calls  of an assistant's message; a list, or a JSON string; with or without "function" around each call
    thoughts    "reasoning_content" of an assistant's message, or <think> ... </think> at the start of its content
    content     a string, null, or a list of text parts
    weight      0 or 1 of an assistant's message, as in OpenAI's format; 0: the answer is read but not trained. An empty
                answer gets 0 too: a model would learn to be silent
"""

import json
import re
from typing import Any

from dataset.reading.faults import BadLine

# `text_field` if a document is a conversation, which a line has in one of the FIELDS
CONVERSATION = "conversations or messages"
FIELDS = ("conversations", "messages")
ROLES = ("system", "user", "assistant", "tool")
# Maximum nesting of tools: schemas have about ten levels; templates recurse into them, which fails at some hundreds.
MAX_TOOL_DEPTH = 64
# in the chat template's spelling
THOUGHTS = re.compile(r"\A\s*<think>\n?(.*?)\n?</think>\n*", re.DOTALL)

# a JSON object
Record = dict[str, Any]


def text_of_conversation(record: Record) -> str:
    """The conversation of a line as JSON, {"messages": [...]} and perhaps "tools".

    Errors: BadLine.
    """
    tools = _listed(record.get("tools") or record.get("functions"), "tools")
    # Merged data sets have both, with null or an empty list in the unused one.
    present = [record[name] for name in FIELDS if record.get(name)]
    if not present or not isinstance(present[0], list):
        keys = ", ".join(repr(key[:80]) for key in list(record)[:5]) or "none"
        form = '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'
        reason = f"no list of messages in 'conversations' or 'messages' (the keys: {keys}); expected: {form}"
        raise BadLine("no conversation", reason)
    if present[0] != present[-1]:
        raise BadLine(
            "two conversations", "'conversations' and 'messages' differ: which is meant? Remove the other one"
        )
    conversation: Record = {"messages": []}
    for number, message in enumerate(present[0], 1):
        checked = checked_message(message, number)
        conversation["messages"].append(checked)
        if checked["role"] == "system" and not tools:
            tools = _listed(message.get("tools") or message.get("functions"), f"message {number}: tools")
    if not any(message["role"] == "assistant" and is_trained(message) for message in conversation["messages"]):
        raise BadLine(
            "no answer",
            "no assistant message says or calls anything, or all have the weight 0: there is nothing to learn",
        )
    if tools:
        conversation["tools"] = tools
    return json.dumps(conversation, ensure_ascii=False)


def is_trained(answer: Record) -> bool:
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


def checked_message(message: Any, number: int) -> Record:
    """A message with only the fields that the template reads."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        hint = (
            " (rename from and value to role and content, human to user, gpt to assistant)"
            if isinstance(message, dict) and "from" in message
            else ""
        )
        wanted = f"where one of {', '.join(ROLES)} is expected{hint}"
        raise BadLine("unknown role", f"message {number} has the role {role!r:.60} {wanted}")
    # A list of parts, as many tools write it, or null beside calls
    content = message.get("content")
    parts = content if isinstance(content, list) else [""] if content is None else [content]
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
    thoughts = (message.get("reasoning_content") or "") if role == "assistant" else ""
    if not all(isinstance(text, str) for text in [*texts, thoughts]):
        raise BadLine("content is no text", f"message {number}: its content or reasoning_content is no text")
    checked = {"role": role, "content": "".join(texts)}
    if role != "assistant":
        return checked
    found = THOUGHTS.match(checked["content"])
    if found is not None:
        thoughts = thoughts or found.group(1)
        checked["content"] = checked["content"][found.end() :]
    if thoughts:
        checked["reasoning_content"] = thoughts
    calls = _listed(message.get("tool_calls"), f"message {number}: tool_calls")
    if calls:
        checked["tool_calls"] = [_checked_call(call, number) for call in calls]
    weight = message.get("weight", 1)
    if weight not in (0, 1, None):
        raise BadLine("bad message", f"message {number}: its weight is {weight!r:.60} where 0 or 1 is expected")
    says_something = checked["content"].strip() or thoughts.strip() or calls
    if weight == 0 or not says_something:
        checked["weight"] = 0
    return checked


def _checked_call(call: Record, number: int) -> Record:
    """{"name": ..., "arguments": ...} of a call to a function."""
    function = call.get("function") or call
    try:
        name, arguments = function["name"], function.get("arguments") or {}
        # A string is used unchanged. Only Python accepts NaN and Infinity as JSON.
        json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments, allow_nan=False)
        is_call = isinstance(name, str)
    except (KeyError, TypeError, ValueError, RecursionError):
        is_call = False
    if not is_call:
        raise BadLine("bad tool call", f"message {number}: a call has no name, or its arguments are no JSON")
    return {"name": name, "arguments": arguments}


def _listed(value: Any, what: str) -> list[Record]:
    """A list of objects, possibly given as a JSON string; empty if there is none."""
    try:
        if isinstance(value, str):
            value = json.loads(value) if value.strip() else None
        json.dumps(value, allow_nan=False)
        is_listed = isinstance(value or [], list) and all(isinstance(entry, dict) for entry in value or [])
    except (ValueError, RecursionError):
        is_listed = False
    if not is_listed or _is_deeper(value, MAX_TOOL_DEPTH):
        wanted = f"no list of objects, or JSON of one, of at most {MAX_TOOL_DEPTH} levels"
        raise BadLine("bad tools", f"{what}: {wanted}; NaN and Infinity are no JSON")
    return value or []


def _is_deeper(value: Any, levels: int) -> bool:
    """True if a JSON value is nested deeper than `levels`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deeper(entry, levels - 1) for entry in inner)
