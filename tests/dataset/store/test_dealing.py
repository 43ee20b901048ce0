"""How blocks are dealt out to shards. Reference: read_documents, one file after the other."""

import bz2
import gzip
import json
from collections import Counter

import pytest

from dataset.reading import documents
from dataset.reading.documents import read_documents
from dataset.store.dealing import Dealing

OPTIONS = ("text", 2000, False)


def write_corpus(folder, pieces):
    """Files of several kinds with the texts, about evenly."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    files = []
    for number, texts in enumerate(pieces):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        kind = ("jsonl", "jsonl.gz", "parquet", "txt", "jsonl.bz2")[number % 5]
        file = folder / f"{number:03}.{kind}"
        if kind == "jsonl":
            file.write_bytes(lines)
        elif kind == "jsonl.gz":
            file.write_bytes(gzip.compress(lines))
        elif kind == "jsonl.bz2":
            file.write_bytes(bz2.compress(lines))
        elif kind == "parquet":
            parquet.write_table(arrow.table({"text": texts}), file, row_group_size=7)
        else:
            file.write_text("\n".join(texts))
        files.append(file)
    return files


def deal(files, k, n, after=None, options=OPTIONS):
    sizes = [file.stat().st_size for file in files]
    return list(Dealing(files, sizes, options, k, n).blocks(after))


def texts_of(placed_blocks):
    found = []
    for place, block in placed_blocks:
        for line, text in block.documents("text"):
            found.append((place.file, text, line if block.items is not None else None))
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("count", [1, 5, 23])
def test_each_document_goes_to_one_part_and_places_tell_the_order(tmp_path, n, count):
    pieces = [[f"text {i} of file {number} " + "x" * (7 * i % 50) for i in range(60)] for number in range(count)]
    files = write_corpus(tmp_path, pieces)
    expected = []
    for number, file in enumerate(files):
        for line, text in read_documents(file):
            expected.append((number, text, line if file.suffix == ".parquet" else None))
    parts = [deal(files, k, n) for k in range(1, n + 1)]
    for part in parts:
        places = [place for place, _ in part]
        assert places == sorted(places)
    together = sorted((placed for part in parts for placed in part), key=lambda placed: placed[0])
    assert len({place for place, _ in together}) == len(together)
    assert texts_of(together) == expected


@pytest.mark.parametrize("n", [1, 3])
def test_a_part_goes_on_behind_any_of_its_blocks(tmp_path, n):
    files = write_corpus(tmp_path, [[f"{number} {i} " * 20 for i in range(40)] for number in range(7)])
    whole = [(place, texts_of([(place, block)])) for place, block in deal(files, 1, n)]
    assert len(whole) > 5
    for at, (after, _) in enumerate(whole):
        rest = [(place, texts_of([(place, block)])) for place, block in deal(files, 1, n, after)]
        assert rest == whole[at + 1 :]


def compressed_files(folder, count):
    files = []
    for number in range(count):
        file = folder / f"{number:02}.jsonl.gz"
        file.write_bytes(gzip.compress(json.dumps({"text": f"text {number} " * 50}).encode()))
        files.append(file)
    return files


@pytest.fixture
def opened(monkeypatch):
    real = documents.open_stream
    paths = []

    def open_stream(path, *rest):
        paths.append(path)
        return real(path, *rest)

    monkeypatch.setattr(documents, "open_stream", open_stream)
    return paths


def test_a_compressed_file_is_opened_for_one_shard_alone(tmp_path, opened):
    files = compressed_files(tmp_path, 40)
    for k in range(1, 5):
        before = len(opened)
        deal(files, k, 4)
        assert 8 <= len(opened) - before <= 12, "the parts are about equal"
    assert Counter(opened) == Counter(files)


def test_files_that_an_interrupted_build_has_done_are_not_opened_again(tmp_path, opened):
    files = compressed_files(tmp_path, 20)
    places = [place for place, _ in deal(files, 1, 1)]
    opened.clear()
    assert len(deal(files, 1, 1, after=places[14])) == 5
    assert opened == files[14:]


def test_a_file_that_is_large_against_a_part_is_worked_on_by_all(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    lines = [json.dumps({"text": f"text {i} " * 30}) for i in range(200)]
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    counts = [len(deal([file], k, 4)) for k in range(1, 5)]
    assert min(counts) >= 4 and max(counts) - min(counts) <= 1


def test_row_groups_are_dealt_out_without_reading_the_others(tmp_path, monkeypatch):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": [f"text {i}" for i in range(1000)]}), file, row_group_size=10)
    read = []
    real = documents.TableReader.rows

    def rows(reader):
        read.append(reader.row_group)
        return real(reader)

    monkeypatch.setattr(documents.TableReader, "rows", rows)
    found = texts_of(deal([file], 3, 5))
    assert read == list(range(2, 100, 5))
    assert found == [(0, f"text {i}", i + 1) for group in read for i in range(10 * group, 10 * group + 10)]
