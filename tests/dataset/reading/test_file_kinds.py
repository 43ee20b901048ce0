"""Which files of a folder are data. Reference: the table in dataset/README.md, and what was read before."""

import argparse
import errno
import gzip
import os
import sys
from pathlib import Path

import pytest

from dataset.corpus import Corpus, notices_of_paths
from dataset.reading.documents import DataError, find_files
from dataset.store.token_store import open_or_build
from dataset.tokenizing.encoder import DocumentEncoder
from tests.dataset.tokenizing.test_encoder import small_tokenizer


def names(folder, files, **options):
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a"}')
    return [file.relative_to(folder).as_posix() for file in find_files(str(folder), **options)]


def test_folder_of_source_code_gives_the_code(tmp_path):
    files = ["main.py", "src/a.cpp", "README.md", "package.json", "table.csv", "data.bin", ".git/x.py", "req.txt"]
    assert names(tmp_path, files) == ["README.md", "main.py", "req.txt", "src/a.cpp"]


def test_folder_with_a_corpus_gives_what_it_gave_before(tmp_path):
    files = ["a.jsonl", "b.jsonl.gz", "notes.txt", "README.md", "info.json", "get.py", "x.csv"]
    assert names(tmp_path, files) == ["a.jsonl", "b.jsonl.gz", "notes.txt"]


def test_a_folder_that_a_pattern_matches_is_read_once_as_the_shell_would_name_it(tmp_path):
    files = ["a.jsonl", "2023/b.jsonl", "2024/deep/c.jsonl", "2024/deep/pretrain_8_resume/d.jsonl", ".hidden/e.jsonl"]
    names(tmp_path, files)
    # `**` names each file by itself too, and a file that is named is read whatever it is.
    for pattern, expected in (("*", files[:3]), ("20*", files[1:3]), ("**", files[:4]), ("*.jsonl", files[:1])):
        found = find_files(str(tmp_path / pattern))
        assert sorted(file.relative_to(tmp_path).as_posix() for file in found) == sorted(expected)


def test_a_start_says_which_kinds_of_files_of_a_folder_are_not_read(tmp_path):
    """A dataset often has its script beside it; a README or a license says nothing of the choice."""
    names(tmp_path / "tables", ["train.csv", "dev.csv", "download.sh", "README.md"])
    names(tmp_path / "corpus", ["a.jsonl", "README.md", "LICENSE"])
    names(tmp_path / "named", ["b.csv", "c.sh"])
    paths = [str(tmp_path / "tables"), str(tmp_path / "corpus"), str(tmp_path / "named" / "b.csv")]
    (line,) = notices_of_paths(paths)
    assert "2 .csv files" in line
    assert line.endswith("left out; name files by their own paths to read others")
    assert notices_of_paths([str(tmp_path / "*")]) != []


def test_a_folder_of_notes_says_what_it_leaves_out(tmp_path):
    names(tmp_path, ["notes.md", "a.docx", "b.docx", "c.pdf", "d.jpg", "Makefile", ".hidden"])
    (line,) = notices_of_paths([str(tmp_path)])
    assert "1 .md file read, 2 .docx files, 1 file, 1 .pdf file, 1 .jpg file left out" in line


def test_a_pattern_below_a_folder_with_brackets_reads_that_folder(tmp_path):
    names(tmp_path, ["[D]/a.jsonl", "D/b.jsonl"])
    (file,) = find_files(str(tmp_path / "[D]" / "*"))
    assert file == tmp_path / "[D]" / "a.jsonl"
    (file,) = find_files(str(tmp_path / "[C-E]" / "*"))
    assert file == tmp_path / "D" / "b.jsonl"


@pytest.mark.skipif(os.name == "nt", reason="links want rights on Windows")
def test_a_file_behind_a_circle_of_links_is_read_once(tmp_path):
    names(tmp_path, ["data/a.jsonl"])
    (tmp_path / "data" / "again").symlink_to(tmp_path)
    (file,) = find_files(str(tmp_path / "**" / "*.jsonl"))
    assert file.name == "a.jsonl"


def test_folder_that_hugging_face_datasets_saved_gives_its_arrow_files(tmp_path):
    files = ["train/data-00000-of-00001.arrow", "train/state.json", "train/dataset_info.json", "dataset_dict.json"]
    assert names(tmp_path, files) == ["train/data-00000-of-00001.arrow"]


@pytest.mark.parametrize("suffix", [".csv", ".json", ".tsv.gz", ".json.xz"])
def test_folder_of_tables_gives_these_and_not_their_description(tmp_path, suffix):
    assert names(tmp_path, [f"a{suffix}", f"b{suffix}", "README.md", "LICENSE.txt"]) == [f"a{suffix}", f"b{suffix}"]


def test_text_suffixes_are_read_everywhere(tmp_path):
    files = ["a.jsonl", "README.md", "notes.log", "b.md"]
    assert names(tmp_path, files, text_suffixes=[".log"]) == ["a.jsonl", "notes.log"]
    (file,) = find_files(str(tmp_path / "notes.log"), [".log"])
    assert file.name == "notes.log"
    with pytest.raises(DataError, match="notes.log: unknown kind of file; files that are read: .*--text_suffixes"):
        find_files(str(tmp_path / "notes.log"))


def test_ndjson_is_another_name_of_jsonl(tmp_path):
    """Reference: what the same content gives as .jsonl."""
    from dataset.reading.documents import read_documents
    from dataset.reading.file_kinds import identity_suffix

    assert names(tmp_path, ["a.ndjson", "b.NDJSON", "notes.md", "x.csv"]) == ["a.ndjson", "b.NDJSON"]
    assert list(read_documents(tmp_path / "a.ndjson")) == [(1, "a")]
    (tmp_path / "c.ndjson.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "b"}\n'))
    assert list(read_documents(tmp_path / "c.ndjson.gz")) == [(1, "a"), (2, "b")]
    assert [identity_suffix(tmp_path / name) for name in ("a.ndjson", "a.ndjson.gz")] == [".jsonl", ".gz"]


def test_text_suffixes_flag_takes_short_forms_and_refuses_formats():
    from dataset.reading.file_kinds import text_suffix

    assert [text_suffix(value) for value in ("py", ".MD")] == [".py", ".md"]
    for wrong in (".json", "csv", "ndjson", ".gz", "", "a/b", ".d.ts"):
        with pytest.raises(argparse.ArgumentTypeError):
            text_suffix(wrong)


@pytest.mark.parametrize(
    "address, command",
    [
        ("hf://datasets/owner/name/train.parquet", "hf download owner/name --repo-type dataset --local-dir data"),
        ("s3://bucket/corpus", "aws s3 cp --recursive s3://bucket/corpus data"),
        ("gs://bucket/corpus", "gcloud storage cp --recursive gs://bucket/corpus data"),
        ("https://example.org/a.jsonl", "curl -L -O https://example.org/a.jsonl"),
    ],
)
def test_addresses_are_not_mangled_and_the_line_says_how_to_download(address, command):
    from dataset.reading.file_kinds import refuse_address

    with pytest.raises(DataError) as caught:
        refuse_address(address)
    assert str(caught.value).startswith(f"{address}: it is not on this machine; download it first")
    assert command in str(caught.value)


def test_files_of_equal_content_and_other_kinds_have_stores_of_their_own(tmp_path):
    """`.csv.gz` and `.jsonl.gz` end alike. The identity of kinds that have always been read stays as it was."""
    from dataset.reading.file_kinds import identity_suffix

    old = {"a.jsonl": ".jsonl", "a.JSONL.gz": ".gz", "a.jsonl.zst": ".zst", "a.parquet": ".parquet", "a.txt": ".txt"}
    assert {name: identity_suffix(tmp_path / name) for name in old} == old
    assert identity_suffix(tmp_path / "a.csv.gz") == ".csv.gz"


def test_a_folder_of_code_is_trained_on(tmp_path, monkeypatch):
    """From the folder to the store's tokens: each file a document."""
    sources = {"a.py": "x = 1\n", "sub/b.js": "let x\n"}
    for name, text in sources.items():
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text(text)
    encoder = DocumentEncoder(small_tokenizer())
    store = open_or_build(str(tmp_path / "code"), encoder, num_procs=1, progress=False)
    assert [store.document(i).tolist() for i in range(len(store))] == encoder.encode(list(sources.values()))


def test_a_folder_of_code_takes_its_share_beside_a_corpus(tmp_path):
    """What README shows: `--data_path zh.jsonl:0.7 code/:0.3`."""
    (tmp_path / "zh.jsonl").write_text('{"text": "one two three four"}\n' * 20)
    (tmp_path / "code").mkdir()
    for i in range(20):
        (tmp_path / "code" / f"{i}.py").write_text("x = 1 + 1\n")
    paths = [f"{tmp_path / 'zh.jsonl'}:0.7", f"{tmp_path / 'code'}/:0.3"]
    corpus = Corpus(paths, DocumentEncoder(small_tokenizer()), max_seq_len=16, seed=0, progress=False)
    assert [len(store) for store in corpus.store.stores] == [20, 20]
    assert len(corpus.mixture_report(0)) == 2


def write_line(path, text="the cat"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"text": "{text}"}}\n', encoding="utf-8")
    return path


def test_what_a_run_or_a_store_leaves_in_the_folder_is_no_data(tmp_path):
    data = write_line(tmp_path / "a.jsonl")
    for name in (
        "out/p_16.metrics.jsonl",
        "out/p_16_resume/x.jsonl",
        "out/p_16_resume_old1/y.jsonl",
        ".hidden/z.jsonl",
    ):
        write_line(tmp_path / name)
    (tmp_path / "out" / "p_16.pth").write_bytes(b"")
    write_line(tmp_path / "out" / "p_16.json")
    for name in ("meta.json", "tokens.bin"):
        write_line(tmp_path / "cache" / "data-1" / name)
    for name in ("config.json", "model.safetensors", "vocab.txt"):
        write_line(tmp_path / "out" / "discriminator" / name)
    assert find_files(str(tmp_path)) == [data]
    data.unlink()
    with pytest.raises(DataError, match="nothing to read there"):
        find_files(str(tmp_path))


@pytest.mark.parametrize("place", ["hr_resume", "job_resume/data", "run_resume_old1/a/b"])
def test_a_folder_that_is_called_as_one_of_a_run_is_read_where_it_is_named(tmp_path, place):
    """What the folder above the data is called says nothing: a corpus may be one of resumes."""
    data = write_line(tmp_path / place / "deep" / "a.jsonl")
    write_line(tmp_path / place / "p_16_resume" / "b.jsonl")
    assert find_files(str(tmp_path / place)) == [data]
    assert find_files(str(tmp_path / place / "de*")) == [data]


def test_tables_beside_a_token_store_stay_the_only_data(tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("text\nthe cat\n")
    for name in ("meta.json", "tokens.bin"):
        write_line(tmp_path / "cache" / "data-1" / name)
    write_line(tmp_path / "cache" / "hashes.json")
    assert find_files(str(tmp_path)) == [table]


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_folders_behind_links_are_read_once(tmp_path):
    """Large corpora are often folders of links to other disks."""
    other = write_line(tmp_path / "disk" / "b.jsonl")
    own = write_line(tmp_path / "corpus" / "a.jsonl")
    (tmp_path / "corpus" / "link").symlink_to(other.parent)
    (tmp_path / "corpus" / "up").symlink_to(tmp_path / "corpus")
    assert find_files(str(tmp_path / "corpus")) == [own, tmp_path / "corpus" / "link" / "b.jsonl"]


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes")
@pytest.mark.parametrize("pattern", ["", "/*.jsonl", "/gone.jsonl"])
def test_a_link_to_nothing_is_named(tmp_path, pattern):
    write_line(tmp_path / "a.jsonl")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "not_mounted.jsonl")
    with pytest.raises(DataError, match="gone.jsonl: a link to .*not_mounted.jsonl, which is not there"):
        find_files(f"{tmp_path}{pattern}")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_a_pipe_is_named(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="a pipe or a device"):
        find_files(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("path", ["x" * 5000, "~nobody_of_this_name/a.jsonl"])
def test_a_path_that_can_be_none_is_one_line(path):
    with pytest.raises(DataError) as error:
        find_files(path)
    assert "\n" not in str(error.value)


def test_a_path_that_cannot_be_looked_at_is_told_with_the_reason(tmp_path, monkeypatch):
    """It may well be there. Reference: what the system says."""
    with pytest.raises(DataError, match=r"xxx: cannot be read \(File name too long\)"):
        find_files(str(tmp_path / ("x" * 300)))
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(DataError, match="link: a link to gone, which is not there"):
        find_files(str(tmp_path / "link"))

    # Below a folder that this user may not enter.
    stat = os.stat

    def refused(path, *arguments, **options):
        if str(path).startswith(str(tmp_path / "private")):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refused)
    for name in ("private/a.jsonl", "private/folder"):
        with pytest.raises(DataError, match=rf"{name}: cannot be read \(Permission denied\)"):
            find_files(str(tmp_path / name))


@pytest.mark.parametrize("closed", ["private", "data/private"])
def test_no_folder_is_left_out_because_it_cannot_be_read(tmp_path, monkeypatch, closed):
    """Part of a corpus would be missing. What the system keeps at the top of a disk is no data."""
    names(tmp_path, ["data/a.jsonl", "private/b.jsonl", "data/private/b.jsonl", "data/lost+found/c.jsonl"])
    scandir = os.scandir
    private = [tmp_path / closed, tmp_path / "data" / "lost+found"]

    def refused(path):
        if Path(path) in private:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(DataError, match=rf"{closed}: cannot be read \(Permission denied\)"):
        find_files(str(tmp_path / closed.partition("/")[0]))
    private.pop(0)
    assert [file.name for file in find_files(str(tmp_path / "data"))] == ["a.jsonl", "b.jsonl"]
