"""Which files of a folder are data. Reference: the table in dataset/README.md, and what was read before."""

import errno
import os
import sys

import pytest

from common.errors import DataError
from dataset.reading.file_kinds import choose_files, find_files, notices_on_files


def write(folder, *files):
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a"}')


def names(folder, files, **options):
    write(folder, *files)
    return [file.relative_to(folder).as_posix() for file in find_files(str(folder), **options)]


@pytest.mark.parametrize(
    "files, data",
    [
        (["README.md", "main.py", "req.txt", "src/a.cpp", "package.json", "table.csv", "data.bin", ".git/x.py"], 4),
        (["a.jsonl", "b.jsonl.gz", "notes.txt", "README.md", "info.json", "get.py", "x.csv"], 3),
        (["train/data-00000-of-00001.arrow", "train/state.json", "train/dataset_info.json", "dataset_dict.json"], 1),
        (["a.tsv.gz", "b.tsv.gz", "README.md", "LICENSE.txt"], 2),
        (["a.json", "b.json", "README.md", "LICENSE.txt"], 2),
        (["src/a.txt", "target/a.txt", "Makefile.am"], 2),
        (["a.ndjson", "b.NDJSON", "notes.md", "x.csv"], 2),
    ],
)
def test_the_data_of_a_folder(tmp_path, files, data):
    """Source code, a corpus, what Hugging Face datasets saves, tables; without what describes them. The first ones are data."""
    assert names(tmp_path, files) == files[:data]


def test_a_folder_that_a_pattern_matches_is_read_once_as_the_shell_would_name_it(tmp_path):
    files = ["a.jsonl", "2023/b.jsonl", "2024/deep/c.jsonl", "2024/deep/pretrain_8_resume/d.jsonl", ".hidden/e.jsonl"]
    names(tmp_path, files)
    # `**` names each file by itself too, and a file that is named is read whatever it is.
    for pattern, expected in (("*", files[:3]), ("*/**", files[1:4]), ("**", files[:4]), ("*.jsonl", files[:1])):
        found = find_files(str(tmp_path / pattern))
        assert sorted(file.relative_to(tmp_path).as_posix() for file in found) == sorted(expected)
    # Of the last one and the folder.
    (line,) = notices_on_files([*found, *find_files(str(tmp_path))])
    assert line.startswith(f"warning: --data_path names {tmp_path / 'a.jsonl'} 2 times: without --deduplicate its doc")


def test_a_start_says_which_kinds_of_files_of_a_folder_are_not_read(tmp_path):
    """A dataset often has its script beside it; a README or a license says nothing of the choice."""
    names(tmp_path / "tables", ["train.csv", "dev.csv", "download.sh", "README.md"])
    names(tmp_path / "corpus", ["a.jsonl", "README.md", "LICENSE"])
    names(tmp_path / "named", ["b.csv", "c.sh"])
    assert [choose_files(str(tmp_path / path))[1] for path in ("corpus", "named/b.csv")] == [[], []]
    _, (line,) = choose_files(str(tmp_path / "tables"))
    assert "2 files read (.md, .sh), 2 of other kinds (such as dev.csv)" in line
    assert line.endswith("left out; name files by their own paths to read others")
    assert names(tmp_path / "zh", ["a.csv", "README.md", "README_zh.md"]) == ["a.csv"]


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


def test_what_a_run_or_a_store_leaves_in_the_folder_is_no_data(tmp_path):
    write(tmp_path, "a.jsonl", "out/p_16.metrics.jsonl", "out/p_16_resume/x.jsonl", "out/p_16_resume_old1/y.jsonl")
    write(tmp_path, "wandb/run-1/files/requirements.txt", f"cache/tokenizer-{1:016}/figures.json")
    write(tmp_path, ".hidden/z.jsonl", "out/p_16.pth", "out/p_16.json", "cache/hashes.json", f"cache-{1:016}.arrow")
    write(tmp_path / "cache" / "data-1", "meta.json", "tokens.bin", "b.jsonl")
    write(tmp_path / "out" / "discriminator", "config.json", "model.safetensors", "vocab.txt", "README.md")
    write(tmp_path, "tokenizer_config.json", "hf/data-00000-of-00002.arrow")
    (tmp_path / "hf" / "state.json").write_text('{"_data_files": [{"filename": "/x/data-00000-of-00001.arrow"}]}')
    assert find_files(str(tmp_path)) == [tmp_path / "a.jsonl"]
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match="nothing to read there"):
        find_files(str(tmp_path))


@pytest.mark.parametrize("place", ["hr_resume", "run_resume_old1/a/b"])
def test_a_folder_that_is_called_as_one_of_a_run_is_read_where_it_is_named(tmp_path, place):
    """What the folder above the data is called says nothing: a corpus may be one of resumes."""
    write(tmp_path / place, "deep/a.jsonl", "p_16_resume/b.jsonl")
    for pattern in (place, f"{place}/de*"):
        assert find_files(str(tmp_path / pattern)) == [tmp_path / place / "deep" / "a.jsonl"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there, and there are no pipes")
def test_links_are_followed_once_and_those_to_nothing_and_pipes_are_named(tmp_path):
    """Large corpora are often folders of links to other disks."""
    write(tmp_path, "disk/b.jsonl", "corpus/a.jsonl")
    corpus = tmp_path / "corpus"
    (corpus / "link").symlink_to(tmp_path / "disk")
    (corpus / "up").symlink_to(corpus)
    (corpus / "link" / "up").symlink_to(corpus)
    (corpus / "another").symlink_to(tmp_path / "disk")
    for pattern in ("", "/**/*.jsonl", "/**", "/**/*", "/*"):
        assert find_files(f"{corpus}{pattern}") == [corpus / "a.jsonl", corpus / "another" / "b.jsonl"]
    (corpus / "gone.jsonl").symlink_to(corpus / "not_mounted.jsonl")
    for pattern in ("", "/*.jsonl", "/gone.jsonl"):
        with pytest.raises(DataError, match=r"gone.jsonl: a broken link \(is a disk not mounted"):
            find_files(f"{corpus}{pattern}")
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="or a pipe: write it to a file first"):
        find_files(str(tmp_path / "a.jsonl"))


def test_a_path_that_cannot_be_looked_at_is_told_with_the_reason(tmp_path, monkeypatch):
    """It may well be there. Reference: what the system says."""
    for name, reason in (
        ("hf://datasets/owner/name/train.parquet", "download it first .*hf download"),
        ("s3://bucket/corpus.jsonl", "download it first .aws s3 cp"),
        ("https://host/a.jsonl?token=b", "download it first .*curl -LO"),
        ("~nobody_of_this_name/a", "name/a: no such file"),
        ("a:0,7", "take shares .* written :0.7"),
        ("x" * 300, r"xxx: cannot be read \(File name too long\)"),
    ):
        with pytest.raises(DataError, match=reason):
            find_files(name)
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


def test_packages_build_output_and_minified_files_are_left_out_and_named(tmp_path):
    own = ["package.json", "src/app.js", "lib/build/own.py"]
    others = ["node_modules/x/index.js", "env/pyvenv.cfg", "env/lib/a.py", "build/main.js", "api/site-packages/b.py"]
    write(tmp_path, *own, *others)
    (tmp_path / "bundle.js").write_text("/* license */\n" + "var a=1;" * 1000)
    shown = [str(tmp_path / name) for name in ("api/site-packages", "build", "bundle.js", "env")]
    for pattern in ("", "*", "**", "**/*"):
        files, (line, *_) = choose_files(str(tmp_path / pattern))
        assert files == [tmp_path / "lib/build/own.py", tmp_path / "src/app.js"]
        assert f"left out: {', '.join(shown)} and 1 more; to read one, name its own path" in line
    assert find_files(str(tmp_path / "*/*/*.py")) == find_files(str(tmp_path / "**/*.py")) == files[:1]
    for name in ("api", "a*/*/b.py"):
        with pytest.raises(DataError, match="nothing to read there; .*site-packages is left out unless you name"):
            find_files(str(tmp_path / name))
    for name in ("node_modules", "build/main.js", "bundle.js", "*/site-packages/*", "**/node_modules/**"):
        files, lines = choose_files(str(tmp_path / name))
        assert len(files) == 1
        top = tmp_path / files[0].relative_to(tmp_path).parts[0]
        assert str(top) not in "".join(lines).partition("left out: ")[2]


def test_what_a_data_set_holds_out_is_named_where_it_is_trained(tmp_path):
    for files, held_out in (
        (["train-0.jsonl", "test.jsonl", "valid.jsonl"], "test.jsonl, valid.jsonl"),
        (["data/train-0.parquet", "data/my-test-00000-of-00001.parquet"], "my-test-00000-of-00001.parquet"),
        (["train/a.txt", "dev/a.txt"], "dev/a.txt"),
        (["books.txt", "wiki.valid.tokens"], "wiki.valid.tokens"),
        (["latest.jsonl", "contest.jsonl", "devices.jsonl"], None),
        (["src/a.py", "src/test_a.py"], None),
        (["test/a.jsonl", "test/b/valid/c.jsonl"], "b/valid/c.jsonl"),
        (["valid.jsonl"], None),
    ):
        found = notices_on_files([tmp_path / file for file in files])
        assert len(found) == bool(held_out), files
        top = os.path.commonpath([tmp_path / file for file in files])
        advice = "if that is not meant, name the other files in --data_path, and these in --val_path"
        assert not held_out or found[0] == f"warning: trained too: {held_out} in {top}; {advice}"
