"""Sixteen kinds of jsonl fault. The reference is the same file without the fault."""

import json

import pytest

from dataset.reading.documents import BadLines, DataError, read_documents
from tests.faults.harness import Lab

GOOD = [b'{"text": "one"}', b'{"text": "two"}', b'{"text": "three"}']


def lines(middle, end=b"\n"):
    """A file whose second line is `middle`, before two and after one good line."""
    return b"\n".join([GOOD[0], middle, *GOOD[1:]]) + end


LONG = json.dumps({"text": "x" * 10_000_000}).encode()

HARMLESS = {
    "blank line": (lines(b""), []),
    "BOM": (b"\xef\xbb\xbf" + lines(b""), []),
    "CRLF": (lines(b"").replace(b"\n", b"\r\n"), []),
    "no final newline": (lines(b"", end=b""), []),
    "empty text": (lines(b'{"text": ""}'), []),
    "10 MB line": (lines(LONG), ["x" * 10_000_000]),
}
FAULTS = {
    "bad UTF-8": lines(b'{"text": "\xff"}'),
    "NUL": lines(b'{"text": "a\0b"}'),
    "lone surrogate": lines(b'{"text": "\\ud800"}'),
    "not an object": lines(b'["text"]'),
    "text missing": lines(b'{"txt": "a"}'),
    "null": lines(b'{"text": null}'),
    "a number": lines(b'{"text": 5}'),
    "two objects on a line": lines(b'{"text": "a"} {"text": "b"}'),
    "raw control character": lines(b'{"text": "a\x01b"}'),
    "cut last line": b"\n".join([*GOOD, b'{"text": "cut of']),
}
assert len(HARMLESS) + len(FAULTS) == 16


@pytest.mark.parametrize("kind", HARMLESS)
def test_harmless_kinds_load_identically(tmp_path, kind):
    data, more = HARMLESS[kind]
    (tmp_path / "data.jsonl").write_bytes(data)
    texts = [text for _, text in read_documents(tmp_path / "data.jsonl")]
    assert texts == ["one", *more, "two", "three"]


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_name_file_and_line(tmp_path, kind):
    path = tmp_path / "data.jsonl"
    path.write_bytes(FAULTS[kind])
    line = 4 if kind == "cut last line" else 2
    with pytest.raises(DataError, match=f"data.jsonl:{line}: ") as error:
        list(read_documents(path))
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    bad = BadLines()
    assert [text for _, text in read_documents(path, bad_lines=bad)] == ["one", "two", "three"]
    assert bad.total == 1 and len(bad.counts) == 1


def test_faulty_lines_in_the_trainer(server, tokenizer, tmp_path):
    """All kinds in one file: exit code 2 with file:line; with --skip_bad_lines the exact counts, and the clean file's losses."""
    good = [json.dumps({"text": f"document {i} of some words"}).encode() for i in range(40)]
    bad = [fault.split(b"\n")[-1 if kind == "cut last line" else 1] for kind, fault in FAULTS.items()]
    mixed = [line for i, line in enumerate(good) for line in (line, *bad[i : i + 1])]
    (tmp_path / "mixed.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n\n".join([*mixed, bad[0], bad[-1]]))
    (tmp_path / "clean.jsonl").write_bytes(b"\n".join(good) + b"\n")
    lab = Lab(tmp_path, server, tokenizer, tmp_path / "mixed.jsonl", epochs=1)
    process = lab.run("run", expect=2)
    assert process.err.count("\n") == 1 and "mixed.jsonl:3: " in process.err
    process = lab.run("run", skip_bad_lines=1)
    assert f"skipped {len(bad) + 2} bad lines" in process.out
    assert (
        "  bad UTF-8: 2\n" in process.out
        and "  cut line: 2\n" in process.out
        and "  lone surrogate: 1\n" in process.out
    )
    lab.run("clean", data_path=tmp_path / "clean.jsonl")
    assert lab.metrics("run") == lab.metrics("clean")
