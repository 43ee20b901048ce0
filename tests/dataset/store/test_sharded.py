"""Stores of shards. References: the one store of the same corpus, np.unique of its lengths, EpochPlan and a token ledger."""

import errno
import gzip
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from common.errors import DataError
from common.files import let_files_be_open
from dataset import grouped_plan
from dataset.corpus import Corpus
from dataset.grouped_plan import GroupedPlan
from dataset.loader import IGNORE, Assembler, UpdateSchedule, make_loader
from dataset.packing import EpochPlan
from dataset.sources import ConcatStore
from dataset.store import builder, dealing, sharded
from dataset.store import check as store_check
from dataset.store import format as store_format
from dataset.store.builder import load
from dataset.store.check import DigestCheck
from dataset.store.format import DamagedStore
from dataset.store.sharded import ShardedStore
from dataset.store.token_store import build_shard, open_or_build
from tests.helpers import ROOT

pytestmark = pytest.mark.usefixtures("small_shards")

TEXTS = [f"the cat {i} sat on " + "a mat, " * (i % 7) + "two " * (i % 3) for i in range(400)]


def lines_of(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write(path, texts=TEXTS):
    path.write_bytes(lines_of(texts))
    return str(path)


def write_folder(folder):
    """One file much larger than the others, and some of other kinds."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    write(folder / "a.jsonl", TEXTS[:300])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines_of(TEXTS[300:330])))
    parquet.write_table(arrow.table({"text": TEXTS[330:380]}), folder / "c.parquet", row_group_size=5)
    write(folder / "d.jsonl", TEXTS[380:])
    return str(folder)


def in_one(path, encoder, monkeypatch, cache_dir, **options):
    """The store of a corpus that is not cut."""
    with monkeypatch.context() as patch:
        patch.setattr(dealing, "SHARD_BYTES", 1 << 40)
        store = open_or_build(path, encoder, cache_dir=str(cache_dir), progress=False, **options)
    assert not isinstance(store, ShardedStore)
    return store


def blocks_encoded(monkeypatch):
    """The list that the blocks go to which are tokenised from here on."""
    encoded = []
    real = builder.encode_blocks

    def noted(blocks):
        for block in blocks:
            encoded.append(block)
            yield block

    monkeypatch.setattr(builder, "encode_blocks", lambda blocks, *rest: real(noted(blocks), *rest))
    return encoded


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_same(store, whole):
    """All that a store tells, by slices, by numbers and by arrays of numbers."""
    generator = np.random.default_rng(0)
    assert len(store) == len(whole) and store.max_token_id == whole.max_token_id
    assert store.total_text_bytes == whole.total_text_bytes and store.bad_lines.to_dict() == whole.bad_lines.to_dict()
    for name in ("tokens", "offsets", "text_bytes", "doc_hash"):
        there, here = getattr(whole, name), getattr(store, name)
        assert here.dtype == there.dtype and len(here) == len(there)
        assert np.array_equal(here[:], there) and np.array_equal(np.asarray(here), there)
        assert here[-1] == there[-1] and here[len(here) - 1] == there[-1]
        some = generator.integers(-len(there), len(there), (3, 50))
        assert np.array_equal(here[some], there[some])
        for _ in range(50):
            lo, hi = sorted(generator.integers(0, len(there) + 1, 2).tolist())
            assert np.array_equal(here[lo:hi], there[lo:hi]) and np.array_equal(here[lo:hi:3], there[lo:hi:3])
    assert store.lengths().tolist() == whole.lengths().tolist()
    assert store.document(37).tolist() == whole.document(37).tolist()


@pytest.mark.parametrize("num_procs", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["one file", "a folder"])
def test_shards_hold_the_documents_of_one_store_in_its_order(tmp_path, encoder, monkeypatch, num_procs, kind):
    path = write_folder(tmp_path / "data") if kind == "a folder" else write(tmp_path / "a.jsonl")
    store = open_or_build(path, encoder, num_procs=num_procs, progress=False)
    assert isinstance(store, ShardedStore) and len(store.shards) >= 5
    check_same(store, in_one(path, encoder, monkeypatch, tmp_path / "one"))
    # As a loader's process gets it, and as the next start opens it.
    monkeypatch.setattr(builder, "encode_blocks", None)
    for again in (pickle.loads(pickle.dumps(store)), open_or_build(path, encoder)):
        assert again.folder == store.folder and again.document(399).tolist() == store.document(399).tolist()


def test_the_manifest_tells_counts_digests_and_lengths_of_each_shard(tmp_path, encoder):
    store = open_or_build(write(tmp_path / "a.jsonl"), encoder, progress=False)
    for number, part in enumerate(store.parts()):
        entry = store.shards[number]
        tokens, documents = store.lengths_of_shard(number)
        expected = np.unique(part.lengths(), return_counts=True)
        assert np.array_equal(tokens, expected[0]) and np.array_equal(documents, expected[1])
        assert (entry.documents, entry.tokens) == (len(part), len(part.tokens))
        assert entry.n_bytes == sum(path.stat().st_size for path in part.folder.iterdir())
        assert entry.meta == json.loads((part.folder / "meta.json").read_text())["meta_sha256"]


@pytest.mark.parametrize("n", [2, 3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["one file", "a folder"])
def test_parts_in_any_order_give_the_bytes_of_one_run(tmp_path, encoder, monkeypatch, n, kind):
    """2 parts have whole shards each, 40 are more than there are blocks."""
    monkeypatch.setattr(dealing, "SHARED_FROM", 1 / 2)
    path = write_folder(tmp_path / "data") if kind == "a folder" else write(tmp_path / "a.jsonl")
    whole = open_or_build(path, encoder, cache_dir=str(tmp_path / "in one go"), progress=False)
    order = (np.random.default_rng(n).permutation(n) + 1).tolist()
    parts = [build_shard(path, encoder, (k, n), cache_dir=str(tmp_path / "parts"), progress=False) for k in order]
    assert parts[:-1] == [None] * (n - 1)
    assert files_of(parts[-1].folder) == files_of(whole.folder)
    assert [path.name for path in (tmp_path / "parts").glob("*/")] == [whole.folder.name], "nothing else is left"


@pytest.mark.parametrize("n", [1, 2, pytest.param(9, marks=pytest.mark.slow)])
def test_bad_lines_are_counted_as_in_one_store(tmp_path, encoder, monkeypatch, n):
    monkeypatch.setattr(dealing, "SHARED_FROM", 1 / 2)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[5] = lines[250] = lines[390] = "nonsense"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    path = str(tmp_path / "a.jsonl")
    whole = in_one(path, encoder, monkeypatch, tmp_path / "one", skip_bad_lines=True)
    for k in range(1, n + 1):
        store = build_shard(path, encoder, (k, n), skip_bad_lines=True, progress=False)
    assert isinstance(store, ShardedStore) and store.bad_lines.total == 3
    check_same(store, whole)
    with pytest.raises(DataError, match=r"a\.jsonl:6: "):
        open_or_build(path, encoder, progress=False)


def test_the_first_bad_lines_are_kept_after_a_damage_too(tmp_path, encoder, monkeypatch):
    """The shard with the first ones is made last."""
    lines = [json.dumps({"text": text}) for text in TEXTS]
    for number in (5, 250, 300, 390):
        lines[number] = "nonsense"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    path = str(tmp_path / "a.jsonl")
    store = open_or_build(path, encoder, skip_bad_lines=True, progress=False, num_procs=1)
    before = store.bad_lines.to_dict()
    (store.folder / store.shards[0].name / "offsets.bin").unlink()
    again = open_or_build(path, encoder, skip_bad_lines=True, progress=False, num_procs=1)
    assert again.bad_lines.to_dict() == before
    assert [fault["line"] for fault in before["places"]["not JSON"]] == [6, 251, 301]


def test_a_part_makes_whole_shards_and_reads_nothing_else_of_a_large_file(tmp_path, encoder, monkeypatch):
    """Reference: the byte ranges of the blocks that were tokenised."""
    path = write(tmp_path / "a.jsonl", TEXTS * 3)
    size = os.path.getsize(path)
    ranges = []
    real = builder.encode_blocks

    def encode_blocks(blocks, *rest):
        def noted():
            for block in blocks:
                ranges[-1].append((block.start, block.end))
                yield block

        return real(noted(), *rest)

    monkeypatch.setattr(builder, "encode_blocks", encode_blocks)
    for k in (1, 2, 3):
        ranges.append([])
        build_shard(path, encoder, (k, 3), progress=False, num_procs=1)
    for of_part in ranges:
        assert abs(sum(end - begin for begin, end in of_part) - size / 3) <= 4000
        # Neighbours, but for the borders of shards.
        gaps = sum(before[1] != after[0] for before, after in pairwise(of_part))
        assert gaps <= len(of_part) / 4
    together = sorted(span for of_part in ranges for span in of_part)
    assert together[0][0] == 0 and together[-1][1] == size
    assert all(before[1] == after[0] for before, after in pairwise(together))


def test_an_earlier_store_in_one_is_opened_as_it_is(tmp_path, encoder, monkeypatch):
    path = write(tmp_path / "a.jsonl")
    whole = in_one(path, encoder, monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(builder, "encode_blocks", None)
    assert open_or_build(path, encoder, cache_dir=str(tmp_path / "cache")).folder == whole.folder


BUILD = """
import sys, os
from dataset.store import builder, dealing, writer
from dataset.store.token_store import build_shard, open_or_build
from dataset.tokenizing.encoder import DocumentEncoder
from tests.dataset.tokenizing.test_encoder import small_tokenizer

path, cache, after, shard = sys.argv[1:]
builder.BLOCK_BYTES, dealing.SHARD_BYTES, dealing.SHARED_FROM, writer.CHECKPOINT_S = 1000, 4000, 0.5, 0.0
left = int(after)
add = writer.StoreWriter.add

def add_and_die(self, block, place):
    global left
    add(self, block, place)
    left -= 1
    if not left:
        os.kill(os.getpid(), 9)

writer.StoreWriter.add = add_and_die
encoder = DocumentEncoder(small_tokenizer())
part = tuple(map(int, shard.split("/"))) if shard else None
build_shard(path, encoder, part, cache_dir=cache, progress=False, num_procs=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["", "1/2"])
def test_a_build_that_is_killed_keeps_its_shards_and_ends_with_the_same_bytes(tmp_path, encoder, monkeypatch, shard):
    path = write(tmp_path / "a.jsonl")
    monkeypatch.setattr(dealing, "SHARED_FROM", 1 / 2)
    whole = open_or_build(path, encoder, cache_dir=str(tmp_path / "whole"), progress=False)
    cache = str(tmp_path / "cache")
    command = [
        sys.executable,
        "-c",
        BUILD,
    ]
    blocks_until_killed = (2, 5, 3)
    for after in blocks_until_killed:
        killed = subprocess.run([*command, path, cache, str(after), shard], cwd=ROOT, timeout=120)
        assert killed.returncode == -signal.SIGKILL
    (temp,) = (tmp_path / "cache").glob(".tmp-*")
    assert len(list(temp.glob("shard-*"))) >= 2, "what was complete is kept"
    encoded = blocks_encoded(monkeypatch)
    if shard:
        assert build_shard(path, encoder, (1, 2), cache_dir=cache, progress=False, num_procs=1) is None
        store = build_shard(path, encoder, (2, 2), cache_dir=cache, progress=False, num_procs=1)
    else:
        store = open_or_build(path, encoder, cache_dir=cache, progress=False, num_procs=1)
    n_blocks = -(-os.path.getsize(path) // 1000)
    assert len(encoded) == n_blocks - sum(blocks_until_killed)
    assert files_of(store.folder) == files_of(whole.folder)


@pytest.mark.parametrize("file", ["tokens.bin", "offsets.bin", "meta.json", "../manifest.json", "../lengths.bin"])
def test_a_damaged_shard_is_found_and_made_anew_alone(tmp_path, encoder, monkeypatch, file):
    monkeypatch.setattr(store_check, "CHECKED_AT_ONCE", 0)
    monkeypatch.setattr(store_format, "CHECKED_AT_ONCE", 0)
    path = write(tmp_path / "a.jsonl")
    store = open_or_build(path, encoder, progress=False)
    before = files_of(store.folder)
    damaged = store.folder / store.shards[3].name / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    if file == "tokens.bin":
        with pytest.raises(DataError, match=rf"{store.shards[3].name}/tokens.bin is damaged"):
            DigestCheck([load(store.folder)]).raise_if_damaged(wait_s=60)
    elif file.startswith(".."):
        with pytest.raises(DamagedStore):
            load(store.folder)
    else:
        with pytest.raises(DataError, match=rf"{store.shards[3].name} is damaged"):
            load(store.folder).shard(3)
    encoded = blocks_encoded(monkeypatch)
    again = open_or_build(path, encoder, progress=False, num_procs=1)
    assert files_of(again.folder) == before
    if not file.startswith(".."):
        assert 3 <= len(encoded) <= 4, "a shard has four blocks"
        assert again.document(200).tolist() == store.document(200).tolist()


def test_what_nfs_keeps_of_deleted_files_is_no_damage(tmp_path, encoder):
    store = open_or_build(write(tmp_path / "a.jsonl"), encoder, progress=False)
    folder = store.folder / store.shards[3].name
    (folder / ".nfs000000000001").write_bytes(b"deleted while it was open")
    load(store.folder)
    (folder / "doc_hash.bin").unlink()
    with pytest.raises(DamagedStore, match=f"{store.shards[3].name} is not whole"):
        load(store.folder)


def test_a_shard_that_cannot_be_opened_now_is_not_taken_for_damaged(tmp_path, encoder, monkeypatch):
    store = open_or_build(write(tmp_path / "a.jsonl"), encoder, progress=False)
    before = files_of(store.folder)

    def no_more_files(folder):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(sharded, "TokenStore", no_more_files)
    with pytest.raises(DataError, match=rf"{store.shards[3].name} cannot be read now: Too many open files"):
        load(store.folder).shard(3)
    assert files_of(store.folder) == before


@pytest.mark.parametrize("file", ["tokens.bin", "offsets.bin"])
def test_nothing_is_deleted_of_a_store_whose_text_is_not_here(tmp_path, encoder, monkeypatch, file):
    """As it is where a run names the manifest."""
    monkeypatch.setattr(store_check, "CHECKED_AT_ONCE", 0)
    monkeypatch.setattr(store_format, "CHECKED_AT_ONCE", 0)
    built = open_or_build(write(tmp_path / "a.jsonl"), encoder, progress=False)
    store = sharded.ShardedStore(sharded.ShardFolder(built.folder, text_is_known=False))
    damaged = built.folder / built.shards[3].name / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    before = files_of(built.folder)
    with pytest.raises(DataError, match="again from where it was made"):
        DigestCheck([store]).raise_if_damaged(wait_s=60)
        store.shard(3)
    assert files_of(built.folder) == before


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_more_files_may_be_open_as_far_as_the_system_allows(monkeypatch):
    import resource

    limits = [(1024, 20_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.append(both))
    let_files_be_open(16_384)
    let_files_be_open(30_000)
    let_files_be_open(5_000)
    assert limits == [(1024, 20_000), (16_384, 20_000), (20_000, 20_000)]


def test_machines_without_a_common_disk_hand_their_shards_over(tmp_path, encoder, monkeypatch):
    """As docs/data.md says: their folders are copied to one machine, where any of the commands is run once more."""
    monkeypatch.setattr(dealing, "SHARED_FROM", 1 / 2)
    path = write(tmp_path / "a.jsonl")
    whole = open_or_build(path, encoder, cache_dir=str(tmp_path / "whole"), progress=False)
    for k in (1, 2):
        assert build_shard(path, encoder, (k, 2), cache_dir=str(tmp_path / str(k)), progress=False) is None
    for folder in (tmp_path / "2").glob(".tmp-*/shard-*"):
        shutil.copytree(folder, tmp_path / "1" / folder.parent.name / folder.name)
    monkeypatch.setattr(builder, "encode_blocks", lambda blocks, *_: (pytest.fail("tokenised") for _ in blocks))
    store = build_shard(path, encoder, (1, 2), cache_dir=str(tmp_path / "1"), progress=False)
    assert files_of(store.folder) == files_of(whole.folder)


def test_what_processes_are_at_work_on_is_not_cleared_up_by_others(tmp_path, encoder, monkeypatch):
    """A process with --shard has a lock of its own, and may not have made anything durable yet."""
    monkeypatch.setattr(dealing, "SHARED_FROM", 1 / 2)
    path = write(tmp_path / "a.jsonl")
    cache = str(tmp_path / "cache")
    real = builder.encode_blocks
    seen = []

    def encode_blocks(blocks, *rest):
        for number, result in enumerate(real(blocks, *rest)):
            if number == 2 and not seen:
                seen.append(True)
                other = write(tmp_path / "b.jsonl", TEXTS[:20])
                open_or_build(other, encoder, cache_dir=cache, progress=False)
            yield result

    monkeypatch.setattr(builder, "encode_blocks", encode_blocks)
    assert build_shard(path, encoder, (1, 2), cache_dir=cache, progress=False, num_procs=1) is None
    assert isinstance(build_shard(path, encoder, (2, 2), cache_dir=cache, progress=False, num_procs=1), ShardedStore)
    assert seen


@pytest.mark.parametrize("name", ["../../etc", "shard-1/..", "shard-", "meta", 7])
def test_a_manifest_names_no_place_outside_of_its_store(tmp_path, encoder, name):
    """Its digest holds: anybody can compute one."""
    store = open_or_build(write(tmp_path / "a.jsonl"), encoder, progress=False)
    file = store.folder / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["manifest_sha256"]
    manifest["shards"][0][0] = name
    manifest["manifest_sha256"] = store_format.digest_of_json(manifest)
    file.write_text(json.dumps(manifest))
    with pytest.raises(DamagedStore):
        load(store.folder)


def test_groups_are_planned_from_the_manifest_and_open_no_shard(tmp_path, encoder, monkeypatch):
    monkeypatch.setattr(grouped_plan, "GROUP_PIECES", 120)
    store = open_or_build(write(tmp_path / "a.jsonl"), encoder, progress=False)
    opened = []
    real = ShardedStore.shard
    monkeypatch.setattr(ShardedStore, "shard", lambda self, i: opened.append(i) or real(self, i))
    for options in ({}, {"pack": False}, {"long_documents": "truncate"}):
        opened.clear()
        groups = grouped_plan.Groups(store, 16, seed=5, **options)
        assert groups.n_groups >= 3
        plan = groups.plan(epoch=1)
        totals = plan.totals(0, plan.n_rows)
        assert opened == []
        # Reference: each group planned.
        for group, size in enumerate(groups.sizes()):
            of_group = groups.plan_of_group(group, 1)
            assert (of_group.n_rows, of_group.totals(0, of_group.n_rows)) == (size.rows, size.totals)
        assert totals.targets == sum(size.totals.targets for size in groups.sizes())


@pytest.mark.parametrize("val_fraction", [0.0, 0.3])
def test_a_shard_that_is_larger_than_a_group_is_divided(tmp_path, encoder, monkeypatch, val_fraction):
    """A compressed file makes one shard, whatever its size. References: the bound, EpochPlan's pieces, the shards of the rows."""
    monkeypatch.setattr(grouped_plan, "GROUP_PIECES", 120)
    monkeypatch.setattr(grouped_plan, "STRETCH_PIECES", 30)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines_of(TEXTS * 2)))
    write(folder / "b.jsonl", TEXTS[:200])
    corpus = Corpus([str(folder)], encoder, max_seq_len=16, seed=3, val_fraction=val_fraction, progress=False)
    store = corpus.store
    assert store.shards[0].documents >= 800 and len(store.shards) > 2
    groups = corpus._groups
    assert groups.n_groups > 5 and max(size.totals.documents for size in groups.sizes()) <= 150
    pieces = []
    for group in range(groups.n_groups):
        documents = groups.documents_of_group(group)
        plan = groups.plan_of_group(group, 0)
        pieces += [piece for row in range(plan.n_rows) for piece in plan.pieces_of_row(row)]
        shards = np.unique(np.searchsorted(store.shard_bounds, documents, side="right") - 1)
        assert set(groups._shards_of_group(group)) == set(shards.tolist())
    at_once = EpochPlan(store, 16, 3, 0, documents=corpus.documents)
    assert sorted(pieces) == sorted(piece for row in range(at_once.n_rows) for piece in at_once.pieces_of_row(row))


def test_several_stores_as_one_read_no_shard_until_it_is_asked_for(tmp_path, encoder, monkeypatch):
    """Reference: the stores' own arrays, end to end. Offsets of all documents would take 8 bytes of each, on every rank."""
    stores = []
    for name in ("a", "b", "c"):
        path = write(tmp_path / f"{name}.jsonl", [f"{name} {text}" for text in TEXTS[: 100 if name == "b" else 400]])
        stores.append(open_or_build(path, encoder, progress=False))
    opened = []
    shard = ShardedStore.shard
    monkeypatch.setattr(ShardedStore, "shard", lambda store, i: opened.append(i) or shard(store, i))
    together = ConcatStore(stores)
    assert not opened
    assert together.offsets[450] == stores[0].offsets[400] + stores[1].offsets[50] and len(set(opened)) <= 3
    shifts = np.cumsum([0] + [len(store.tokens) for store in stores])
    offsets = [store.offsets[:-1] + shift for store, shift in zip(stores, shifts[:-1], strict=True)]
    assert together.offsets[:].tolist() == np.concatenate([*offsets, shifts[-1:]]).tolist()
    bounds = [first + store.shard_bounds[:-1] for store, first in zip(stores, together.bounds[:-1], strict=True)]
    assert together.shard_bounds.tolist() == [*np.concatenate(bounds).tolist(), len(together)]


@pytest.mark.parametrize("val_fraction", [0.0, 0.3])
def test_the_ledger_is_exact_over_groups_resumes_and_world_sizes(tmp_path, encoder, monkeypatch, val_fraction):
    """Reference: a Counter of the targets of all documents."""
    monkeypatch.setattr(grouped_plan, "GROUP_PIECES", 120)
    corpus = Corpus(
        [write(tmp_path / "a.jsonl")], encoder, max_seq_len=16, seed=3, val_fraction=val_fraction, progress=False
    )
    held_out = set() if corpus.val_documents is None else set(corpus.val_documents.tolist())
    expected = Counter()
    for number in range(len(corpus.store)):
        if number not in held_out:
            expected.update(corpus.store.document(number)[1:].tolist())
    for epoch in range(2):
        plan = corpus.plan(epoch)
        assert isinstance(plan, GroupedPlan)
        seen = Counter()
        documents = Counter()
        row = 0
        # Another number of ranks after each resume, with 12 rows an update.
        for world_size, updates in ((2, 3), (1, 2), (3, 10**9)):
            schedule = UpdateSchedule(plan.n_rows, 12 // world_size, 1, world_size, row)
            last = min(schedule.first_update + updates, schedule.n_updates)
            for rank in range(world_size):
                for update, _, batch in make_loader(Assembler(corpus.store), corpus.plan(epoch), schedule, rank):
                    if update >= last:
                        break
                    if batch is not None:
                        seen.update(batch.targets[batch.targets != IGNORE].tolist())
            for update in range(schedule.first_update, last):
                lo, hi = schedule.rows(update)
                documents.update(plan.documents_of(lo, hi))
            row = schedule.rows(last - 1)[1]
        assert row == plan.n_rows and seen == expected
        assert set(documents) == set(range(len(corpus.store))) - held_out


def test_a_small_corpus_has_the_rows_of_one_store(tmp_path, encoder, monkeypatch):
    path = write(tmp_path / "a.jsonl")
    plans = []
    for cut in (4000, 1 << 40):
        monkeypatch.setattr(dealing, "SHARD_BYTES", cut)
        corpus = Corpus([path], encoder, max_seq_len=16, seed=3, progress=False, cache_dir=str(tmp_path / str(cut)))
        plans.append(corpus.plan(0).recipe(range(corpus.plan(0).n_rows)))
    for one, other in zip(*plans, strict=True):
        assert np.array_equal(one, other)


def test_copies_are_left_out_of_shards_too(tmp_path, encoder, monkeypatch):
    path = write(tmp_path / "a.jsonl", TEXTS + TEXTS[:150])
    corpus = Corpus([path], encoder, max_seq_len=16, seed=3, deduplicate="exact", progress=False)
    assert [corpus.store.document(i).tolist() for i in range(len(corpus.store))] == [
        ids.tolist() for ids in map(np.asarray, encoder.encode(TEXTS))
    ]
