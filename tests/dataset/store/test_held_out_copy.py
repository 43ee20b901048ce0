"""What is held out of shards that lie elsewhere. References: the same corpus on this disk, and the names of the files that are fetched."""

import numpy as np
import pytest

from common.errors import DataError
from dataset.corpus import Corpus
from dataset.leaks_at_start import leak_notices
from dataset.store import copying, remote_shards, writer
from dataset.store.token_store import open_or_build
from tests.dataset.store.test_sharded import write

pytestmark = pytest.mark.usefixtures("small_shards")


@pytest.fixture
def fetched(monkeypatch):
    """The list of (shard, file) of what is fetched from here on; `fails_at` of it may be set to the shard that cannot be had."""
    pytest.importorskip("fsspec")

    class Fetched(list):
        fails_at = None

    asked = Fetched()
    real = remote_shards.fetch_file

    def fetch_file(address, *rest):
        _, shard, name = address.rsplit("/", 2)
        if name == "tokens.bin" and shard == asked.fails_at:
            raise DataError("the server is away")
        asked.append((shard, name))
        real(address, *rest)

    monkeypatch.setattr(remote_shards, "fetch_file", fetch_file)
    # What is fetched ahead would come at any moment.
    monkeypatch.setattr(remote_shards, "beside", lambda *_: None)
    return asked


@pytest.fixture
def store(tmp_path, encoder):
    return open_or_build(write(tmp_path / "a.jsonl"), encoder, cache_dir=str(tmp_path / "made"), progress=False)


def opened(path, encoder, cache, **options):
    return Corpus([str(path)], encoder, max_seq_len=16, seed=1, cache_dir=str(cache), progress=False, **options)


def elsewhere(store):
    return f"file://{store.folder}/manifest.json"


def check_same_validation(there, here):
    mine, theirs = there.validation(), here.validation()
    assert len(mine) == len(theirs) > 1
    for i in range(len(mine)):
        for one, other in zip(mine[i], theirs[i], strict=True):
            assert np.array_equal(one, other)
    assert mine.n_bytes == theirs.n_bytes > 0


def test_an_evaluation_fetches_nothing_and_is_that_of_the_data_on_this_disk(
    tmp_path, encoder, store, fetched, monkeypatch
):
    # Several blocks of a shard.
    monkeypatch.setattr(copying, "BLOCK_TOKENS", 100)
    here = opened(store.folder / "manifest.json", encoder, tmp_path / "unused", val_fraction=0.3)
    # Room for two shards of eight.
    room = 2 * max(shard.n_bytes for shard in store.shards) / 1e9
    options = {"val_fraction": 0.3, "cache_gb": room}
    there = opened(elsewhere(store), encoder, tmp_path / "cache", **options)
    assert [shard for shard, name in fetched if name == "tokens.bin"] == [shard.name for shard in store.shards]
    assert np.array_equal(there.documents, here.documents) and np.array_equal(there.kept_back, here.val_documents)
    fetched.clear()
    for _ in range(2):
        check_same_validation(there, here)
    assert fetched == []
    # The next start finds it.
    again = opened(elsewhere(store), encoder, tmp_path / "cache", **options)
    check_same_validation(again, here)
    assert "tokens.bin" not in {name for _, name in fetched}
    # Another fraction is another copy.
    other = opened(elsewhere(store), encoder, tmp_path / "cache", **{**options, "val_fraction": 0.1})
    assert len(other.val_documents) < len(there.val_documents)


def test_a_copy_that_was_interrupted_goes_on_at_its_shard(tmp_path, encoder, store, fetched, monkeypatch):
    monkeypatch.setattr(writer, "CHECKPOINT_S", 0.0)
    fetched.fails_at = store.shards[4].name
    with pytest.raises(DataError, match="the server is away"):
        opened(elsewhere(store), encoder, tmp_path / "cache", val_fraction=0.3, cache_gb=1)
    fetched.fails_at = None
    # What was fetched is not on the disk any more.
    for entry in (tmp_path / "cache" / "downloads").iterdir():
        entry.unlink()
    fetched.clear()
    there = opened(elsewhere(store), encoder, tmp_path / "cache", val_fraction=0.3, cache_gb=1)
    # That of the last block is looked at once more.
    assert [shard for shard, name in fetched if name == "tokens.bin"] == [shard.name for shard in store.shards[3:]]
    check_same_validation(there, opened(store.folder / "manifest.json", encoder, tmp_path / "unused", val_fraction=0.3))


def test_sources_on_this_disk_and_elsewhere_are_held_out_together(tmp_path, encoder, store, fetched):
    other = write(tmp_path / "b.jsonl", [f"a dog {i} ran over far hills " * 3 for i in range(50)])

    def both(path, cache):
        return Corpus(
            [f"{other}:0.5", f"{path}:0.5"],
            encoder,
            max_seq_len=16,
            seed=1,
            val_fraction=0.3,
            cache_dir=str(cache),
            progress=False,
        )

    there = both(elsewhere(store), tmp_path / "cache")
    here = both(store.folder / "manifest.json", tmp_path / "unused")
    assert np.array_equal(there.documents, here.documents)
    check_same_validation(there, here)


def test_leaks_are_looked_for_in_what_is_on_this_disk(tmp_path, encoder, fetched):
    """Reference: the documents of two shards that are planted in the validation file."""
    texts = [" ".join(f"w{i}x{j}" for j in range(30)) for i in range(100)]
    store = open_or_build(write(tmp_path / "a.jsonl", texts), encoder, cache_dir=str(tmp_path / "made"), progress=False)
    planted = [f"{texts[store.shard_bounds[shard] + 1]} and more" for shard in (1, 3)]
    validation = write(tmp_path / "validation.jsonl", planted)
    there = opened(elsewhere(store), encoder, tmp_path / "cache", val_path=validation)
    fetched.clear()
    (line,) = leak_notices(there)
    assert "was not searched" in line and fetched == []
    # As after some training.
    assert len(there.store.shard(1).tokens) and len(there.store.shard(1).offsets)
    fetched.clear()
    (line,) = leak_notices(there)
    assert fetched == []
    share = store.shards[1].tokens / len(store.tokens)
    assert line.startswith("note: 1 of 2 validation documents")
    assert f"in the {share:.1%} of it that was looked at (shards on this machine alone)" in line
