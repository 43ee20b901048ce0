"""Small files that stand for far more than memory holds, and documents beyond what is held: bounded memory, one line.

References: a process that may not take more memory, and the same file without the long document.
"""

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import tracemalloc
import zlib

import pytest

from dataset.lm_dataset import PretrainDataset
from dataset.reading import limits
from dataset.reading.documents import BadLines, DataError, LineCounter, read_documents, split_into_blocks
from scripts.common import read_records
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import ROOT

READ = """
import resource, sys
from dataset.reading.documents import read_documents
from common.errors import DataError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]) * 2**20,) * 2)
try:
    print(sum(len(text) for _, text in read_documents(sys.argv[1])))
except DataError as error:
    print("error:", error)
"""
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a limit on memory as Linux has it")


def read_within(file, megabytes, seconds=60):
    """What a process that may take so much more memory than it begins with prints about the file."""
    command = [sys.executable, "-c", READ, str(file), str(megabytes)]
    # Each thread that allocates reserves 64 MB of addresses, which the limit would count as if they were taken.
    variables = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=seconds)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout.strip()


def zstd_of_repeated(piece, times, tail=b""):
    """A frame of the piece, so many times, compressed as a stream."""
    compressor = pytest.importorskip("zstandard").ZstdCompressor().compressobj()
    parts = [compressor.compress(piece) for _ in range(times)]
    return b"".join([*parts, compressor.compress(tail), compressor.flush()])


@needs_linux
def test_hundreds_of_megabytes_of_newlines_in_zstd_takes_little_memory_and_the_text_after_it_comes(tmp_path):
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(zstd_of_repeated(b"\n" * (1 << 20), 600, b'{"text": "end"}\n'))
    assert file.stat().st_size < 100_000
    assert read_within(file, 250) == "3"


OTHERS = [pytest.param(suffix, marks=pytest.mark.slow) for suffix in (".json.gz", ".csv.gz", ".txt.gz")]


@needs_linux
@pytest.mark.parametrize("suffix", [".jsonl.gz", *OTHERS])
def test_a_gzip_file_of_zeros_ends_in_one_line(tmp_path, suffix):
    file = tmp_path / f"a{suffix}"
    member = gzip.compress(bytes(100 << 20))
    file.write_bytes(member * 3)
    said = read_within(file, 900)
    # Within .csv the zeros are the header, of which less is held.
    assert said.startswith(f"error: {file}:1: the ") and " is longer than " in said


@needs_linux
@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".json", ".csv"])
def test_a_plain_file_of_one_line_of_two_gigabytes_ends_in_one_line(tmp_path, suffix):
    file = tmp_path / f"a{suffix}"
    with open(file, "wb") as stream:
        stream.write(b'{"text": "')
        stream.truncate(2 << 30)
    assert read_within(file, 900).startswith(f"error: {file}:1: the ")


@needs_linux
@pytest.mark.slow
def test_a_json_array_of_two_gigabytes_is_read_object_by_object(tmp_path):
    file = tmp_path / "a.json.gz"
    one = json.dumps({"text": "x" * 1_000_000, "more": [1, 2, {"a": "]"}]}).encode()
    with gzip.open(file, "wb", compresslevel=1) as stream:
        stream.write(b"[" + one)
        for _ in range(2000):
            stream.write(b",\n" + one)
        stream.write(b"]")
    assert read_within(file, 200) == str(2001 * 1_000_000)


@needs_linux
def test_many_values_on_a_long_line_do_not_become_gigabytes_of_objects(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a", "more": [' + b"[]," * 12_000_000 + b"[]]}\n")
    assert "a.jsonl:1: more than 4,000,000 JSON values" in read_within(file, 500)


@needs_linux
@pytest.mark.parametrize("kind", ["file", "stream"])
def test_columns_of_an_arrow_file_that_are_not_read_are_not_decompressed(tmp_path, kind):
    """Half a gigabyte of zeros beside the text, in a record batch of some kilobytes."""
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"zeros": [b"\0" * (1 << 28)] * 2, "text": ["a", "b"]})
    path = tmp_path / "a.arrow"
    options = arrow.ipc.IpcWriteOptions(compression="zstd")
    new = arrow.ipc.new_file if kind == "file" else arrow.ipc.new_stream
    with arrow.OSFile(str(path), "wb") as file, new(file, table.schema, options=options) as writer:
        writer.write_table(table)
    assert path.stat().st_size < 1 << 20
    assert read_within(path, 300) == "2"


@needs_linux
def test_many_texts_of_one_dictionary_entry_take_the_memory_of_one(tmp_path):
    """40 GB of text in a parquet file of a few kilobytes."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    entry = arrow.array(["x" * 4_000_000])
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * 1000, arrow.int32()), entry)
    parquet.write_table(arrow.table({"text": column}), file, compression="zstd")
    assert read_within(file, 500) == str(1000 * 4_000_000)


# ------------------------------------------------------------------------- the limit on a document, made small

LIMIT = 1000


@pytest.fixture
def small_limit(monkeypatch):
    monkeypatch.setattr(limits, "MAX_DOCUMENT_BYTES", LIMIT)
    monkeypatch.setattr(limits, "MAX_CSV_ROW_BYTES", LIMIT)


def line_of(size):
    """A jsonl line of so many bytes, newline included."""
    frame = len(json.dumps({"text": ""})) + 1
    return json.dumps({"text": "x" * (size - frame)}).encode() + b"\n"


COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("block_bytes", [7, 100, 999, 1500, None])
@pytest.mark.parametrize("compression", COMPRESS)
def test_a_line_over_the_limit_is_a_fault_of_its_own_wherever_blocks_are_cut(
    tmp_path, small_limit, compression, block_bytes
):
    short = [b'{"text": "one"}\n', b'{"text": "two"}\n', b'{"text": "three"}']
    lines = [short[0], line_of(LIMIT), line_of(LIMIT + 1), b"\n", short[1], line_of(5 * LIMIT), short[2]]
    file = tmp_path / f"a.jsonl{compression}"
    file.write_bytes(COMPRESS[compression](b"".join(lines)))
    counter = LineCounter()
    found = []
    for block in split_into_blocks(file, "text", block_bytes):
        for line, text in block.documents("text"):
            found.append((counter.lines_before(block) + line, text if isinstance(text, str) else text[0]))
    assert [(line, text[:8]) for line, text in found] == [
        (1, "one"),
        (2, "xxxxxxxx"),
        (3, "too long"),
        (5, "two"),
        (6, "too long"),
        (7, "three"),
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".csv", ".txt", ".txt.gz"])
def test_a_long_document_names_file_and_line_and_is_counted_when_skipped(tmp_path, small_limit, suffix):
    long = "x" * (3 * LIMIT)
    records = [json.dumps({"text": text}) for text in ("one", long, "two")]
    long_field = long.replace("xxxx", "xxx\n", 3)
    contents = {
        ".jsonl": "\n".join(records),
        ".json": "[" + ",\n".join(records) + "]",
        ".csv": f'text\n"{long_field}"\none\n"two"\n',
        ".txt": long,
    }
    stem, _, compression = suffix[1:].partition(".")
    content = contents["." + stem].encode()
    file = tmp_path / f"a{suffix}"
    file.write_bytes(gzip.compress(content) if compression else content)
    with pytest.raises(DataError, match=rf"a{suffix}:[12]: the .* is longer than 0 MB; cut its text into several doc"):
        list(read_documents(file))
    bad = BadLines()
    texts = [text for _, text in read_documents(file, bad_lines=bad)]
    assert texts == ([] if stem == "txt" else ["one", "two"])
    assert bad.counts == {"too long": 1}


@pytest.mark.parametrize("block_bytes", [7, 100, 5000, None])
@pytest.mark.parametrize("compression", ["", ".gz"])
def test_a_paragraph_over_the_limit_is_passed_and_the_lines_after_it_keep_their_numbers(
    tmp_path, small_limit, compression, block_bytes
):
    text = "one\ntwo\n\n" + "long line\n" * 700 + " \n" + "three\n" + "\n" * 50 + "four\n"
    file = tmp_path / f"a.txt{compression}"
    file.write_bytes(gzip.compress(text.encode()) if compression else text.encode())
    found = []
    for block in split_into_blocks(file, "text", block_bytes, split_text=True):
        found += [(block.lines_before + line, text) for line, text in block.documents("text")]
    short = [(line, text) for line, text in found if isinstance(text, str) and not text.startswith("long")]
    assert short == [(1, "one\ntwo\n"), (705, "three\n"), (756, "four\n")]
    if block_bytes == 7:
        assert [fault[0] for _, fault in found if isinstance(fault, tuple)] == ["too long"]


def test_a_paragraph_of_short_lines_takes_little_more_than_its_bytes(tmp_path):
    """An object of Python for each line would take twenty times as much."""
    file = tmp_path / "a.txt"
    file.write_bytes(b"a\n" * 300_000 + b"\nend\n")
    tracemalloc.start()
    (block, last) = split_into_blocks(file, "text", 1000, split_text=True)
    (whole,) = [text for _, text in block.documents("text")]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert whole == "a\n" * 300_000 and [text for _, text in last.documents("text")] == ["end\n"]
    assert peak < 8 * len(whole)


def test_blank_lines_are_passed_over_and_counted_in_every_format(tmp_path):
    """Runs longer than any buffer; the reference is the line that was written."""
    blank = b"\n \t\n" * 200_000
    rows = {"a.jsonl": b'{"text": "end"}\n', "a.csv": b"end\n"}
    for name, row in rows.items():
        head = b"text\n" if name == "a.csv" else b""
        (tmp_path / name).write_bytes(head + blank.replace(b" \t", b"") + row)
        assert list(read_documents(tmp_path / name)) == [(400_001 + (name == "a.csv"), "end")]
    (tmp_path / "b.jsonl").write_bytes(blank + rows["a.jsonl"])
    assert list(read_documents(tmp_path / "b.jsonl")) == [(400_001, "end")]


def test_xz_that_claims_much_memory_is_refused(tmp_path):
    """A dictionary of 3 GB in the header of a small file."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 20}]
    content = bytearray(lzma.compress(b'{"text": "a"}\n', filters=filters, check=lzma.CHECK_NONE))
    at = content.index(bytes([0x21, 0x01])) + 2
    content[at] = 39
    header = 12
    size = (content[header] + 1) * 4
    content[header + size - 4 : header + size] = zlib.crc32(content[header : header + size - 4]).to_bytes(4, "little")
    file = tmp_path / "a.jsonl.xz"
    file.write_bytes(content)
    with pytest.raises(DataError, match="a.jsonl.xz: to decompress it takes more than 2 GB of memory"):
        list(read_documents(file))


def test_records_of_an_evaluation_are_bounded_too(tmp_path, small_limit):
    """Deep nesting and a long line end in one line with the place, as in a corpus; an address says how to download."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n' + b"[" * 900 + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:3: "):
        list(read_records(file, {"text": str}))
    file.write_bytes(b'{"text": "a"}\n' + line_of(3 * LIMIT))
    with pytest.raises(ValueError, match=r"a\.jsonl:2: the line is longer than"):
        list(read_records(file, {"text": str}))
    with pytest.raises(ValueError, match="^https://example.org/a.jsonl: it is not on this machine"):
        list(read_records("https://example.org/a.jsonl", {"text": str}))


def test_deep_nesting_in_an_evaluation_is_a_user_error(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a"}\n' + b"[" * 100_000 + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not JSON: not a JSON object that can be read"):
        list(read_records(file, {"text": str}))


def test_pretrain_dataset_refuses_a_line_over_the_limit_and_keeps_nothing_of_blank_lines(tmp_path, small_limit):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n" * 100_000 + b'{"text": "one"}\n' + line_of(3 * LIMIT))
    dataset = PretrainDataset(file, small_tokenizer())
    assert [dataset.text(0), len(dataset)] == ["one", 2]
    with pytest.raises(DataError, match=r"a\.jsonl:100002: the line is longer than"):
        dataset.text(1)
