"""Shards behind an address. References: the store on the disk that they were copied from, and the limit of the cache."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from common.errors import DataError
from dataset import grouped_plan
from dataset.corpus import Corpus
from dataset.grouped_plan import GroupedPlan
from dataset.loader import IGNORE, Assembler, UpdateSchedule, make_loader
from dataset.reading import remote
from dataset.reading.disk_cache import DiskCache
from dataset.store import builder, dealing
from dataset.store.remote_shards import TRAINED_FILES, RemoteShards
from dataset.store.sharded import ShardedStore
from dataset.store.token_store import open_or_build
from dataset.tokenizing.encoder import DocumentEncoder
from tests.dataset.store.test_sharded import TEXTS, check_same, write
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import ROOT, train
from tests.s3_server import running_s3_server


@pytest.fixture(scope="module")
def s3():
    with running_s3_server() as server:
        yield server


@pytest.fixture(autouse=True)
def no_waits(small_shards, monkeypatch):
    """Between two tries of a download."""
    monkeypatch.setattr(remote, "WAITS_S", (0.0, 0.0))


def built(tmp_path, encoder):
    return open_or_build(write(tmp_path / "a.jsonl"), encoder, progress=False)


def upload(s3, store, bucket):
    """Copy a store as `aws s3 cp --recursive` does; returns the address of its manifest."""
    for path in sorted(store.folder.rglob("*")):
        if path.is_file():
            s3.put(f"{bucket}/tokens/{path.relative_to(store.folder).as_posix()}", path.read_bytes())
    return f"s3://{bucket}/tokens/manifest.json"


def opened(manifest, folder, limit_bytes=10**9):
    return ShardedStore(RemoteShards(manifest.removesuffix("/manifest.json"), DiskCache(folder, limit_bytes)))


def bytes_below(folder):
    found = 0
    for path in folder.rglob("*"):
        # It may go at any moment.
        try:
            found += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return found


@pytest.mark.slow
def test_shards_elsewhere_hold_the_same_documents(tmp_path, s3, encoder):
    store = built(tmp_path, encoder)
    manifest = upload(s3, store, "same")
    for address in (manifest, f"file://{store.folder}/manifest.json", f"{s3.url}/same/tokens/manifest.json"):
        there = open_or_build(address, encoder, cache_dir=str(tmp_path / "cache"))
        check_same(there, store)
    # The digest is the name: all three addresses have fetched a file once.
    shards = [path for path, _ in s3.contents_asked_for() if "shard-" in path]
    assert len(shards) == len(set(shards)) == 4 * len(store.shards)


def test_the_manifest_of_a_store_on_the_disk_is_data_too(tmp_path, encoder):
    store = built(tmp_path, encoder)
    corpus = Corpus([str(store.folder / "manifest.json")], encoder, max_seq_len=16, seed=1)
    assert corpus.fingerprint == store.fingerprint and corpus.plan(0).n_rows > 100
    with pytest.raises(DataError, match="tokenised with another tokenizer"):
        Corpus([str(store.folder / "manifest.json")], DocumentEncoder(small_tokenizer(), True), max_seq_len=16, seed=1)
    with pytest.raises(DataError, match="no token store that can be read"):
        Corpus([str(tmp_path / "manifest.json")], encoder, max_seq_len=16, seed=1)


@pytest.mark.parametrize("damage", [pytest.param("cut off", marks=pytest.mark.slow), "another byte"])
def test_what_is_not_what_the_digest_says_is_never_used(tmp_path, s3, encoder, damage):
    store = built(tmp_path, encoder)
    manifest = upload(s3, store, f"damage{len(damage)}")
    name = f"{store.shards[2].name}/tokens.bin"
    content = bytearray((store.folder / name).read_bytes())
    if damage == "cut off":
        del content[len(content) // 2 :]
    else:
        content[100] ^= 1
    s3.put(f"damage{len(damage)}/tokens/{name}", bytes(content))
    there = opened(manifest, tmp_path / "cache")
    told = "the server has .* bytes of it where .* belong" if damage == "cut off" else "cannot be read .*its digest"
    with pytest.raises(DataError, match=f"{name}: {told}"):
        there.tokens[:]
    assert not (tmp_path / "cache" / store.shards[2].files["tokens.bin"][1]).exists()
    assert not list((tmp_path / "cache").glob(".tmp-*"))
    s3.put(f"damage{len(damage)}/tokens/{name}", (store.folder / name).read_bytes())
    assert np.array_equal(there.tokens[:], store.tokens[:])


@pytest.mark.parametrize("length", [None, 7])
def test_a_server_that_sends_without_end_is_left(tmp_path, monkeypatch, length):
    """It says how long the file is, or does not. Reference: the bytes that were written."""
    pytest.importorskip("fsspec")

    class Endless:
        def invalidate_cache(self):
            """Nothing."""

        def info(self, address):
            return {"size": length}

        def get_file(self, address, path, callback):
            with open(path, "wb") as file:
                for _ in range(1000):
                    callback.relative_update(file.write(b"x" * 5))

    monkeypatch.setattr(remote, "file_system", lambda address: Endless())
    path = tmp_path / "tokens.bin"
    with pytest.raises(
        DataError, match=f"tokens.bin: the server has {length or 'more than 10'} bytes of it where 10 belong"
    ):
        remote.fetch_file("s3://b/tokens.bin", path, 10, lambda path: True)
    assert not path.exists() if length else path.stat().st_size == 15


def test_a_shard_of_the_cache_that_was_written_to_is_fetched_again(tmp_path, encoder):
    store = built(tmp_path, encoder)
    address = f"file://{store.folder}/manifest.json"
    opened(address, tmp_path / "cache").tokens[:]
    damaged = tmp_path / "cache" / store.shards[2].files["tokens.bin"][1]
    content = bytearray(damaged.read_bytes())
    content[10] ^= 1
    damaged.write_bytes(content)
    assert np.array_equal(opened(address, tmp_path / "cache").tokens[:], store.tokens[:])


READ = """
import sys
from pathlib import Path
from dataset.reading.disk_cache import DiskCache
from dataset.store.remote_shards import RemoteShards
from dataset.store.sharded import ShardedStore

store = ShardedStore(RemoteShards(sys.argv[1], DiskCache(Path(sys.argv[2]), 10**9)))
print("open", flush=True)
sys.stdin.readline()
sys.stdout.buffer.write(store.tokens[:].tobytes())
"""


@pytest.mark.slow
def test_a_shard_whose_download_is_killed_half_way_is_fetched_again(tmp_path, s3, encoder, monkeypatch):
    # Large enough that half of it does not wait in a buffer.
    monkeypatch.setattr(builder, "BLOCK_BYTES", 400_000)
    monkeypatch.setattr(dealing, "SHARD_BYTES", 1_200_000)
    store = open_or_build(write(tmp_path / "a.jsonl", TEXTS * 80), encoder, progress=False)
    assert isinstance(store, ShardedStore)
    address = upload(s3, store, "killed").removesuffix("/manifest.json")
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", READ, address, str(cache)]
    s3.stalled.clear()
    s3.go_on.clear()
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == b"open\n"
        s3.stalls.set()
        run.stdin.write(b"\n")
        run.stdin.flush()
        assert s3.stalled.wait(60)
        # Until the half that was sent has arrived.
        give_up = time.monotonic() + 30
        while not bytes_in_temporaries(cache) and time.monotonic() < give_up:
            time.sleep(0.02)
        run.send_signal(signal.SIGKILL)
    s3.stalls.clear()
    s3.go_on.set()
    assert bytes_in_temporaries(cache), "the test killed no download"
    again = subprocess.run(command, cwd=ROOT, input=b"\n", capture_output=True, timeout=120)
    assert again.stdout == b"open\n" + store.tokens[:].tobytes()
    assert not list(cache.glob(".tmp-*"))


def bytes_in_temporaries(cache):
    return sum(path.stat().st_size for path in cache.glob(".tmp-*/*"))


@pytest.mark.slow
def test_an_epoch_in_groups_keeps_to_the_limit_and_fetches_each_shard_once(tmp_path, s3, encoder, monkeypatch):
    """References: the batches of the store on the disk, and the sum of what the cache holds after each batch."""
    monkeypatch.setattr(grouped_plan, "GROUP_PIECES", 120)
    store = built(tmp_path, encoder)
    manifest = upload(s3, store, "epoch")
    needed = [
        sum(shard.files[name][0] for shard in store.shards for name in TRAINED_FILES) // 2,
        max(shard.n_bytes for shard in store.shards),
    ]
    # Room for two groups of the four or so, and for manifest and lengths.
    limit = max(needed[0], 5 * needed[1]) + 8000
    there = opened(manifest, tmp_path / "cache", limit)
    s3.requests.clear()
    largest = 0
    batches = []
    for one in (there, store):
        plan = grouped_plan.Groups(one, 16, seed=3).plan(0)
        assert isinstance(plan, GroupedPlan) and len(plan.groups.sizes()) >= 4
        schedule = UpdateSchedule(plan.n_rows, 8)
        batches.append([])
        for _, _, batch in make_loader(Assembler(one), plan, schedule):
            batches[-1].append(batch.input_ids.numpy())
            largest = max(largest, bytes_below(tmp_path / "cache"))
    for mine, theirs in zip(*batches, strict=True):
        assert np.array_equal(mine, theirs)
    assert largest <= limit < sum(shard.n_bytes for shard in store.shards) + 8000
    asked = Counter(path for path, _ in s3.contents_asked_for() if "shard-" in path)
    assert len(asked) == len(TRAINED_FILES) * len(store.shards) and set(asked.values()) == {1}


def test_the_next_group_is_fetched_while_one_is_trained(tmp_path, s3, encoder, monkeypatch):
    monkeypatch.setattr(grouped_plan, "GROUP_PIECES", 120)
    store = built(tmp_path, encoder)
    there = opened(upload(s3, store, "ahead"), tmp_path / "cache")
    groups = grouped_plan.Groups(there, 16, seed=3)
    plan = groups.plan(0)
    s3.requests.clear()
    plan.pieces([0])
    wanted = []
    for group in plan._order[:2]:
        for number in groups._shards_of_group(group):
            wanted.append(store.shards[number].name)
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        asked = {path.split("/")[-2] for path, _ in s3.contents_asked_for()}
        if asked == set(wanted):
            break
        time.sleep(0.02)
    assert asked == set(wanted), "those of the group that is planned and of the next one, and no others"


def test_a_cache_that_cannot_hold_a_group_is_told_at_once(tmp_path, s3, encoder):
    store = built(tmp_path, encoder)
    there = opened(upload(s3, store, "small"), tmp_path / "cache", 12_000)
    with pytest.raises(DataError, match="--cache_gb"):
        grouped_plan.Groups(there, 16, seed=3).plan(0)


def test_a_manifest_that_does_not_agree_with_itself_is_told(tmp_path, s3, encoder):
    """Its digest holds: anybody can compute one."""
    from dataset.store.format import digest_of_json

    store = built(tmp_path, encoder)
    address = upload(s3, store, "hostile")
    manifest = json.loads((store.folder / "manifest.json").read_text())
    del manifest["manifest_sha256"]
    manifest["shards"][0][7]["tokens.bin"][0] -= 2
    manifest["manifest_sha256"] = digest_of_json(manifest)
    s3.put("hostile/tokens/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(DataError, match="does not agree with itself"):
        opened(address, tmp_path / "cache").tokens[:]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_shards_on_s3_train_to_the_same_weights_as_their_text_on_the_disk(tmp_path, s3, data, num_workers, monkeypatch):
    monkeypatch.setattr(dealing, "SHARD_BYTES", 1000)
    from dataset.tokenizing.encoder import load_tokenizer

    encoder = DocumentEncoder(load_tokenizer(str(ROOT / "model")))
    store = open_or_build(str(data), encoder, cache_dir=str(tmp_path / "tokens"), progress=False)
    manifest = upload(s3, store, f"weights{num_workers}")
    digests = []
    for name, path in (("disk", data), ("s3", manifest)):
        train(data_path=path, out_dir=tmp_path / name, num_workers=num_workers, cache_dir=tmp_path / "cache" / name)
        digests.append(hashlib.sha256((tmp_path / name / "pretrain_16.pth").read_bytes()).hexdigest())
    assert digests[0] == digests[1]


def test_targets_of_a_resumed_epoch_are_those_of_the_documents(tmp_path, s3, encoder, monkeypatch):
    """Reference: a Counter of the targets of all documents; two ranks, then one."""
    monkeypatch.setattr(grouped_plan, "GROUP_PIECES", 120)
    store = built(tmp_path, encoder)
    manifest = upload(s3, store, "ledger")
    expected = Counter()
    for number in range(len(TEXTS)):
        expected.update(store.document(number)[1:].tolist())
    seen = Counter()
    row = 0
    for world_size, updates in ((2, 4), (1, 10**9)):
        corpus = Corpus([manifest], encoder, max_seq_len=16, seed=3, cache_dir=str(tmp_path / "cache"))
        plan = corpus.plan(0)
        schedule = UpdateSchedule(plan.n_rows, 12 // world_size, 1, world_size, row)
        last = min(schedule.first_update + updates, schedule.n_updates)
        for rank in range(world_size):
            for update, _, batch in make_loader(Assembler(corpus.store), plan, schedule, rank):
                if update >= last:
                    break
                if batch is not None:
                    seen.update(batch.targets[batch.targets != IGNORE].tolist())
        row = schedule.rows(last - 1)[1]
    assert seen == expected
