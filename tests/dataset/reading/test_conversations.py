"""Lines of chat data. References: the same conversation, written plainly; and what each fault is."""

import gzip
import json

import pytest

from common.errors import DataError
from dataset.reading.conversations import CONVERSATION, MAX_TOOL_DEPTH, conversation_text, text_of_conversation
from dataset.reading.documents import read_documents
from dataset.reading.faults import BadLine, BadLines
from tests.chats import turn

ASKED = turn("user", "Hi")
SAID = turn("assistant", "Yes")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"name": "f", "arguments": {"x": 1}}
CALL_AS_TEXT = {"name": "f", "arguments": '{"x": 1}'}


def read(record):
    return json.loads(text_of_conversation(record))


def test_the_list_that_is_not_null_is_read():
    """Merged data sets have both columns, and null or an empty list in one of them, or the same in both."""
    for field, other_field in (("conversations", "messages"), ("messages", "conversations")):
        assert read({field: [ASKED, SAID], "id": 7}) == {"messages": [ASKED, SAID]}
        for other in (None, [], [ASKED, SAID]):
            assert read({field: [ASKED, SAID], other_field: other}) == {"messages": [ASKED, SAID]}


def test_what_is_said_is_told_without_the_form():
    turns = [turn("system", "Be brief", tools=[TOOL]), ASKED, turn("assistant", "Yes", reasoning_content="hm")]
    assert conversation_text(text_of_conversation({"messages": turns})) == "Be brief\nHi\nhm\nYes"


@pytest.mark.parametrize(
    "message, wanted",
    [
        (turn("assistant", "Yes", tools="", tool_calls="", reasoning_content=""), SAID),
        (turn("assistant", "Yes", tool_calls=" \n"), SAID),
        (turn("assistant", None), turn("assistant", "", weight=0)),
        (turn("assistant", " \n", reasoning_content="\n"), turn("assistant", " \n", reasoning_content="\n", weight=0)),
        (turn("assistant", "No", weight=0), turn("assistant", "No", weight=0)),
        (turn("assistant", "Yes", weight=1), SAID),
        (turn("assistant", "", tool_calls=[CALL_AS_TEXT]), turn("assistant", "", tool_calls=[CALL_AS_TEXT])),
        (turn("assistant", [{"type": "text", "text": "Y"}, {"type": "text", "text": "es"}]), SAID),
        (turn("assistant", "<think>\nhm\n</think>\n\nYes"), turn("assistant", "Yes", reasoning_content="hm")),
        (turn("assistant", "<think>hm</think>\nYes"), turn("assistant", "Yes", reasoning_content="hm")),
        (turn("assistant", "<think>\n\n</think>\n\nYes"), SAID),
        (turn("assistant", "No <think>hm</think>"), turn("assistant", "No <think>hm</think>")),
        (turn("assistant", "<think> and no end"), turn("assistant", "<think> and no end")),
        (turn("assistant", "", tool_calls=json.dumps([CALL])), turn("assistant", "", tool_calls=[CALL])),
        (turn("assistant", "", tool_calls=[{"id": 1, "function": CALL}]), turn("assistant", "", tool_calls=[CALL])),
    ],
)
def test_the_ways_to_write_an_answer_come_out_as_one(message, wanted):
    # An answer beside it, since the conversation is a fault where nothing is answered.
    assert read({"messages": [ASKED, message, ASKED, SAID]}) == {"messages": [ASKED, wanted, ASKED, SAID]}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [turn("system", "Be nice"), ASKED, SAID], "tools": [TOOL]},
        {"messages": [turn("system", "Be nice", tools=[TOOL]), ASKED, SAID]},
        {"messages": [turn("system", "Be nice", tools=json.dumps([TOOL])), ASKED, SAID]},
        {"messages": [turn("system", "Be nice", functions=[TOOL]), ASKED, SAID], "tools": None},
        {"messages": [turn("system", "Be nice", tools=[TOOL]), ASKED, SAID], "tools": " "},
    ],
)
def test_tools_are_found_where_people_write_them(record):
    assert read(record) == {"messages": [turn("system", "Be nice"), ASKED, SAID], "tools": [TOOL]}


def calling(arguments):
    """A line with a call."""
    return {"messages": [ASKED, turn("assistant", "", tool_calls=[{"name": "f", "arguments": arguments}])]}


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "record, kind, words",
    [
        ({"text": "a"}, "no conversation", "the keys: 'text'"),
        ({"conversations": []}, "no conversation", "no list of messages"),
        ({"messages": [ASKED, turn("assistant", "")]}, "no answer", "nothing to learn"),
        ({"messages": [ASKED, turn("assistant", "Yes", weight=0)]}, "no answer", "or all have the weight 0"),
        ({"messages": [ASKED, turn("assistant", "Yes", weight=0.5)]}, "bad message", "weight is 0.5 where 0 or 1"),
        ({"conversations": [ASKED, SAID], "messages": [SAID]}, "two conversations", "'messages' differ"),
        ({"messages": ["a", SAID]}, "unknown role", "message 1"),
        ({"messages": [{"from": "human", "value": "Hi"}]}, "unknown role", "from and value"),
        ({"messages": [{"content": "Hi"}, SAID]}, "unknown role", "message 1 has the role None where one of"),
        ({"messages": [ASKED, turn("assistant", 7)]}, "content is no text", "message 2"),
        ({"messages": [turn("user", [{"type": "image"}]), SAID]}, "content is no text", "message 1"),
        ({"messages": [ASKED, turn("assistant", "", reasoning_content=3)]}, "content is no text", "reasoning_content"),
        ({"messages": [ASKED, turn("assistant", "", tool_calls="{")]}, "bad tools", "tool_calls"),
        ({"messages": [ASKED, turn("assistant", "", tool_calls=[{}])]}, "bad tool call", "no name"),
        (calling({"x": [float("nan")]}), "bad tools", "NaN and Infinity are no JSON"),
        (calling("[" * 100_000), "bad tool call", "its arguments are no JSON"),
        ({"messages": [ASKED, SAID], "tools": {"name": "f"}}, "bad tools", "no list"),
        ({"messages": [ASKED, SAID], "tools": [nested(MAX_TOOL_DEPTH)]}, "bad tools", "levels"),
    ],
)
def test_faults_are_named(record, kind, words):
    with pytest.raises(BadLine) as caught:
        text_of_conversation(record)
    assert caught.value.args[0] == kind and words in caught.value.args[1]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson", "a.json"])
def test_files_are_read_as_those_of_text_are(tmp_path, name):
    """A fault has its line, and so has a conversation without messages."""
    records = [{"messages": [ASKED, SAID]}, {"messages": []}, {"messages": [ASKED]}, {"conversations": [ASKED, SAID]}]
    content = "\n".join(map(json.dumps, records)).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    bad = BadLines()
    found = list(read_documents(path, CONVERSATION, bad))
    assert [line for line, _ in found] == [1, 4] and bad.counts == {"no answer": 1, "no conversation": 1}
    assert [json.loads(text) for _, text in found] == [{"messages": [ASKED, SAID]}] * 2
    with pytest.raises(DataError, match=rf"{name}:2: no list of messages.*--skip_bad_lines"):
        list(read_documents(path, CONVERSATION))
