"""Which files of a folder are data. Reference: the table in dataset/README.md, and what was read before."""

import errno
import gzip
import os
import sys

import pytest

from dataset.corpus import notices_of_paths
from dataset.reading.documents import DataError, find_files, read_documents


def names(folder, files, **options):
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a"}')
    return [file.relative_to(folder).as_posix() for file in find_files(str(folder), **options)]


@pytest.mark.parametrize(
    "files, data",
    [
        (["README.md", "main.py", "req.txt", "src/a.cpp", "package.json", "table.csv", "data.bin", ".git/x.py"], 4),
        (["a.jsonl", "b.jsonl.gz", "notes.txt", "README.md", "info.json", "get.py", "x.csv"], 3),
        (["train/data-00000-of-00001.arrow", "train/state.json", "train/dataset_info.json", "dataset_dict.json"], 1),
        (["a.tsv.gz", "b.tsv.gz", "README.md", "LICENSE.txt"], 2),
        (["a.json", "b.json", "README.md", "LICENSE.txt"], 2),
    ],
)
def test_the_data_of_a_folder(tmp_path, files, data):
    """Source code, a corpus, what Hugging Face datasets saves, tables; without what describes them. The first ones are data."""
    assert names(tmp_path, files) == files[:data]


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


def test_a_pattern_below_a_folder_with_brackets_reads_that_folder(tmp_path):
    names(tmp_path, ["[D]/a.jsonl", "D/b.jsonl"])
    (file,) = find_files(str(tmp_path / "[D]" / "*"))
    assert file == tmp_path / "[D]" / "a.jsonl"
    (file,) = find_files(str(tmp_path / "[C-E]" / "*"))
    assert file == tmp_path / "D" / "b.jsonl"


def test_text_suffixes_are_read_everywhere(tmp_path):
    files = ["a.jsonl", "README.md", "notes.log", "b.md"]
    assert names(tmp_path, files, text_suffixes=[".log"]) == ["a.jsonl", "notes.log"]
    (file,) = find_files(str(tmp_path / "notes.log"), [".log"])
    assert file.name == "notes.log"
    with pytest.raises(DataError, match="notes.log: unknown kind of file; files that are read: .*--text_suffixes"):
        find_files(str(tmp_path / "notes.log"))


def test_ndjson_is_another_name_of_jsonl(tmp_path):
    """Reference: what the same content gives as .jsonl."""
    assert names(tmp_path, ["a.ndjson", "b.NDJSON", "notes.md", "x.csv"]) == ["a.ndjson", "b.NDJSON"]
    assert list(read_documents(tmp_path / "a.ndjson")) == [(1, "a")]
    (tmp_path / "c.ndjson.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "b"}\n'))
    assert list(read_documents(tmp_path / "c.ndjson.gz")) == [(1, "a"), (2, "b")]


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
    write_line(tmp_path / "cache" / "hashes.json")
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


def test_a_path_that_cannot_be_looked_at_is_told_with_the_reason(tmp_path, monkeypatch):
    """It may well be there. Reference: what the system says."""
    for name in ("hf://datasets/owner/name/train.parquet", "gs://bucket/corpus", "~nobody_of_this_name/a.jsonl"):
        with pytest.raises(DataError, match="hf download owner/name --repo-type|download it first|home directory"):
            find_files(name)
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
