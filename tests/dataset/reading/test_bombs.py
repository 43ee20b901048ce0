"""Small files of far more than memory holds, and long documents. References: a process with a limit, the file without them."""

import gzip
import json
import lzma
import sys
import zlib

import pytest

from common.errors import DataError
from dataset.reading import documents, faults
from dataset.reading.bad_lines import BadLines
from dataset.reading.conversations import CONVERSATION
from dataset.reading.documents import read_documents, split_into_blocks
from tests.dataset.reading.test_formats import COMPRESS
from tests.helpers import run_program

READ = """
import resource, sys
from dataset.reading.documents import read_documents
from common.errors import DataError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]) * 2**20,) * 2)
try:
    print(sum(len(text) for _, text in read_documents(sys.argv[1], *sys.argv[3:])))
except DataError as error:
    print("error:", error)
"""
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a limit on memory as Linux has it")
# The limit on a document, made small
LIMIT = 1000


def read_within(file, megabytes, text_field="text"):
    """What a process that may take so much more memory than it begins with prints about the file."""
    # Each thread that allocates reserves 64 MB of addresses, which the limit would count as if they were taken.
    ended = run_program(READ, file, megabytes, text_field, MALLOC_ARENA_MAX="1")
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout.strip()


@needs_linux
@pytest.mark.parametrize("kind", [".zst", ".gz", *(pytest.param(x, marks=pytest.mark.slow) for x in (".bz2", ".xz"))])
def test_hundreds_of_megabytes_of_newlines_take_little_memory_and_the_text_after_them_comes(tmp_path, kind):
    file = tmp_path / f"a.jsonl{kind}"
    file.write_bytes(COMPRESS[kind](b"\n" * (300 << 20) + b'{"text": "end"}\n'))
    assert file.stat().st_size < 400_000
    assert read_within(file, 250) == "3"


@needs_linux
def test_a_gzip_file_of_zeros_ends_in_one_line(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(bytes(100 << 20)) * 3)
    said = read_within(file, 900)
    assert said.startswith(f"error: {file}:1: the ") and " is longer than " in said


@needs_linux
@pytest.mark.slow
def test_a_json_array_of_half_a_gigabyte_is_read_object_by_object(tmp_path):
    file = tmp_path / "a.json.gz"
    one = json.dumps({"text": "x" * 1_000_000, "more": [1, 2, {"a": "]"}]}).encode()
    with gzip.open(file, "wb", compresslevel=1) as stream:
        stream.write(b"[" + one)
        for _ in range(500):
            stream.write(b",\n" + one)
        stream.write(b"]")
    assert read_within(file, 200) == str(501 * 1_000_000)


@needs_linux
def test_many_values_on_a_long_line_do_not_become_gigabytes_of_objects(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a", "more": [' + b"[]," * 12_000_000 + b"[]]}\n")
    assert "a.jsonl:1: more than 4,000,000 strings" in read_within(file, 500)


@needs_linux
def test_many_texts_of_one_dictionary_entry_take_the_memory_of_one(tmp_path):
    """0.8 GB of text in a parquet file of a few kilobytes."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    entry = arrow.array(["x" * 4_000_000])
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * 200, arrow.int32()), entry)
    parquet.write_table(arrow.table({"text": column}), file, compression="zstd")
    assert read_within(file, 500) == str(200 * 4_000_000)


@needs_linux
@pytest.mark.parametrize("rows, text_field", [(1, "text"), (20, "text"), (20, CONVERSATION)])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_long_text_is_refused_by_the_sizes_in_its_file(tmp_path, suffix, rows, text_field):
    """300 MB in a file of kilobytes: before, pyarrow took two to six times as much memory."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / f"a{suffix}"
    table = arrow.table({"text": ["x" * (300 << 20), *["a"] * (rows - 1)]})
    if suffix == ".parquet":
        parquet.write_table(table, file, compression="zstd")
    else:
        options = arrow.ipc.IpcWriteOptions(compression="zstd")
        with arrow.ipc.new_file(str(file), table.schema, options=options) as writer:
            writer.write_table(table)
    assert file.stat().st_size < 50_000
    said = read_within(file, 300, text_field)
    assert "is longer than 256 MB; cut its text into several documents (by the file's own sizes" in said


@pytest.fixture
def small_limit(monkeypatch):
    monkeypatch.setattr(faults, "MAX_DOCUMENT_BYTES", LIMIT)
    monkeypatch.setattr(faults, "MAX_CSV_ROW_BYTES", LIMIT)
    # A block is smaller than the longest document.
    monkeypatch.setattr(documents, "BLOCK_BYTES", 100)


def line_of(size):
    """A jsonl line of so many bytes, newline included."""
    frame = len(json.dumps({"text": ""})) + 1
    return json.dumps({"text": "x" * (size - frame)}).encode() + b"\n"


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("block_bytes", [7, 999])
@pytest.mark.parametrize("compression", COMPRESS)
def test_a_line_over_the_limit_is_a_fault_of_its_own_wherever_blocks_are_cut(tmp_path, compression, block_bytes):
    short = [b'{"text": "one"}\n', b'{"text": "two"}\n', b'{"text": "three"}']
    lines = [short[0], line_of(LIMIT), line_of(LIMIT + 1), b"\n", short[1], line_of(5 * LIMIT), short[2]]
    file = tmp_path / f"a.jsonl{compression}"
    file.write_bytes(COMPRESS[compression](b"".join(lines)))
    found = []
    for block in split_into_blocks(file, "text", block_bytes):
        for line, text in block.documents("text"):
            found.append((line, text if isinstance(text, str) else text.args[0]))
    wanted = {1: "one", 2: "xxxxxxxx", 3: "too long", 5: "two", 6: "too long", 7: "three"}
    assert [(line, text[:8]) for line, text in found] == [*wanted.items()]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".csv", ".txt", ".txt.gz"])
def test_a_long_document_names_file_and_line_and_is_counted_when_skipped(tmp_path, small_limit, suffix):
    long = "x" * (3 * LIMIT)
    long_field = long.replace("xxxx", "xxx\n", 3)
    content, texts = {
        "jsonl": ("\n".join(json.dumps({"text": text}) for text in ("one", long, "two")), ["one", "two"]),
        "csv": (f'text\n"{long_field}"\none\n"two"\n', ["one", "two"]),
        "txt": (long, []),
    }[suffix.split(".")[1]]
    file = tmp_path / f"a{suffix}"
    file.write_bytes(gzip.compress(content.encode()) if suffix.endswith(".gz") else content.encode())
    with pytest.raises(DataError, match=rf"a{suffix}:[12]: the .* is longer than 0 MB; cut its text into several doc"):
        list(read_documents(file))
    bad = BadLines()
    assert [text for _, text in read_documents(file, bad_lines=bad)] == texts and bad.counts == {"too long": 1}


def test_a_json_value_over_the_limit_ends_the_file_it_is_in(tmp_path, small_limit):
    file = tmp_path / "a.json"
    file.write_text('[{"text": "one"},\n{"text": "' + "x" * (300 * LIMIT) + '"}]')
    with pytest.raises(DataError, match=r"a\.json:2: the JSON value is longer than 0 MB"):
        list(read_documents(file, bad_lines=BadLines()))


@pytest.mark.parametrize("code, is_read", [(36, True), (39, False)])
def test_xz_that_claims_much_memory_is_refused(tmp_path, code, is_read):
    """A dictionary of 1 GB, as of `xz --lzma2=dict=1GiB`, and one of 3 GB, in the header of a small file."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 20}]
    content = bytearray(lzma.compress(b'{"text": "a"}\n', filters=filters, check=lzma.CHECK_NONE))
    at = content.index(bytes([0x21, 0x01])) + 2
    content[at] = code
    header = 12
    size = (content[header] + 1) * 4
    content[header + size - 4 : header + size] = zlib.crc32(content[header : header + size - 4]).to_bytes(4, "little")
    file = tmp_path / "a.jsonl.xz"
    file.write_bytes(content)
    if is_read:
        assert list(read_documents(file)) == [(1, "a")]
        return
    with pytest.raises(DataError, match="a.jsonl.xz: the compressed file is .*takes more than 2 GB of memory"):
        list(read_documents(file))
