"""Lines of chat data. References: the same conversation, written plainly; and what each fault is."""

import gzip
import json
import re
from collections import Counter

import pytest

from common.errors import DataError
from dataset.reading import conversations
from dataset.reading.bad_lines import BadLines
from dataset.reading.conversations import CONVERSATION, MAX_TOOL_DEPTH, report_of, text_of_conversation
from dataset.reading.documents import is_chat_file, read_documents
from dataset.reading.faults import BadLine
from dataset.reading.json_files import text_of_line
from tests.chats import turn
from tests.dataset.reading.test_formats import write_arrow

ASKED = turn("user", "Hi")
SAID = turn("assistant", "Yes")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"name": "f", "arguments": {"x": 1}}
CALLED = turn("assistant", "", tool_calls=[CALL])
CALL_AS_TEXT = {"name": "f", "arguments": '{"x": 1}'}
NESTED = json.loads('{"a": ' * MAX_TOOL_DEPTH + "{}" + "}" * MAX_TOOL_DEPTH)
BRIEF = turn("system", "Be brief")
ALPACA = "questions with answers (instruction, output)"
UNTRAINED = turn("assistant", "Yes", weight=0)
PAIR = {"human": "Hi", "assistant": "Yes"}
QA = {"question": "Hi", "answer": "Yes"}
RESULT = turn("tool", "1")
SPEAKERS = ("system", "human", "function_call", "observation", "gpt")
SPOKEN = ("Be brief", "Hi", json.dumps(CALL), "1", "Yes")
SHAREGPT = [{"from": name, "value": text} for name, text in zip(SPEAKERS, SPOKEN, strict=True)]
FROM_VALUE = "lists of messages (from, value)"


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
    assert conversations.conversation_text(text_of_conversation({"messages": turns})) == "Be brief\nHi\nhm\nYes"


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
        (turn("assistant", "", tool_calls=json.dumps([CALL])), CALLED),
        (turn("assistant", "", tool_calls=[{"id": 1, "function": CALL}]), CALLED),
        (turn("assistant", "", tool_calls={"name": "f", "parameters": {"x": 1}}), CALLED),
    ],
)
def test_the_ways_to_write_an_answer_come_out_as_one(message, wanted):
    # An answer beside it, since the conversation is a fault where nothing is answered.
    assert read({"messages": [ASKED, message, ASKED, SAID]}) == {"messages": [ASKED, wanted, ASKED, SAID]}


def test_tools_are_found_where_people_write_them():
    for record in (
        {"messages": [turn("system", "Be nice"), ASKED, SAID], "tools": [TOOL]},
        {"messages": [turn("system", "Be nice", tools=[TOOL]), ASKED, SAID]},
        {"messages": [turn("system", "Be nice", tools=json.dumps([TOOL])), ASKED, SAID]},
        {"messages": [turn("system", "Be nice", functions=[TOOL]), ASKED, SAID], "tools": None},
        {"messages": [turn("system", "Be nice", tools=[TOOL]), ASKED, SAID], "tools": " "},
    ):
        assert read(record) == {"messages": [turn("system", "Be nice"), ASKED, SAID], "tools": [TOOL]}


def calling(arguments):
    return {"messages": [ASKED, turn("assistant", "", tool_calls=[{"name": "f", "arguments": arguments}])]}


@pytest.mark.parametrize(
    "record, kind, words",
    [
        ({"text": "a"}, "no conversation", "the keys: 'text'"),
        ({"conversations": []}, "no conversation", "no list of messages"),
        ({"messages": [ASKED, turn("assistant", "Yes", weight=0)]}, "no answer", "says or calls anything, or all"),
        ({"messages": [ASKED, turn("assistant", "Yes", weight=0.5)]}, "bad message", "0.5 is neither 0 nor 1"),
        ({"conversations": [ASKED, SAID], "messages": [SAID]}, "two conversations", "'messages' differ"),
        ({"messages": ["a", SAID]}, "content is no text", "message 2"),
        ({"messages": [SAID, "a"]}, "another shape", "a turn of the conversation is no object"),
        ({"messages": [turn("narrator", "Hi"), SAID]}, "unknown role", "message 1 has the role 'narrator'"),
        ({"messages": [turn("system", "a"), SAID], "system": "b"}, "two system messages", "differ"),
        ({"prompt": "Hi", "chosen": "Yes", "rejected": "No"}, "preferences", "DPO or a reward model"),
        ({"messages": [ASKED, SAID], "rejected_response": "No"}, "preferences", "to fine-tune on the better"),
        ({"prompt": "Hi", "response_1": "Yes", "response_2": "No"}, "preferences", "it compares answers"),
        ({"instruction": "Hi", "output": ["Yes", "No"]}, "unknown role", "message 2"),
        ({"messages": [ASKED, turn("assistant", 7)]}, "content is no text", "message 2"),
        ({"messages": [turn("user", [{"type": "image"}]), SAID]}, "content is no text", "message 1"),
        ({"data": [{"question": "Hi", "answer": "Yes"}]}, "no conversation", "the keys: 'data'"),
        ({"messages": [ASKED, turn("assistant", "", reasoning_content=3)]}, "content is no text", "reasoning_content"),
        ({"messages": [ASKED, turn("assistant", "", tool_calls="{")]}, "bad tools", "tool_calls"),
        ({"messages": [ASKED, turn("assistant", "", tool_calls=[{}])]}, "bad tool call", "no name"),
        (calling({"x": [float("nan")]}), "bad tools", "NaN and Infinity are no JSON"),
        (calling("[" * 100_000), "bad tool call", "its arguments are no JSON"),
        (calling([1]), "bad tool call", "its arguments are no JSON object"),
        ({"messages": [ASKED, SAID], "tools": 7}, "bad tools", "no list"),
        ({"messages": [ASKED, SAID], "tools": [NESTED]}, "bad tools", "levels"),
    ],
)
def test_faults_are_named(record, kind, words):
    with pytest.raises(BadLine) as caught:
        text_of_conversation(record)
    assert caught.value.args[0] == kind and words in caught.value.args[1]


# Each as its makers document it: the line, its messages, what is told of it (each of one line)
@pytest.mark.parametrize(
    "line, wanted, told",
    [
        ({"instruction": "H", "input": "i", "output": "Yes"}, [turn("user", "H\ni"), SAID], {("read as", ALPACA)}),
        ({"instruction": "Hi", "output": "Yes", "history": [["Hi", "Yes"]]}, [ASKED, SAID] * 2, {("read as", ALPACA)}),
        ({"instruction": "", "input": "Hi", "output": "Yes", "system": "Be brief"}, [BRIEF, ASKED, SAID], {}),
        ({"instruction": "H", "context": "i", "response": "Yes"}, [turn("user", "H\ni"), SAID], {}),
        ({"指令": "H", "输入": "i", "输出": "Yes", "类": 1}, [turn("user", "H\ni"), SAID], {("passed over", "类")}),
        ({"Question": "Hi", "Response": "Yes", "Complex": "c"}, [ASKED, SAID], {("passed over", "Complex")}),
        ({"problem": "Hi", "solution": "Yes", "answer": "42"}, [ASKED, SAID], {("passed over", "answer")}),
        ({"instruction": None, **QA, "content": "c"}, [ASKED, SAID], {("passed over", "content")}),
        ({"query": "Hi", "response": "Yes", "thinking": "a"}, [ASKED, {**SAID, "reasoning_content": "a"}], {}),
        ({"prompt": [ASKED, SAID, ASKED], "completion": [SAID]}, [ASKED, UNTRAINED, ASKED, SAID], {}),
        ({"prompt": "Hi", "completion": [ASKED, SAID], "rating": 5}, [ASKED, SAID], {("passed over", "rating")}),
        ({"prompt": "Hi", "completion": "Yes", "label": True}, [ASKED, SAID], {("followed", "label")}),
        ({"prompt": "Hi", "completion": "Yes", "label": 1}, [ASKED, SAID], {("passed over", "label")}),
        ({"data": ["Hi", "Yes"], "id": 0}, [ASKED, SAID], {("passed over", "id")}),
        ([ASKED, SAID], [ASKED, SAID], {("read as", "lists of messages (role, content)")}),
        (["Hi", "Yes"], [ASKED, SAID], {("read as", "lists of texts in turn")}),
        ({"conversation": [{"system": "Be brief", "input": "Hi", "output": "Yes"}]}, [BRIEF, ASKED, SAID], {}),
        ({"conversation": [{**PAIR, "loss": False}, PAIR]}, [ASKED, UNTRAINED, ASKED, SAID], {("followed", "loss")}),
        ({"conversations": SHAREGPT}, [BRIEF, ASKED, CALLED, RESULT, SAID], {("read as", FROM_VALUE)}),
        (
            {"messages": [ASKED, turn("assistant", None, function_call=CALL), turn("function", "1", name="f"), SAID]},
            [ASKED, CALLED, RESULT, SAID],
            {("followed", "function_call"), ("passed over", "name")},
        ),
        ({"messages": [BRIEF, ASKED, SAID], "system": "Be brief"}, [BRIEF, ASKED, SAID], {("followed", "system")}),
        ({"messages": [ASKED, SAID] * 2, "mask_history": True}, [ASKED, UNTRAINED, ASKED, SAID], {}),
        ({"messages": [ASKED, {**SAID, "train": False}, ASKED, SAID]}, [ASKED, UNTRAINED, ASKED, SAID], {}),
        ({"messages": [{**ASKED, "loss": 0}, {**SAID, "loss": 0.7}]}, [ASKED, SAID], {("passed over", "loss")}),
        ({"messages": [ASKED, {**SAID, "reasoning": "a"}]}, [ASKED, {**SAID, "reasoning_content": "a"}], {}),
        ({"messages": [turn("user", [{"type": "text", "value": "Hi"}]), SAID], "tag": ""}, [ASKED, SAID], {}),
        ({"messages": [ASKED, SAID], "images": ["a.png"]}, [ASKED, SAID], {("passed over", "images")}),
        ({"messages": json.dumps([ASKED, SAID])}, [ASKED, SAID], {}),
        ({"messages": {"role": ["user", "assistant"], "content": ["Hi", "Yes"]}}, [ASKED, SAID], {}),
    ],
)
def test_a_conversation_is_read_in_the_forms_that_data_sets_have(line, wanted, told):
    found = Counter()
    text = text_of_line(json.dumps(line).encode(), CONVERSATION, found)
    assert json.loads(text)["messages"] == wanted
    assert found.keys() >= set(told) and set(found.values()) == {1}
    if told:
        assert {entry for entry in found if entry[0] == "passed over"} == {e for e in told if e[0] == "passed over"}


def test_what_is_told_of_many_lines_takes_a_line_for_each_kind():
    told = Counter()
    for number in range(300):
        line = {"messages": [ASKED, SAID], "category": "a", "images": [1] * (number < 6), f"odd {number}": 1}
        text_of_conversation(line, told)
    for field in ({"label": False}, {"label": "undesirable"}, {"kto_tag": 0}, {"train": False}, {"weight": 0}):
        assert text_of_conversation({"messages": [ASKED, SAID], **field}, told) == ""
    assert text_of_conversation({"messages": [ASKED, SAID], "label": 0}) != "", "a class"
    read_as, left_out, passed_over = report_of(told)
    assert read_as == "read as: lists of messages (role, content) (300 lines)"
    one_each = ", ".join(f"{name} false (1 line)" for name in ("kto_tag", "train", "weight"))
    assert left_out == f"left out: label false (2 lines), {one_each}"
    assert re.match(r"passed over: category .300 lines., other fields .2\d\d lines., images .6 lines., ", passed_over)


@pytest.mark.parametrize("field", conversations.WEIGHTS)
def test_a_no_is_one_in_all_fields_and_forms_of_lines_and_answers(field):
    no = (False, 0, 0.0, "false", "0", "0.0", "No ")
    for value in (*no, True, 1, 1.0, "true", "1.0", None, "", float("nan")):
        assert (text_of_conversation({"messages": [ASKED, SAID], field: value}) == "") == (value in no), value
        answer = read({"messages": [ASKED, {**SAID, field: value}, ASKED, SAID]})["messages"][1]
        assert answer == (UNTRAINED if value in no else SAID), value


def test_a_measured_loss_says_nothing_unlike_a_weight(tmp_path):
    lines = [{"messages": [ASKED, SAID], "loss": loss, "label": 0} for loss in (0.0, 1.0, 2.5, False)]
    lines += [{**lines[0], "weight": weight} for weight in (0.0, 0.7)]
    lines.append({"messages": [ASKED, {**SAID, "loss": 0}], "loss": " 1.2 "})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [line for line, _ in read_documents(tmp_path / "a.jsonl", CONVERSATION)] == [1, 2, 3, 6, 7]


@pytest.mark.parametrize("name", ["a.arrow", "a.parquet"])
def test_rows_of_tables_are_chats_without_the_nulls_that_arrow_adds(tmp_path, name):
    """Reference: the same records as lines. All structs of a column have the fields of all, those of calls and tools too."""
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / name
    other_call = {"name": "g", "arguments": {"y": "a", "z": [{"k": 1}, {"l": 2}]}}
    calls = [{**SAID, "tool_calls": [call]} for call in (CALL, other_call)]
    records = [
        {"messages": [ASKED, calls[0]], "tools": [TOOL], "image": b"\xff" * 99, "score": 0.5},
        {"messages": [{"role": "user", "content": "你好"}, SAID], "image": None},
        {"messages": [ASKED, calls[1]], "tools": [{"type": "function", "function": {"name": "g"}}]},
        {"messages": [ASKED, {**SAID, "content": "x" * (17 << 20)}]},
    ]
    write_arrow(path, arrow.Table.from_pylist(records), "parquet" if name == "a.parquet" else "stream")
    assert is_chat_file(path, "text") and not is_chat_file(path, "score")
    told, bad = Counter(), BadLines()
    found = [text for _, text in read_documents(path, CONVERSATION, bad, notes=told)]
    assert found == [text_of_conversation(record) for record in records[:3]]
    assert bad.counts == {"too long": 1}
    assert {name: lines for (what, name), lines in told.items() if what == "passed over"} == {"image": 1, "score": 1}


def test_texts_in_binary_columns_are_read_and_other_bytes_are_no_text(tmp_path):
    """As Spark writes strings."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    questions = ["你好".encode(), b"\xff"]
    parquet.write_table(arrow.table({"instruction": questions, "output": [b"Yes"] * 2}), tmp_path / "a.parquet")
    bad = BadLines()
    ((_, text),) = read_documents(tmp_path / "a.parquet", CONVERSATION, bad)
    assert json.loads(text)["messages"] == [turn("user", "你好"), SAID] and bad.counts == {"content is no text": 1}


def test_a_line_of_another_shape_than_the_first_is_a_fault(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = ["broken", {"from": "a"}, {"instruction": "Hi", "output": "Yes"}, {"messages": [ASKED, SAID]}]
    path.write_text("\n".join(json.dumps(line) if isinstance(line, dict) else line for line in lines))
    bad = BadLines()
    assert [line for line, _ in read_documents(path, CONVERSATION, bad)] == [3]
    (fault,) = bad.places["another shape"]
    assert fault.line == 4 and fault.reason == f"lists of messages (role, content), where the first line has {ALPACA}"


@pytest.mark.parametrize("names", ["q,A", "instruction,output", "问题,回答", "Question,Answer"])
def test_chats_of_a_table_are_in_the_columns_that_objects_have_as_fields(tmp_path, names):
    """A column without a name, as pandas writes one, is left out; two of one name would be one field."""
    path = tmp_path / "a.csv"
    path.write_text(f',{names},history,weight\n0,Hi,Yes,[],0.0\n1,Hi,Yes,"[[""Hi"", ""Yes""]]",1.0\n', encoding="utf-8")
    ((line, text),) = read_documents(path, CONVERSATION, notes=(notes := Counter()))
    assert line == 3 and json.loads(text)["messages"] == [ASKED, SAID] * 2 and is_chat_file(path, "text")
    assert report_of(notes)[1:] == ["left out: weight false (1 line)"]
    with pytest.raises(DataError, match="no column 'text' .*; these are conversations, which train_sft.py reads"):
        list(read_documents(path))
    path.write_text(f"{names.split(',')[0]},A,B\nHi,Yes,No\n", encoding="utf-8")
    assert not is_chat_file(path, "text"), "options to choose from"
    path.write_text(f"{names},{names}\n", encoding="utf-8")
    with pytest.raises(DataError, match="more than one column"):
        list(read_documents(path, CONVERSATION))


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
