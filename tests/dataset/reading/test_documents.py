"""Documents out of files. References: the texts that were written, and Python's own json, gzip and pyarrow."""

import re
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import DataError
from dataset.reading import documents, faults
from dataset.reading.bad_lines import BadLines
from dataset.reading.documents import BLOCK_BYTES, read_documents, split_into_blocks
from dataset.reading.settings import PARAGRAPHS

BOM = b"\xef\xbb\xbf"
# {line: its text}. What cannot change a document changes nothing: a mark, as in joined files, or a CR.
GOOD = {
    b'{"text": "one"}': "one",
    BOM + '{"text": "zwei ä 二"}\r'.encode(): "zwei ä 二",
    b' {"text": "three \\u4e09\\n"}\t': "three 三\n",
}
LINES = st.lists(st.sampled_from([*GOOD, b"", b" \t", b"\r", BOM, b'{"text": ""}', b"not JSON"]), max_size=30)


@given(
    lines=LINES,
    runs=st.integers(0, 2_000),
    step=st.sampled_from([1, 7, 40, 1000, BLOCK_BYTES]),
    last=st.sampled_from([b"", b"\n"]),
)
@settings(max_examples=100, deadline=None)
def test_lines_keep_their_numbers_whatever_blank_lines_stand_between(tmp_path_factory, lines, runs, step, last):
    """Wherever a block ends. Reference: bytes.split."""
    middle = len(lines) // 2
    raw = b"\n".join([*lines[:middle], b"\n" * runs, *lines[middle:]]) + last
    file = tmp_path_factory.mktemp("lines") / "a.jsonl"
    file.write_bytes(raw)
    expected = [(number, GOOD[line]) for number, line in enumerate(raw.split(b"\n"), start=1) if line in GOOD]
    bad = BadLines()
    assert list(read_documents(file, bad_lines=bad)) == expected
    assert bad.total == lines.count(b"not JSON")
    found = []
    for block in split_into_blocks(file, "text", step):
        found += list(block.documents("text"))
    assert [pair for pair in found if isinstance(pair[1], str)] == expected
    assert len(found) == len(expected) + bad.total


PARTS = st.lists(st.sampled_from(["a", "b\nc", "\n", "\r\n", " ", "<|end", "<|end|>", "\n\n", "三"]), max_size=30)
VALUES = ["lines", "blank", PARAGRAPHS, "<|end|>"]


@given(parts=PARTS, chunk=st.sampled_from([1, 5, 1 << 18]), value=st.sampled_from(VALUES))
@settings(max_examples=150, deadline=None)
def test_a_text_file_is_split_as_its_whole_text_is(tmp_path_factory, parts, chunk, value):
    """Reference: str.split and re.split of all of it. The lines that are told hold the first words. Paragraphs keep line ends."""
    file = tmp_path_factory.mktemp("split") / "a.txt"
    file.write_text("".join(parts), newline="", encoding="utf-8")
    text = "".join(parts).replace("\r\n", "\n")
    is_blank = value in ("blank", PARAGRAPHS)
    pieces = re.split(r"\n\s*\n", text) if is_blank else text.split("\n" if value == "lines" else value)
    with mock.patch.object(documents, "CHUNK_BYTES", chunk):
        found = list(read_documents(file, document_end=value))
    assert [piece.strip() for _, piece in found] == [piece.strip() for piece in pieces if piece.strip()]
    if value == PARAGRAPHS:
        assert [piece for _, piece in found] == re.findall(r"(?m)(?:^.*\S.*(?:\n|\Z))+", text)
    for number, piece in found:
        assert value == PARAGRAPHS or piece.strip("\n") == piece
        assert piece.lstrip().split("\n")[0] in "\n".join(text.split("\n")[number - 1 :])
    assert found == [] or found[-1][0] <= text.count("\n") + 1


def test_split_texts_may_be_longer_than_one_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "MAX_DOCUMENT_BYTES", 1000)
    (tmp_path / "a.txt").write_text("a story\n<|end|>\n" * 500 + "x" * 999)
    for value in ("lines", "<|end|>"):
        assert list(read_documents(tmp_path / "a.txt", document_end=value))[-1] == (1001, "x" * 999)
    with pytest.raises(DataError, match="a.txt:1: the text file, read whole without --split_text, is longer than"):
        list(read_documents(tmp_path / "a.txt"))
    monkeypatch.setattr(documents, "CHUNK_BYTES", 10)
    (tmp_path / "a.txt").write_text("a story\n<|end|>\n" * 500 + "x" * 1100 + "<|end|>")
    with pytest.raises(DataError, match="a.txt:1001: the part of the text is longer than"):
        list(read_documents(tmp_path / "a.txt", document_end="<|end|>"))
