"""Files of one's own tasks: CSV, TSV and jsonl. References: Python's csv and json writers, and hand-made faults."""

import csv
import json
import os

import pytest

from common.errors import DataError
from dataset.glue.glue_tasks import CLASSIFICATION, REGRESSION, Task
from dataset.glue.tables import read_rows, words_of_labels

PAIR = Task("mine", ("title", "body"), "stars", ("bad", "good"), ("accuracy",))
SCORE = Task("mine", ("text",), "label", (), ("pearson",), kind=REGRESSION, bounds=(float("-inf"), float("inf")))
ROWS = [('a, "quoted" one', "two\nlines", "good"), ("", "tab\there", "bad"), ("x", "y", "good")]


def test_a_csv_and_a_jsonl_file_hold_the_same(tmp_path):
    """Columns in any order and others beside them; commas, quotes and line breaks within a field; a BOM."""
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerow(["stars", "id", "body", "title"])
        writer.writerows([label, i, body, title] for i, (title, body, label) in enumerate(ROWS))
    lines = [json.dumps({"title": a, "body": b, "stars": c, "more": [1]}) for a, b, c in ROWS]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    for name in ("a.csv", "a.jsonl"):
        rows = read_rows(tmp_path / name, PAIR)
        assert rows.sentences == [[row[0] for row in ROWS], [row[1] for row in ROWS]]
        assert rows.labels == [1, 0, 1] and rows.skipped == 0
        assert words_of_labels(tmp_path / name, PAIR) == ["bad", "good"]
        assert read_rows(tmp_path / name, PAIR._replace(label="none"), labelled=False).labels == []


def test_scores_are_finite_numbers_of_any_size(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": -3}\n{"text": "b", "label": "1e3"}\n')
    assert read_rows(tmp_path / "a.jsonl", SCORE).labels == [-3, 1000]
    (tmp_path / "b.csv").write_text("text,label\na, +4.5 \na,.5\na,4.\na,-2E-1\n")
    assert read_rows(tmp_path / "b.csv", SCORE).labels == [4.5, 0.5, 4, -0.2]
    # Of 1e39 float32 makes infinity, and of 1e20 its square in the loss.
    # Python reads 45 in 4_5, and digits of other alphabets.
    for word in ("nan", "inf", "1e39", "-1e20", "1_0x", "4_5", "\u0664", "", "."):
        (tmp_path / "a.csv").write_text(f"text,label\na,1e15\na,{word}\n")
        with pytest.raises(DataError, match=r"a.csv:3: label .* is not a number from -1e\+16 to 1e\+16"):
            read_rows(tmp_path / "a.csv", SCORE)


def test_a_truth_value_is_the_class_of_its_json_word(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": true}\n{"text": "b", "label": false}\n')
    task = SCORE._replace(kind=CLASSIFICATION, labels=("false", "true"))
    assert read_rows(tmp_path / "a.jsonl", task).labels == [1, 0]
    assert words_of_labels(tmp_path / "a.jsonl", task) == ["false", "true"]
    with pytest.raises(DataError, match="a.jsonl:1: label 'true' is not a number"):
        read_rows(tmp_path / "a.jsonl", SCORE)
    with pytest.raises(DataError, match="a.jsonl:1: 'label' is a true/false, not a string"):
        read_rows(tmp_path / "a.jsonl", task._replace(text=("label",), label="text"))


FAULTS = {
    "a.csv": [
        ("title,body,stars\na,b,fair\n", ":2: label 'fair' is not one of bad, good"),
        ("title,body,stars,body\na,b,good,c\n", ":1: more than one column 'body'"),
        (
            "title,stars\na,good\n",
            ":1: no column 'body' in the header (its columns: title, stars; name the columns of your task by --text and --label)",
        ),
        (
            "title;body;stars\na;b;good\n",
            ":1: no column 'title' in the header (its columns: title;body;stars; they are to be separated by commas, in a .tsv by tabs)",
        ),
        (
            "\0t\0i\n",
            ":1: no column 'title' in the header (its columns: not to be read; it is binary, or in UTF-16; convert it to UTF-8)",
        ),
        ("title,body,stars\na,b,good\na,b\n", ":3: 2 fields where the header has 3"),
        ('title,body,stars\n"a,b,good\n', ":2: the file ends within a quoted field"),
        ("title,body,stars\na\0,b,good\n", ":2: the text has NUL bytes"),
        ("title,body,stars\n", "no example in there"),
        ("", "no example in there; the file is empty"),
    ],
    "a.jsonl": [
        (
            '{"title": "a", "body": "b"}',
            ":1: no 'stars' in the object; mend the line, or name another field by --text or --label",
        ),
        ('{"title": "a", "body": 3, "stars": "bad"}', ":1: 'body' is a number, not a string"),
        ('{"title": "a", "body": "b", "stars": true}', ":1: label 'true' is not one of bad, good"),
        ('{"title": "a", "body": "b", "stars": null}', ":1: 'stars' is a null, not a string"),
        ('{"title": "a", "title": "c", "body": "b", "stars": "bad"}', ":1: the key 'title' stands twice"),
        ('{"title": "\\ud800", "body": "b", "stars": "bad"}', ":1: 'title' has half a surrogate pair"),
        ('\n["a"]', ":2: a JSON list where an object is wanted"),
        ('{"title": "a"', ":1: the line ends before its JSON object does"),
        ("[" * 100_000, ":1: not a JSON object that can be read"),
        ("\n \n", "no example in there"),
        ("", "no example in there; the file is empty"),
    ],
    "a.tsv": [
        ("title\tbody\tstars\tstars\n", ":1: more than one column 'stars'"),
        ("title\tbody\tstars\na\n", ":2: 1 column where 3 are wanted"),
        ("", "no example in there; the file is empty"),
    ],
}


@pytest.mark.parametrize(
    ("name", "content", "reason"), [(name, *fault) for name, faults in FAULTS.items() for fault in faults]
)
def test_a_fault_is_named_with_its_file_and_line(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content.encode())
    with pytest.raises(DataError) as error:
        read_rows(tmp_path / name, PAIR)
    assert str(error.value).startswith(str(tmp_path / name)) and reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.csv", "title,body,stars\na,b,good\na,b,\n", ":3: the label is blank; mend the line"),
        ("a.tsv", "title\tbody\tstars\na\tb\t \n", ":2: the label is blank; mend the line"),
        ("a.csv", 'title,body,stars\na,b,"very\ngood"\n', ":2: the label 'very\\ngood' holds a tab or a line break"),
        (
            "a.jsonl",
            '{"title": "a", "body": "b", "stars": "x\\ty"}',
            ":1: the label 'x\\ty' holds a tab or a line break",
        ),
    ],
)
def test_a_word_that_is_no_name_of_a_class_is_named_with_its_line(tmp_path, name, content, reason):
    """A blank one is a field that was forgotten; the others would break the file of predictions."""
    (tmp_path / name).write_bytes(content.encode())
    with pytest.raises(DataError) as error:
        words_of_labels(tmp_path / name, PAIR)
    assert str(error.value).startswith(f"{tmp_path / name}{reason}")


@pytest.mark.parametrize("content", ["title\tbody\tstars\n", ""])
def test_a_file_without_an_example_has_no_classes(tmp_path, content):
    (tmp_path / "a.tsv").write_text(content)
    with pytest.raises(DataError, match="a.tsv: no example in there"):
        words_of_labels(tmp_path / "a.tsv", PAIR)


def test_nul_bytes_are_named(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"title\tbody\tstars\na\tb\tgood\na\tb\0c\tgood\n")
    with pytest.raises(DataError, match="a.tsv:3: the text has NUL bytes"):
        words_of_labels(tmp_path / "a.tsv", PAIR)


def test_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"title,body,stars\ncaf\xe9,b,good\n")
    with pytest.raises(DataError, match="a.csv:2: the text is not UTF-8"):
        read_rows(tmp_path / "a.csv", PAIR)


@pytest.mark.parametrize("name", ["pipe.csv", "pipe.jsonl", "pipe.tsv", "folder.csv", "nothing.jsonl"])
def test_a_pipe_and_a_folder_are_not_waited_for(tmp_path, name):
    if name.startswith("pipe"):
        os.mkfifo(tmp_path / name)
    if name.startswith("folder"):
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(tmp_path / name, PAIR)
