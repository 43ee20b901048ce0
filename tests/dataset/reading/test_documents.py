"""Documents out of files. References: the texts that were written, and Python's own json, gzip and pyarrow."""

import gzip
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.reading.documents import (
    BLOCK_BYTES,
    BadLines,
    DataError,
    LineCounter,
    find_files,
    parse_line,
    read_documents,
    split_into_blocks,
)

GOOD = [b'{"text": "one"}', '{"text": "zwei ä 二"}'.encode(), b'{"text": "three \\u4e09\\n"}']
TEXTS = ["one", "zwei ä 二", "three 三\n"]

HARMLESS = {
    "blank line": b"\n".join([GOOD[0], b"", b"  \t ", *GOOD[1:], b"", b""]),
    "BOM": b"\xef\xbb\xbf" + b"\n".join(GOOD) + b"\n",
    "BOM inside, from joined files": b"\n".join([GOOD[0], b"\xef\xbb\xbf" + GOOD[1], GOOD[2]]) + b"\n",
    "CRLF": b"\r\n".join(GOOD) + b"\r\n",
    "no final newline": b"\n".join(GOOD),
    "empty text": b"\n".join([*GOOD, b'{"text": ""}']) + b"\n",
}

FAULTS = {
    "cut line": (b'{"text": "thr', "cut line"),
    "cut in a character": ('{"text": "三'.encode()[:-1], "cut line"),
    "bad UTF-8": (b'{"text": "\xff\xfe"}', "bad UTF-8"),
    "raw NUL": (b'{"text": "a\0b"}', "NUL byte"),
    "a page of NULs": (b"\0" * 64, "NUL byte"),
    "lone surrogate": (b'{"text": "a\\ud83d"}', "lone surrogate"),
    "a list": (b'["text"]', "not an object"),
    "a string": (b'"text"', "not an object"),
    "text missing": (b'{"content": "x"}', "no text"),
    "null": (b'{"text": null}', "text is null"),
    "a number": (b'{"text": 3}', "text is not a string"),
    "two objects": (b'{"text": "a"} {"text": "b"}', "two values on a line"),
    "raw control character": (b'{"text": "a\tb"}', "raw control character"),
    "not JSON": (b"text: a", "not JSON"),
    "deep nesting": (b"[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_harmless_kinds_load_identically(tmp_path, kind):
    """What cannot change a document changes nothing."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(HARMLESS[kind])
    bad = BadLines()
    assert [text for _, text in read_documents(file, bad_lines=bad)] == TEXTS
    assert [text for _, text in read_documents(file)] == TEXTS
    assert bad.report() == []


def test_escaped_nul_and_a_10_mb_line(tmp_path):
    texts = ["a\0b", "x" * 10_000_000, "😀"]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert list(read_documents(file)) == list(enumerate(texts, start=1))


@pytest.mark.parametrize("name", FAULTS)
def test_faults_name_file_and_line_or_are_counted(tmp_path, name):
    """The first fault stops with file:line; a collector counts it and the other documents come."""
    line, kind = FAULTS[name]
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join([GOOD[0], b"", line, *GOOD[1:]]))
    with pytest.raises(DataError) as caught:
        list(read_documents(file))
    assert str(caught.value).startswith(f"{file}:3: ") and "\n" not in str(caught.value)
    assert caught.value.kind == kind
    bad = BadLines()
    assert list(read_documents(file, bad_lines=bad)) == [(1, TEXTS[0]), (4, TEXTS[1]), (5, TEXTS[2])]
    assert bad.counts == {kind: 1}


def test_cut_last_line_is_a_fault_of_that_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join(GOOD)[:-3])
    with pytest.raises(DataError, match=r"a\.jsonl:3: the line ends before"):
        list(read_documents(file))


def test_bad_lines_merge_count_and_keep_the_first_places():
    def collector(lines):
        bad = BadLines()
        for line in lines:
            bad.add(_fault(line))
        return bad

    whole = collector(range(1, 11))
    merged = collector(range(1, 3))
    merged.merge(collector(range(1, 9)), lines_before=2)
    assert merged.report() == whole.report() and whole.total == 10
    assert whole.report()[:3] == ["skipped 10 bad lines:", "  not JSON: 10", "    a.jsonl:1: reason"]
    assert len(whole.report()) == 2 + 3
    assert BadLines.from_dict(json.loads(json.dumps(whole.to_dict()))).report() == whole.report()


def _fault(line):
    from dataset.reading.documents import Fault

    return Fault("a.jsonl", line, "not JSON", "reason")


def test_parse_line():
    assert parse_line(GOOD[0], "f:1") == "one"
    assert parse_line(b" \r\n", "f:1") is None
    assert parse_line(b'{"body": "x"}', "f:1", "body") == "x"
    with pytest.raises(DataError, match=r"^f:7: no 'text' in the object \(its keys: 'body'; --text_field"):
        parse_line(b'{"body": "x"}', "f:7")


def test_error_survives_pickling():
    error = pickle.loads(pickle.dumps(_fault(4).error()))
    assert (str(error), error.kind) == (str(_fault(4).error()), "not JSON")


def test_find_files(tmp_path):
    for name in ("b.jsonl", "a.JSONL.gz", "notes.bin", "sub/c.txt", ".token_store/x.txt", "sub/d.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def names(path):
        return [str(file.relative_to(tmp_path)) for file in find_files(str(path))]

    assert names(tmp_path) == ["a.JSONL.gz", "b.jsonl", "sub/c.txt", "sub/d.parquet"]
    assert names(tmp_path / "*" / "*.txt") == ["sub/c.txt"]
    assert names(tmp_path / "**" / "*.parquet") == ["sub/d.parquet"]
    assert names(tmp_path / "b.jsonl") == ["b.jsonl"]
    for missing in ("notes.bin", "unlike.csv", "*.json", "notes*"):
        with pytest.raises(DataError, match=r"; files that are read: \.jsonl, .* \.parquet, \.arrow$"):
            find_files(str(tmp_path / missing))


def test_txt_is_one_document(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert list(read_documents(file)) == [(1, "one\ntwo\n")]
    file.write_bytes(b"one\ntw\xff\n")
    with pytest.raises(DataError, match=r"a\.txt:1: the text is not UTF-8: byte 0xff in its line 2"):
        list(read_documents(file))


def _zstd(data):
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


@pytest.mark.parametrize("suffix, compress", [("gz", gzip.compress), ("zst", _zstd)])
def test_compressed(tmp_path, suffix, compress):
    """Several members or frames count as one file; one that is cut off is an error, not a shorter corpus."""
    texts = [f"document {i} " * (i % 50) + "." for i in range(2000)]
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    packed = compress(b"".join(lines[:700])) + compress(b"".join(lines[700:]))
    file = tmp_path / f"a.jsonl.{suffix}"
    file.write_bytes(packed)
    assert list(read_documents(file)) == list(enumerate(texts, start=1))
    blocks = list(split_into_blocks(file, "text", 10_000))
    assert len(blocks) > 10 and sum(block.source_bytes for block in blocks) == len(packed)
    assert [block.lines_before + line for block in blocks for line, _ in block.documents("text")] == list(
        range(1, 2001)
    )
    for damaged in (packed[:-20], packed[: len(packed) // 2], b"no archive"):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match="damaged"):
            list(read_documents(file))


def test_parquet(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"id": [1, 2, 3, 4], "body": ["one", None, "", "zwei"]}), file)
    bad = BadLines()
    assert list(read_documents(file, "body", bad)) == [(1, "one"), (4, "zwei")]
    assert bad.counts == {"text is null": 1}
    with pytest.raises(DataError, match=r"a\.parquet:2: 'body' is a null"):
        list(read_documents(file, "body"))
    with pytest.raises(DataError, match=r"no column 'text' \(its columns: id, body"):
        list(read_documents(file))
    file.write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match="not a parquet file"):
        list(read_documents(file))


def test_missing_package_is_named(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(DataError, match="pip install zstandard"):
        list(read_documents(tmp_path / "a.jsonl.zst"))


@pytest.mark.parametrize("step", [1, 7, 16, 40, BLOCK_BYTES])
def test_byte_ranges_cover_every_line_once(tmp_path, step):
    """Wherever the cuts fall, the blocks give the lines and numbers of the whole file (reference: read in one)."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join([*GOOD, b"", b"x", *GOOD, b"\r"]))
    counter, found = LineCounter(), []
    for block in split_into_blocks(file, "text", step):
        found += [(counter.lines_before(block) + line, text) for line, text in block.documents("text")]
    bad = BadLines()
    assert [pair for pair in found if isinstance(pair[1], str)] == list(read_documents(file, bad_lines=bad))
    assert [line for line, text in found if not isinstance(text, str)] == [5] and bad.total == 1


def test_a_file_that_gets_shorter_ends_the_count_of_its_lines(tmp_path):
    """Without an end to the count a run would hang."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join(GOOD * 20))
    blocks = list(split_into_blocks(file, "text", 100))
    file.write_bytes(GOOD[0])
    with pytest.raises(DataError, match=r"a\.jsonl: the data changed while it was being read; start again"):
        LineCounter().lines_before(blocks[-1])


LINES = st.lists(st.sampled_from([*GOOD, b"", b" \t", b"\r", b"not JSON"]), max_size=30)


@given(lines=LINES, runs=st.integers(0, 200_000), step=st.integers(1, 300), last=st.sampled_from([b"", b"\n"]))
@settings(max_examples=60, deadline=None)
def test_lines_keep_their_numbers_whatever_blank_lines_stand_between(tmp_path_factory, lines, runs, step, last):
    """Runs of blank lines are passed over by the buffer. Reference: bytes.split."""
    middle = len(lines) // 2
    raw = b"\n".join([*lines[:middle], b"\n" * runs, *lines[middle:]]) + last
    file = tmp_path_factory.mktemp("lines") / "a.jsonl"
    file.write_bytes(raw)
    filled = [(number, line) for number, line in enumerate(raw.split(b"\n"), start=1) if line.strip()]
    expected = [(number, json.loads(line)["text"]) for number, line in filled if line in GOOD]
    bad = BadLines()
    assert list(read_documents(file, bad_lines=bad)) == expected
    assert bad.total == len(filled) - len(expected)
    counter = LineCounter()
    found = []
    for block in split_into_blocks(file, "text", step * 1000):
        found += [(counter.lines_before(block) + line, text) for line, text in block.documents("text")]
    assert [pair for pair in found if isinstance(pair[1], str)] == expected
    assert len(found) == len(filled)
