"""Every kind of data file, and its documents. References: csv, json and pyarrow, which hold a file whole, and the texts written."""

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import re
import shlex
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import DataError
from dataset.reading import documents, encodings, faults, json_files
from dataset.reading.bad_lines import BadLines
from dataset.reading.documents import BLOCK_BYTES, read_documents, split_into_blocks
from dataset.reading.settings import PARAGRAPHS
from tests.helpers import command_line, write_records

TEXTS = ["one", "zwei ä 二\nund drei", 'a "quoted", text', "😀 " * 30, " \t "]


COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
COMPRESS[".zst"] = lambda data: pytest.importorskip("zstandard").ZstdCompressor().compress(data)
CHINESE = "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u516c\u56ed\u3002"
# {encoding: a text}
ENCODED = {
    "gb18030": CHINESE,
    "big5hkscs": "昨天下雨，我們留在家裡看書，喝了一杯熱茶。",
    **dict.fromkeys(("cp932", "euc_jp"), "昨日は雨が降っていたので、家で本を読みました。"),
    "cp949": "어제는 비가 와서 집에서 책을 읽고 따뜻한 차를 마셨습니다.",
    **dict.fromkeys(("cp1251", "koi8_r", "cp866"), "Вчера шёл дождь, поэтому мы остались дома и читали."),
    "cp1253": "Χθες έβρεχε και μείναμε στο σπίτι, διαβάσαμε βιβλία και ήπιαμε τσάι.",
}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
RECORDS = st.lists(st.fixed_dictionaries({"more": JSON_VALUES, "text": st.text(), "also": JSON_VALUES}), max_size=6)
FIELDS = st.text(st.sampled_from('ab ,"\n\r\tä二'), max_size=12)
STEPS = st.sampled_from([1, 7, 40, 1000, BLOCK_BYTES])
TEXT_TYPES = ["string", "large_binary", "string_view", "dictionary"]
PARTS = st.lists(st.sampled_from(["a", "b\nc", "\n", "\r\n", " ", "<|end", "<|end|>", "三", "\n#"]), max_size=30)
VALUES = ["lines", "blank", PARAGRAPHS, "<|end|>", "\n#", "\n#\n"]
BOM = b"\xef\xbb\xbf"
# {line: its text}. What cannot change a document changes nothing: a mark, as in joined files, or a CR.
TEXT_OF_LINE = {
    b'{"text": "one"}': "one",
    BOM + '{"text": "zwei ä 二"}\r'.encode(): "zwei ä 二",
    b' {"text": "three \\u4e09\\n"}\t': "three 三\n",
}
LINES = st.lists(st.sampled_from([*TEXT_OF_LINE, b"", b" \t", b"\r", BOM, b'{"text": ""}', b"not JSON"]), max_size=30)


def as_csv(texts, delimiter=",", **options):
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, delimiter=delimiter, **options)
    writer.writerow(["id", "text", "more"])
    for i, text in enumerate(texts):
        writer.writerow([i, text, "x"])
    return buffer.getvalue().encode()


CONTENT = {
    ".jsonl": "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode(),
    ".json": json.dumps([{"id": 1, "text": text, "more": {"text": [1, "]"]}} for text in TEXTS], indent=1).encode(),
    ".csv": as_csv(TEXTS),
    ".tsv": as_csv(TEXTS, delimiter="\t"),
}


def texts_of(path, **options):
    return [text for _, text in read_documents(path, **options)]


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("suffix", CONTENT)
def test_each_format_and_compression_gives_the_texts_in_order(tmp_path, suffix, compression):
    file = tmp_path / f"a{suffix}{compression}"
    file.write_bytes(COMPRESS[compression](CONTENT[suffix]))
    assert texts_of(file) == TEXTS
    in_small_blocks = [text for block in split_into_blocks(file, "text", 50) for _, text in block.documents("text")]
    assert in_small_blocks == TEXTS
    # The first bytes tell the compression, whatever the name says.
    other = tmp_path / f"a{suffix}.gz"
    other.write_bytes(file.read_bytes())
    if compression:
        assert texts_of(other) == TEXTS
    else:
        with pytest.raises(DataError, match="does not start like a .gz file; fetch it again, or take"):
            texts_of(other)


@pytest.mark.parametrize("compression", [".bz2", ".xz", ".gz", ".zst"])
def test_archives_of_several_members_are_one_file_and_cut_ones_are_told(tmp_path, compression):
    lines = [json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(3000)]
    packed = COMPRESS[compression](b"".join(lines[:700])) + COMPRESS[compression](b"".join(lines[700:]))
    file = tmp_path / f"a.jsonl{compression}"
    file.write_bytes(packed)
    assert list(read_documents(file)) == [(i + 1, f"document {i}") for i in range(3000)]
    for damaged in (packed[:-3], packed[: len(packed) // 2], b"no archive"):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match="damaged"):
            list(read_documents(file))
    (tmp_path / "a.txt").write_text("BZh91 went home.\n")
    assert texts_of(tmp_path / "a.txt") == ["BZh91 went home.\n"]


def content_in(suffix, encoding, line_end="\n", text=CHINESE):
    lines = {".jsonl": [f'{{"text": "{text}"}}'], ".txt": [text]}.get(suffix, ["text", f'"{text}"'])
    return "".join(line + line_end for line in lines).encode(encoding)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".txt"])
@pytest.mark.parametrize("encoding", ENCODED)
def test_text_that_is_not_utf_8_is_told_with_all_its_readings_and_converted(tmp_path, encoding, suffix):
    """Reference: bytes.decode. The command for the first, the right one here, is run as it stands in the line."""
    text = ENCODED[encoding]
    file = tmp_path / f"it's a{suffix}"
    file.write_bytes(content_in(suffix, encoding, "\r\n", text))
    with pytest.raises(DataError, match="not UTF-8: byte 0x.*; it reads as ") as caught:
        texts_of(file)
    readings, command = str(caught.value).split("it reads as ")[1].split("; convert the file from the right one, as by")
    assert text[:12] in readings.partition(" in ")[0]
    for name in encodings.MULTI_BYTE:
        with contextlib.suppress(UnicodeDecodeError):
            assert repr(text.encode(encoding).decode(name)[:8])[1:-1] in readings and f"{name} (" in readings
    if suffix == ".txt" or encoding == "gb18030":
        words = shlex.split(command.removeprefix(":"))
        command_line(words[2:], cwd=tmp_path, script=words[1])
        assert (tmp_path / f"converted{suffix}").read_bytes() == content_in(suffix, "utf-8", "\r\n", text)


def test_a_sample_is_of_three_parts_and_a_damaged_line_is_no_encoding(tmp_path, monkeypatch):
    """One line of a Latin-1 file is beyond ASCII (two may be characters of GBK); in the other file one line of UTF-8 is damaged;
    a header in Big5 is told too."""
    monkeypatch.setattr(encodings, "PART_BYTES", 100)
    file, plain = tmp_path / "a.txt", b"plain words\n"
    for before, line, after in ((0, "\xe0 la mer", 999), (500, "Pe\xf1a", 499), (999, "\xc7a va", 0)):
        file.write_bytes(plain * before + f"{line}\n".encode("latin-1") + plain * after)
        with pytest.raises(DataError, match=f"reads as '{line}' in cp1252 or latin_1"):
            texts_of(file)
    file.write_bytes(f"{CHINESE}\n".encode() * 20 + b"\xff\xfe\xe9\n")
    with pytest.raises(DataError, match="not UTF-8: byte 0xff in its line 21; fix the line, or pass --skip_bad_lines"):
        texts_of(file)
    (tmp_path / "a.csv").write_bytes("\u5167\u5bb9,\u4f5c\u8005\n".encode("big5"))
    with pytest.raises(DataError, match="not UTF-8; it reads as .*'\u5167\u5bb9,\u4f5c\u8005' in big5hkscs"):
        texts_of(tmp_path / "a.csv")


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".csv.gz"])
def test_text_in_utf_16_is_told_as_such(tmp_path, suffix, line_end):
    file = tmp_path / f"a{suffix}"
    # The line ends of a first English line tell the encoding where there is no mark.
    marked = content_in("." + suffix.split(".")[1], "utf-16", line_end)
    for content in (marked, f"id,text{line_end}".encode("utf-16-be")):
        file.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
        with pytest.raises(DataError, match=f"{file.name}: the text is in .*='utf-16(-be)?'"):
            texts_of(file)


@pytest.mark.parametrize("suffix", [".txt", ".md", ".csv", ".jsonl", ".txt.gz"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"%PDF-1.7\n%\xe2\xe3", "a PDF.*pdftotext"),
        (b"PK\x03\x04\x14\0\x06\0[Content_Types].xml", "a zip file.*Word, Excel and EPUB.*save its text as .txt"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(50), "a file of Word or Excel"),
        (rb"{\rtf1\ansi hello}", "a file of Word or Excel"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of git LFS"),
    ],
)
def test_documents_of_office_programs_are_told_by_their_first_bytes(tmp_path, suffix, content, words):
    """References: the file signatures of the formats."""
    file = tmp_path / f"a{suffix}"
    file.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    with pytest.raises(DataError, match=f"{file.name}: {words}"):
        list(read_documents(file, bad_lines=BadLines()))


def test_json_may_be_one_object_or_objects_one_after_the_other(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('\ufeff{"text":\n"one"}')
    assert list(read_documents(file)) == [(1, "one")]
    for two in ('{"text": "one"}\n\n{"text": "two"}\n', '[{"text": "one"}\n\n{"text": "two"},]'):
        file.write_text(two)
        assert list(read_documents(file)) == [(1, "one"), (3, "two")]
    for nothing in ("", "\n \n", "[]", " [ ] "):
        file.write_text(nothing)
        assert list(read_documents(file)) == []
    for other, reason in (
        ('{"data": [{"text": "one"}]}', "its keys: 'data'; --text_field names another one"),
        ('{"data": [{"role": "user"}]}', "its keys: 'data'; these are conversations, which train_sft.py reads"),
        ('{"text": {}}', "'text' is an object, not a string"),
    ):
        file.write_text(other)
        with pytest.raises(DataError, match=reason):
            list(read_documents(file))


GOOD = [b'{"text": "one"}', b'{"text": "two"}', b'{"text": "three"}']
# A line between them, with an empty one before it: (content, kind of fault)
FAULTY_LINES = [
    (b'{"text": "thr', "cut line"),
    ('{"text": "三'.encode()[:-1], "cut line"),
    (b'{"text": "\xff\xfe"}', "not UTF-8"),
    (b'{"text": "a\0b"}', "NUL byte"),
    (b'{"text": "a\\ud83d"}', "lone surrogate"),
    (b'["text"]', "not an object"),
    (b'{"content": "x"}', "no text"),
    (b'{"text": null}', "text is null"),
    (b'{"text": 3}', "text is not a string"),
    (b'{"text": "a"} {"text": "b"}', "two values on a line"),
    (b'{"text": "a\tb"}', "raw control character"),
    (b"text: a", "not JSON"),
    (b"[" * 100_000, "not JSON"),
]

# (content, {line: kind of fault}, texts)
FAULTY = {
    ".jsonl": [
        (b"\n".join([GOOD[0], b"", line, *GOOD[1:]]), {3: kind}, ["one", "two", "three"]) for line, kind in FAULTY_LINES
    ],
    ".json": [
        ('[{"text": "a"},\n{"text": 3}, {"text": "b"}]', {2: "text is not a string"}, ["a", "b"]),
        ('[{"text": "a"},\n7, {"text": "b"}]', {2: "not an object"}, ["a", "b"]),
        ('["a\\n[",\n"b]", 7, {"text": "c"}, "cut', {2: "cut line"}, ["a\n[", "b]", "c"]),
        ('[{"text": "a"},\n"b"]', {2: "not an object"}, ["a"]),
        ('[{"text": "a"},\n{"text": "b", oops}, {"text": "c"}]', {2: "not JSON"}, ["a", "c"]),
        ('[{"text": "a"},\n', {2: "cut line"}, ["a"]), ('[{"text": "a"},\n{"text": "b', {2: "cut line"}, ["a"]),
        ('[{"text": "a"}]\n]', {2: "not JSON"}, ["a"]),
        ('[{"text": "a"}, {"title": 1,\n"body": 2}]', {1: "no text"}, ["a"]),
        ('[{"text": "a"},\n' + "[" * 100_000 + "]" * 100_000 + "]", {2: "not JSON"}, ["a"]),
    ],
    ".csv": [
        ('\ufeffid,text\r\n1,one\r\n\r\n2,"two\n\nlines"\n3,too,many\n', {7: "wrong number of fields"}, ["one", "two\n\nlines"]),
        ('id,text\n4\n5,"\udcff"\n6,six\n', {2: "wrong number of fields", 3: "not UTF-8"}, ["six"]),
        ('id,text\n6,six\n7,"cut off\n\n', {3: "cut line"}, ["six"]),
        ('id,text\n1,"a "b" c"\n9,plain\n', {2: "not CSV"}, ["plain"]),
    ],
    ".tsv": [
        ('id\ttext\n1\t"Yes" he said.\n9\tplain\n', {2: "not CSV"}, ["plain"]),
        ('id\ttext\n1\t"open\n2\tend" of it\n9\tplain\n', {2: "not CSV"}, ["plain"]),
    ],
}  # fmt: skip


FAULTY_FILES = [(suffix, *rest) for suffix, cases in FAULTY.items() for rest in cases]


@pytest.mark.parametrize("suffix, content, faults, texts", FAULTY_FILES, ids=lambda value: str(value)[:30])
def test_faults_name_file_and_line_or_are_counted(tmp_path, suffix, content, faults, texts):
    file = tmp_path / f"a{suffix}"
    file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape"))
    line = next(iter(faults))
    with pytest.raises(DataError) as caught:
        list(read_documents(file))
    assert str(caught.value).startswith(f"{file}:{line}: ") and "\n" not in str(caught.value)
    bad = BadLines()
    assert texts_of(file, bad_lines=bad) == texts
    assert faults.items() <= {(fault.line, fault.kind) for first in bad.places.values() for fault in first}


@given(records=RECORDS, indent=st.sampled_from([None, 0, 2]), ascii=st.booleans(), chunk=st.integers(1, 40))
@example(records=[{"text": '\\"\\'}], indent=None, ascii=True, chunk=1)
@settings(max_examples=60, deadline=None)
def test_any_json_array_gives_what_the_json_module_gives(tmp_path_factory, records, indent, ascii, chunk):
    """Wherever the chunks end, in the middle of escapes and characters too."""
    content = json.dumps(records, indent=indent, ensure_ascii=ascii)
    file = tmp_path_factory.mktemp("json") / "a.json"
    file.write_bytes(content.encode("utf-8", "surrogatepass"))
    with mock.patch.object(json_files, "CHUNK_BYTES", chunk):
        found = texts_of(file)
    assert found == [record["text"] for record in json.loads(content) if record["text"]]


def test_a_table_of_another_make_says_what_it_wants(tmp_path):
    for content, advice in (
        (b"text;label\na;1\n", "separate columns by commas"),
        (b"id\ttext\n1\ta\n", "in a .tsv by tabs .or rename the file"),
        ("文本,id\na,1\n".encode("utf-16-le"), "convert it to UTF-8"),
    ):
        (tmp_path / "a.csv").write_bytes(content)
        with pytest.raises(DataError, match=advice):
            list(read_documents(tmp_path / "a.csv"))


def test_columns_of_a_table_without_a_header_have_numbers(tmp_path):
    """Unless a header has that number as a name; a header that is there is neither lost nor trained."""
    file = tmp_path / "a.csv"
    for content, number, wanted in (
        ('1,"Good, and cheap"\n2,Bad\n', "2", ["Good, and cheap", "Bad"]),
        ("0,1\na,b\n", "1", ["b"]),
        ("1,a\n", "3", r"no column '3' \(its columns: 1, 2;"),
        ("1,a\n", "0", "no column '0'"),
        ("id,Review Text\n1,a\n", "2", "a.csv:1: looks like a header.* name the column .'Review Text'"),
    ):
        file.write_text(content)
        with pytest.raises(DataError, match=wanted) if isinstance(wanted, str) else contextlib.nullcontext():
            assert texts_of(file, text_field=number) == wanted


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "file", "stream"])
def test_a_field_within_objects_is_named_with_the_way_to_it(tmp_path, kind):
    """References: the texts written, and null for a struct that is null. A name with a dot is one too."""
    objects = [*({"a": {"b": {"c": text}, "d": 1}, "x.y": "z"} for text in ("one", None, "", "two")), {"a": None}]
    file = tmp_path / f"a.{kind.replace('file', 'arrow').replace('stream', 'arrow')}"
    if kind == "jsonl":
        write_records(file, objects)
    else:
        write_arrow(file, pytest.importorskip("pyarrow").Table.from_pylist(objects), kind)
    bad = BadLines()
    assert list(read_documents(file, "a.b.c", bad)) == [(1, "one"), (4, "two")]
    assert bad.total == 2 and next(read_documents(file, "x.y")) == (1, "z")
    for field, reason in (("a.b.e", "no (column )?'a.b.e' .*--text_"), ("a.b", "'a.b' is (an object|of type)")):
        with pytest.raises(DataError, match=reason):
            list(read_documents(file, field))


def test_a_blank_line_of_a_table_is_no_row(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"id,text\n1,a\n   \n2,b\n")
    assert list(read_documents(tmp_path / "a.csv")) == [(2, "a"), (4, "b")]
    # In a table of one column white space is a document.
    (tmp_path / "a.csv").write_bytes(b"text\n\n \na\n")
    assert list(read_documents(tmp_path / "a.csv")) == [(3, " "), (4, "a")]


@given(
    rows=st.lists(st.tuples(FIELDS, FIELDS), max_size=8),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    before=st.sampled_from(["", "\ufeff", "\ufeff\r\n"]),
)
@settings(max_examples=90, deadline=None)
def test_any_csv_file_gives_what_the_csv_module_gives(tmp_path_factory, rows, quoting, before):
    """A mark before the header, as PowerShell's Export-Csv writes it, changes nothing; the reference reads without it."""
    content = io.StringIO(newline="")
    writer = csv.writer(content, quoting=quoting)
    writer.writerow(["id, or number", "text"])
    writer.writerows(rows)
    file = tmp_path_factory.mktemp("csv") / "a.csv"
    file.write_bytes((before + content.getvalue()).encode())
    content.seek(0)
    assert texts_of(file) == [row["text"] for row in csv.DictReader(content) if row["text"]]


def write_arrow(path, table, kind):
    arrow = pytest.importorskip("pyarrow")
    if kind == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
        return
    new = arrow.ipc.new_stream if kind == "stream" else arrow.ipc.new_file
    with open(path, "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("type_name", TEXT_TYPES)
@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_columns_of_arrow_and_parquet_give_what_pyarrow_gives(tmp_path, kind, type_name):
    """Binary columns are decoded as UTF-8; a fault names its row. Hugging Face datasets saves streams."""
    arrow = pytest.importorskip("pyarrow")
    if type_name == "dictionary":
        type_of_column = arrow.dictionary(arrow.int32(), arrow.string())
    elif hasattr(arrow, type_name):
        type_of_column = getattr(arrow, type_name)()
    else:
        pytest.skip(f"this pyarrow has no {type_name}")
    column = arrow.array(["one", "zwei ä 二", "", None, "one", "drei"]).cast(type_of_column)
    file = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
    write_arrow(file, arrow.table({"id": list(range(6)), "body": column}), kind)
    bad = BadLines()
    assert list(read_documents(file, "body", bad)) == [(1, "one"), (2, "zwei ä 二"), (5, "one"), (6, "drei")]
    assert bad.counts == {"text is null": 1}
    with pytest.raises(DataError, match=rf"{file.name}:4: 'body' is a null"):
        list(read_documents(file, "body"))
    with pytest.raises(DataError, match=r"no column 'text' \(its columns: id, body"):
        list(read_documents(file))
    with pytest.raises(DataError, match=r"column 'id' is of type int64, not text"):
        list(read_documents(file, "id"))
    write_arrow(file, arrow.table({"messages": [[{"role": "user", "content": "Hi"}]]}), kind)
    with pytest.raises(DataError, match="no column 'text' .*: messages; these are conversations, which train_sft.py"):
        list(read_documents(file))


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_compressed_files_in_an_arrow_file_are_no_long_text(tmp_path, kind):
    arrow = pytest.importorskip("pyarrow")
    blobs = [bytes(i) + b"\1\2\3\4\5\6\7\x70\x28\xb5\x2f\xfd" for i in range(16)]
    texts = [str(i) for i in range(16)]
    write_arrow(tmp_path / "a.arrow", arrow.table({"text": texts, "blob": blobs}), kind)
    assert [text for _, text in read_documents(tmp_path / "a.arrow")] == texts


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_damaged_arrow_and_parquet_end_in_one_line(tmp_path, kind):
    """Each byte of a small file overwritten in turn: other texts or a DataError, and pyarrow never leaves its memory."""
    arrow = pytest.importorskip("pyarrow")
    name = "a.parquet" if kind == "parquet" else "a.arrow"
    write_arrow(tmp_path / name, arrow.table({"text": ["one", "two", "three"]}), kind)
    content = (tmp_path / name).read_bytes()
    damaged_file = tmp_path / f"damaged-{name}"
    damaged = [content[: len(content) // 2], b"", b"no table"]
    for value in (b"\xff", b"\x7f"):
        damaged += [content[:i] + value + content[i + 1 :] for i in range(0, len(content), 5)]
    told = []
    for variant in damaged:
        damaged_file.write_bytes(variant)
        try:
            list(read_documents(damaged_file, bad_lines=BadLines()))
        except DataError as error:
            told.append(str(error))
    assert len(told) > 10 and all(line.startswith(str(damaged_file)) and "\n" not in line for line in told)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_an_arrow_stream_that_is_cut_between_two_messages_is_a_fault_behind_its_last_row(tmp_path, rows):
    """Without its end mark nobody knows whether more rows were to come. Reference: the whole stream."""
    arrow = pytest.importorskip("pyarrow")
    file = tmp_path / "a.arrow"
    texts = [f"row {i}" for i in range(rows)]
    write_arrow(file, arrow.table({"text": arrow.array(texts, arrow.string())}), "stream")
    assert texts_of(file) == texts
    whole = file.read_bytes()
    assert whole.endswith(b"\xff\xff\xff\xff\0\0\0\0")
    file.write_bytes(whole[:-8])
    with pytest.raises(DataError, match=rf"a\.arrow:{rows + 1}: the stream ends without its end mark"):
        list(read_documents(file))
    bad = BadLines()
    assert texts_of(file, bad_lines=bad) == texts
    assert bad.counts == {"cut file": 1}
    # As it was marked before Arrow 0.15.
    file.write_bytes(whole[:-8] + bytes(4))
    assert texts_of(file) == texts


@given(lines=LINES, runs=st.integers(0, 2_000), step=STEPS, last=st.sampled_from([b"", b"\n"]))
@settings(max_examples=100, deadline=None)
def test_lines_keep_their_numbers_whatever_blank_lines_stand_between(tmp_path_factory, lines, runs, step, last):
    """Wherever a block ends. Reference: bytes.split."""
    middle = len(lines) // 2
    raw = b"\n".join([*lines[:middle], b"\n" * runs, *lines[middle:]]) + last
    file = tmp_path_factory.mktemp("lines") / "a.jsonl"
    file.write_bytes(raw)
    expected = [(number, TEXT_OF_LINE[line]) for number, line in enumerate(raw.split(b"\n"), 1) if line in TEXT_OF_LINE]
    bad = BadLines()
    assert list(read_documents(file, bad_lines=bad)) == expected
    assert bad.total == lines.count(b"not JSON")
    found = [pair for block in split_into_blocks(file, "text", step) for pair in block.documents("text")]
    assert [pair for pair in found if isinstance(pair[1], str)] == expected
    assert len(found) == len(expected) + bad.total


@example(parts=["#a", "\n#", "\r\n", "\n#", "b\r", "\n#", "c"], chunk=5, value="\n#")
@example(parts=["#", "\r\n", "a", "\n#", "\n#", "\nb", "\n#"], chunk=1, value="\n#\n")
@given(parts=PARTS, chunk=st.sampled_from([1, 5, 1 << 18]), value=st.sampled_from(VALUES))
@settings(max_examples=150, deadline=None)
def test_a_text_file_is_split_as_its_whole_text_is(tmp_path_factory, parts, chunk, value):
    """Reference: str.split and re.split of all of it. The lines that are told hold the first words. Paragraphs keep line ends."""
    file = tmp_path_factory.mktemp("split") / "a.txt"
    file.write_text("".join(parts), newline="", encoding="utf-8")
    text = "".join(parts).replace("\r\n", "\n")
    # A line begins, and ends, at the ends of a file too; the same line end may be before and behind marks.
    separator = {"lines": "\n", "<|end|>": r"<\|end\|>", "\n#": "\n#", "\n#\n": r"\n#(?=\n)"}.get(value, r"\n\s*\n")
    pieces = re.split(separator, f"\n{text}\n")
    with mock.patch.object(documents, "CHUNK_BYTES", chunk):
        found = list(read_documents(file, document_end=value))
    assert [piece.strip() for _, piece in found] == [piece.strip() for piece in pieces if piece.strip()]
    if value == PARAGRAPHS:
        assert [piece for _, piece in found] == re.findall(r"(?m)(?:^.*\S.*(?:\n|\Z))+", text)
    for number, piece in found:
        assert value == PARAGRAPHS or piece.strip("\n") == piece
        assert piece.lstrip().split("\n")[0] in "\n".join(text.split("\n")[number - 1 :])
    assert found == [] or found[-1][0] <= text.count("\n") + 1


@pytest.mark.timeout(60)
def test_blank_lines_behind_the_last_mark_take_linear_time(tmp_path):
    """A megabyte: each blank line looked at from each other one would be 10^12 steps."""
    (tmp_path / "a.txt").write_text("<|end|>\n#" + " \n" * 500_000 + "x", newline="")
    assert all(list(read_documents(tmp_path / "a.txt", "", None, value))[-1][1].endswith("x") for value in VALUES)


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
