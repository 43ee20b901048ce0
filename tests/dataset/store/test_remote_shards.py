"""Shards behind an address. References: the store on the disk that they were copied from, and the limit of the cache."""

import hashlib
import json
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from common.errors import DataError
from dataset import grouped_plan
from dataset.corpus import Corpus
from dataset.grouped_plan import GroupedPlan
from dataset.loader import IGNORE, Assembler, UpdateSchedule, make_loader
from dataset.loader_workers import LoaderError
from dataset.reading import remote
from dataset.reading.disk_cache import DiskCache
from dataset.store import builder, dealing, remote_shards
from dataset.store.remote_shards import TRAINED_FILES, RemoteShards
from dataset.store.sharded import ShardedStore
from dataset.store.token_store import open_or_build
from dataset.tokenizing.encoder import DocumentEncoder
from tests.dataset.store.test_sharded import TEXTS, check_same, write
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import ROOT, train


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


def test_a_large_object_is_fetched_in_pieces(tmp_path, s3, monkeypatch):
    """Reference: the bytes that were stored. What is in memory at a time follows from the ranges that are asked for."""
    monkeypatch.setattr(remote, "PIECE_BYTES", 50_000)
    content = np.random.default_rng(0).bytes(430_000)
    address = s3.put("large/tokens.bin", content)
    path = tmp_path / "tokens.bin"

    def fetch():
        remote.fetch_file(address, path, len(content), lambda path: path.read_bytes() == content)

    s3.go_on.set()
    s3.stalls.set()
    s3.cuts.set()
    try:
        with pytest.raises(DataError, match="large/tokens.bin: cannot be read"):
            fetch()
    finally:
        s3.stalls.clear()
        s3.cuts.clear()
    before = len(s3.contents_asked_for())
    fetch()
    asked = [span for _, span in s3.contents_asked_for()[before:] if span]
    ranges = sorted(tuple(map(int, span.removeprefix("bytes=").split("-"))) for span in asked)
    assert ranges == [(begin, min(begin + 50_000, 430_000) - 1) for begin in range(0, 430_000, 50_000)]
    # Four beside each other, and the next four when these are here.
    first_four = {int(span.removeprefix("bytes=").split("-")[0]) for span in asked[:4]}
    assert first_four == {0, 50_000, 100_000, 150_000}
    assert path.read_bytes() == content


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
    plan.recipe([0])
    wanted = []
    for group in with_rows(plan)[:2]:
        for number in groups._shards_of_group(group):
            wanted.append(store.shards[number].name)
    assert len(set(wanted)) < len(store.shards)
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        asked = {path.split("/")[-2] for path, _ in s3.contents_asked_for() if path.endswith("tokens.bin")}
        if asked == set(wanted):
            break
        time.sleep(0.02)
    assert asked == set(wanted), "those of the group that is planned and of the next one, and no others"


def test_a_cache_that_cannot_hold_a_group_is_told_at_once(tmp_path, s3, encoder):
    store = built(tmp_path, encoder)
    there = opened(upload(s3, store, "small"), tmp_path / "cache", 12_000)
    with pytest.raises(DataError, match="--cache_gb"):
        grouped_plan.Groups(there, 16, seed=3).plan(0)


@pytest.fixture
def fetches(monkeypatch):
    """What is fetched from here on: .tokens, the shards of the tokens.bin so far, and .most, how many were under way at a time."""
    pytest.importorskip("fsspec")
    real = remote_shards.fetch_file
    lock = threading.Lock()
    seen = SimpleNamespace(tokens=[], now=0, most=0, seconds=0.0)

    def fetch_file(address, *rest):
        with lock:
            seen.now += 1
            seen.most = max(seen.most, seen.now)
        time.sleep(seen.seconds)
        real(address, *rest)
        with lock:
            seen.now -= 1
            if address.endswith("tokens.bin"):
                seen.tokens.append(address.split("/")[-2])

    monkeypatch.setattr(remote_shards, "fetch_file", fetch_file)
    return seen


def with_rows(plan):
    """The groups of a plan in their order, without those that have no stretch."""
    return [group for group in plan._order if plan.groups.sizes()[group].rows]


def two_elsewhere(tmp_path, encoder):
    """The stores of two sources, and the addresses of their manifests."""
    stores = []
    for name in ("a", "b"):
        texts = [f"{name} {text}" for text in TEXTS]
        stores.append(open_or_build(write(tmp_path / f"{name}.jsonl", texts), encoder, progress=False))
    return stores, [f"file://{store.folder}/manifest.json" for store in stores]


@pytest.mark.parametrize("shares", [(":0.5", ":0.5"), (":0.5:x2", ":0.5"), (":0.2..0.8", ":0.8..0.2")])
def test_sources_that_have_room_one_by_one_alone_are_refused_at_the_start(tmp_path, encoder, fetches, shares):
    """Reference: the bytes of their shards."""
    stores, addresses = two_elsewhere(tmp_path, encoder)
    paths = [address + share for address, share in zip(addresses, shares, strict=True)]
    of_each = [sum(shard.n_bytes for shard in store.shards) for store in stores]

    def start(limit_bytes):
        cache = {"cache_dir": str(tmp_path / "cache"), "cache_gb": limit_bytes / 1e9}
        return Corpus(paths, encoder, max_seq_len=16, seed=1, progress=False, **cache).plan(0)

    with pytest.raises(DataError, match="--cache_gb has room for"):
        start(max(of_each) + 10_000)
    assert not fetches.tokens
    # Some more for the manifests.
    assert start(sum(of_each) + 10_000).n_rows > 100


@pytest.mark.parametrize("shares", [(":0.5", ":0.5"), (":0.2..0.8", ":0.8..0.2")])
def test_the_next_groups_of_several_sources_are_fetched_ahead(tmp_path, encoder, fetches, shares, monkeypatch):
    """Reference: the shards of the groups. A plan by itself, and what is told of it, fetches no tokens."""
    monkeypatch.setattr(grouped_plan, "GROUP_PIECES", 200)
    monkeypatch.setattr(grouped_plan, "STRETCH_DOCUMENTS", 50)
    monkeypatch.setattr(remote_shards, "beside", lambda function, *arguments: function(*arguments))
    stores, addresses = two_elsewhere(tmp_path, encoder)
    paths = [address + share for address, share in zip(addresses, shares, strict=True)]
    corpus = Corpus(paths, encoder, max_seq_len=16, seed=1, progress=False, cache_dir=str(tmp_path / "cache"))
    plan = corpus.plan(0)
    assert plan.totals(0, plan.n_rows // 2).targets > 0 and not fetches.tokens
    plan.recipe([0])
    one = plan if isinstance(plan, GroupedPlan) else plan.sources[plan._source[0]].plan(0)
    wanted = Counter()
    for group in with_rows(one)[:2]:
        for number in one.groups._shards_of_group(group):
            store = np.searchsorted(corpus.store._shards_before, number, side="right") - 1
            wanted[stores[store].shards[number - corpus.store._shards_before[store]].name] += 1
    of_groups = Counter(fetches.tokens)
    assert 2 <= wanted.total() < sum(len(store.shards) for store in stores)
    # A stretch of neighbours may begin in a shard that the other group ends in.
    assert set(of_groups) == set(wanted) and of_groups.total() <= wanted.total()


@pytest.mark.parametrize("pieces", [120, 1 << 20])
def test_a_group_is_here_before_its_first_recipe(tmp_path, encoder, fetches, monkeypatch, capsys, pieces):
    """Several files at a time, and a line if it takes long. So no worker waits for a server while the trainer counts its silence."""
    monkeypatch.setattr(grouped_plan, "GROUP_PIECES", pieces)
    monkeypatch.setattr(remote_shards, "LINE_AFTER_S", 0.01)
    monkeypatch.setattr(remote_shards, "beside", lambda *_: None)
    store = built(tmp_path, encoder)
    address = f"file://{store.folder}/manifest.json"
    corpus = Corpus([address], encoder, max_seq_len=16, seed=3, cache_dir=str(tmp_path / "cache"))
    fetches.seconds = 0.03
    capsys.readouterr()
    plan = corpus.plan(0)
    plan.recipe([0])
    group = with_rows(plan)[0] if isinstance(plan, GroupedPlan) else 0
    shards = corpus._groups._shards_of_group(group)
    assert sorted(fetches.tokens) == [store.shards[number].name for number in shards]
    assert fetches.most <= remote_shards.FETCHED_AT_ONCE
    # Of a single shard the two files may share a lock, or the second one begin late.
    assert len(shards) == 1 or fetches.most > 1
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 1 and told[0].startswith("fetching ") and store.folder.name in told[0]
    done = len(fetches.tokens)
    plan.recipe([1])
    assert len(fetches.tokens) == done


def test_what_cannot_be_fetched_ends_the_batches_as_a_batch_that_cannot_be_made_does(tmp_path, encoder, monkeypatch):
    """So the other ranks hear of it."""
    monkeypatch.setattr(grouped_plan, "GROUP_PIECES", 120)
    store = built(tmp_path, encoder)
    address = f"file://{store.folder}/manifest.json"
    corpus = Corpus([address], encoder, max_seq_len=16, seed=3, cache_dir=str(tmp_path / "cache"), progress=False)
    plan = corpus.plan(0)

    def fetch_file(*_):
        raise DataError("the server is away")

    monkeypatch.setattr(remote_shards, "fetch_file", fetch_file)
    with pytest.raises(LoaderError, match="^the server is away$") as raised:
        next(make_loader(Assembler(corpus.store), plan, UpdateSchedule(plan.n_rows, 4)))
    assert raised.value.is_fault_of_data


def test_another_process_of_a_run_does_not_go_on_with_another_store(tmp_path, encoder):
    """Under the same address, on the disk and elsewhere."""
    stores, (address, _) = two_elsewhere(tmp_path, encoder)
    sent = [pickle.dumps(stores[0]), pickle.dumps(opened(address, tmp_path / "cache"))]
    for one in sent:
        assert pickle.loads(one).document(5).tolist() == stores[0].document(5).tolist()
    shutil.rmtree(stores[0].folder)
    shutil.copytree(stores[1].folder, stores[0].folder)
    for one in sent:
        with pytest.raises(DataError, match="another store has taken its place"):
            pickle.loads(one)


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
