"""The figures of the data engine: speed of tokenising and loading, start, packing, planning, mixture, memory.

    python benchmarks/data.py                          # all but the huge corpus, about 5 minutes on two cores
    python benchmarks/data.py --only start,loader      # of: tokenise, start, packing, planning, loader, mixture
    python benchmarks/data.py --huge 5 --work huge    # a 5 GB jsonl: disk for 8 GB, about 10 minutes on two cores

The text is English and Chinese Wikipedia (docs/corpora.md), or the documentation inside the installed Python where
MINIMIND_REFERENCE leads to none. Prints a markdown table. Rates come from alternating runs and are medians, so that
other processes disturb them less. Memory is read from /proc, so it runs on Linux alone.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    from common.start import begin

    begin(ends_at_ctrl_c=False)
    # --help and wrong flags are answered before torch is imported, which takes seconds.
    from benchmarks.arguments import data_parser

    data_parser().parse_args()

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from benchmarks.arguments import DATA_SECTIONS, data_parser
from benchmarks.bench import corpus_files
from benchmarks.reference import CORPORA
from dataset.corpus import Corpus
from dataset.grouped_plan import Groups
from dataset.loader import Assembler, UpdateSchedule, make_loader
from dataset.packing import EpochPlan
from dataset.store.sharded import ShardedStore, ShardFolder
from dataset.store.token_store import open_or_build
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from trainer.machine.command_line import run_cli

CORES = len(os.sched_getaffinity(0))
T = 512
# Synthetic lengths come again after so many documents (a power of two), and of an epoch in groups so many are planned.
REPEATED_BITS = 20
TIMED_GROUPS = 12
# Of a shard of a store: about what 256 MB of text have.
SHARD_DOCUMENTS = 1 << 18
# Texts are read first; whole batches, so that the tokenizer's own threads (RAYON_NUM_THREADS) have work
BARE = """
import json, sys, time
from tokenizers import Tokenizer
texts = [json.loads(line)["text"] for file in sys.argv[2:] for line in open(file, encoding="utf-8", newline="\\n")]
tokenizer = Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
tokenizer.encode_batch_fast(texts[:100], add_special_tokens=False)
start = time.perf_counter()
for i in range(0, len(texts), 2000):
    tokenizer.encode_batch_fast(texts[i:i + 2000], add_special_tokens=False)
print(time.perf_counter() - start)
"""
START = """
import sys, time
began = time.perf_counter()
sys.path[0] = sys.argv[1]
from dataset.corpus import Corpus
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
encoder = DocumentEncoder(load_tokenizer(sys.argv[1] + "/model"))
imported = time.perf_counter()
corpus = Corpus([sys.argv[2]], encoder, max_seq_len=512, seed=42, cache_dir=sys.argv[3])
opened = time.perf_counter()
corpus.plan(0)
print(imported - began, opened - imported, time.perf_counter() - opened)
"""


# Of the table: what, what is wanted, what was measured.
Row = tuple[str, str, str]


def sources() -> list[str]:
    """(English, Chinese) files; without reference material both are the embedded corpus."""
    return [str(file) for file in (corpus_files() * 2)[:2]]


def repeated(path: Path, size: float) -> Path:
    """A jsonl of at least `size` bytes: all corpora over and over."""
    if not path.exists():
        contents = [file.read_bytes() for file in sorted(CORPORA.glob("*.train.jsonl"))]
        contents = contents or [Path(sources()[0]).read_bytes()]
        part = path.with_suffix(".part")
        with open(part, "wb") as out:
            while out.tell() < size:
                out.writelines(contents)
        part.rename(path)
    return path


def python(code: str, *arguments: object, **environment: str) -> list[float]:
    """The last three words, or fewer, that a fresh process with this code prints, as floats."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    out = subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True, text=True)
    return [float(word) for word in out.stdout.split()[-3:]]


def tokenise(work: Path, encoder: DocumentEncoder) -> Iterator[Row]:
    """The tokenizers library alone, a store made with it, and a store made with tiktoken, in turns."""
    files = sorted(set(sources()))
    megabytes = sum(Path(file).stat().st_size for file in files) / 1e6
    threads = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(CORES)}
    bare = []
    by_library: list[float] = []
    by_default: list[float] = []
    for i in range(5):
        bare += python(BARE, ROOT / "model", *files, **threads)
        for seconds, allowed in ((by_library, False), (by_default, True)):
            fresh = DocumentEncoder(load_tokenizer(ROOT / "model"))
            fresh.may_use_tiktoken = allowed
            began = time.perf_counter()
            cache = work / f"fresh{i}{allowed}"
            open_or_build(files, fresh, cache_dir=str(cache), num_procs=CORES, progress=False)
            seconds.append(time.perf_counter() - began)
            shutil.rmtree(cache)
    comparisons = (
        ("without tiktoken, against bare `encode_batch_fast`", ">= 70 %", by_library, bare),
        ("as it is, against without tiktoken", "", by_default, by_library),
    )
    for name, wanted, ours, other in comparisons:
        ratios = [theirs / mine for theirs, mine in zip(other, ours, strict=True)]
        rates = f"{megabytes / median(ours):.1f} MB/s against {megabytes / median(other):.1f}"
        measured = f"{median(ratios):.0%} ({min(ratios):.0%} to {max(ratios):.0%}; {rates})"
        yield f"tokenising {megabytes:.0f} MB, {CORES} cores, {name}", wanted, measured


def start(work: Path, encoder: DocumentEncoder) -> Iterator[Row]:
    data = repeated(work / "200mb.jsonl", 200e6 if CORPORA.exists() else 20e6)
    cache = work / "start"
    # The hash of a file that has just been written is not remembered.
    time.sleep(4)
    open_or_build(str(data), encoder, cache_dir=str(cache), progress=False)
    imports, opened, planned = np.median([python(START, ROOT, data, cache) for _ in range(3)], axis=0)
    yield (
        f"second start on {data.stat().st_size / 1e6:.0f} MB: data ready",
        "< 2 s",
        (f"{opened + planned:.2f} s (store {opened:.3f}, plan {planned:.3f})"),
    )
    began = time.perf_counter()
    with trainer(data, cache, work / "out", "--num_workers", "0") as (process, lines):
        first = next(time.perf_counter() - began for line in lines if "loss:" in line)
        stop(process, lines)
    yield "... the whole trainer until its first log line", "", f"{first:.1f} s (imports and tokenizer {imports:.1f})"


def packing(work: Path, encoder: DocumentEncoder) -> Iterator[Row]:
    plan = corpus_of(work, encoder).plan(0)
    yield f"packing at {T}: positions that hold a token", ">= 98 %", f"{plan.fill:.4%} of {plan.n_rows:,} rows"


def planning(work: Path, encoder: DocumentEncoder) -> Iterator[Row]:
    lengths = np.random.default_rng(0).lognormal(5.2, 1, 10_000_000).astype(np.int64) + 2
    store = SimpleNamespace(offsets=np.concatenate(([0], np.cumsum(lengths))))
    del lengths
    before = resident(os.getpid())["anonymous"]
    with Sampler(0.005) as sampler:
        began = time.perf_counter()
        plan = EpochPlan(cast(Any, store), T, 42, 0)
        seconds = time.perf_counter() - began
    peak = sampler.peak("anonymous") - before
    yield (
        f"planning 10 M documents ({plan.n_rows / 1e6:.1f} M rows)",
        "< 10 s, < 200 MB",
        (f"{seconds:.1f} s, {peak / 1e6:.0f} MB"),
    )
    del plan, store
    yield from planning_in_groups(1_000_000_000)


class ManyDocuments:
    """`offsets` of very many synthetic documents, computed where they are asked for: the same random lengths again and again."""

    dtype = np.dtype(np.int64)

    def __init__(self, n: int) -> None:
        self.n = n
        lengths = np.random.default_rng(0).lognormal(5.2, 1, 1 << REPEATED_BITS).astype(np.int64) + 2
        self.tokens_of_block = int(lengths.sum())
        self.in_block = np.cumsum(lengths) - lengths

    def __len__(self) -> int:
        return self.n + 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        at = np.where(np.asarray(index) < 0, index + np.int64(len(self)), index)
        return (at >> REPEATED_BITS) * self.tokens_of_block + self.in_block[at & ((1 << REPEATED_BITS) - 1)]


class ManyShards(ShardedStore):
    """The synthetic documents in shards, as a manifest tells of them."""

    def __init__(self, n: int) -> None:
        self.offsets = cast(Any, ManyDocuments(n))
        self.shard_bounds = np.append(np.arange(0, n, SHARD_DOCUMENTS), n)
        self.tokens = cast(Any, range(int(self.offsets[-1])))
        self.shards = []
        self.place = ShardFolder(Path())
        for documents, tokens in zip(np.diff(self.shard_bounds), np.diff(self.offsets[self.shard_bounds]), strict=True):
            self.shards.append(cast(Any, SimpleNamespace(documents=int(documents), tokens=int(tokens))))
        # As lengths.bin has them. The documents come again and again, and so do the shards.
        self.lengths_of = lru_cache(self._count)

    def lengths_of_shard(self, i: int) -> tuple[Any, Any]:
        lo, hi = self.shard_bounds[i : i + 2].tolist()
        return self.lengths_of(lo & ((1 << REPEATED_BITS) - 1), hi - lo)

    def _count(self, lo: int, documents: int) -> tuple[Any, Any]:
        return np.unique(np.diff(self.offsets[lo : lo + documents + 1]), return_counts=True)


def planning_in_groups(n: int) -> Iterator[Row]:
    """An epoch of so many documents: its division, and groups from its beginning to its end."""
    before = resident(os.getpid())["anonymous"]
    store = ManyShards(n)
    with Sampler(0.005) as sampler:
        began = time.perf_counter()
        groups = Groups(store, T, 42)
        plan = groups.plan(0)
        seconds = time.perf_counter() - began
    peak = sampler.peak("anonymous") - before
    yield (
        f"planning {n / 1e6:,.0f} M documents: all lengths counted, {groups.n_groups} groups ({plan.n_rows / 1e6:.1f} M rows)",
        "once a start",
        f"{seconds:.1f} s, {peak / 1e6:.0f} MB",
    )
    times = []
    peaks = []
    fills = []
    for group in range(0, groups.n_groups, max(1, groups.n_groups // TIMED_GROUPS)):
        before = resident(os.getpid())["anonymous"]
        with Sampler(0.005) as sampler:
            began = time.perf_counter()
            of_group = groups.plan_of_group(group, 0)
            times.append(time.perf_counter() - began)
        peaks.append(sampler.peak("anonymous") - before)
        fills.append(of_group.fill)
        del of_group
    yield (
        f"... a group, the slowest and the largest of {len(times)} ({min(fills):.2%} full)",
        "< 5 s, < 200 MB",
        f"{max(times):.1f} s (median {median(times):.1f}), {max(peaks) / 1e6:.0f} MB",
    )


def loader(work: Path, encoder: DocumentEncoder) -> Iterator[Row]:
    corpus = corpus_of(work, encoder)
    plan = corpus.plan(0)
    cores = os.sched_getaffinity(0)
    schedule = UpdateSchedule(plan.n_rows, 32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rates: dict[int, list[float]] = {0: [], 1: []}
    for workers in (0, 1) * 5:
        if not workers:
            os.sched_setaffinity(0, {min(cores)})
        batches = make_loader(Assembler(corpus.store), plan, schedule, num_workers=workers)
        # The start of the worker process is not counted.
        next(batches)
        began = time.perf_counter()
        tokens = 0
        for _, _, batch in batches:
            assert batch is not None
            tokens += batch.n_targets
        rates[workers].append(tokens / (time.perf_counter() - began) / 1e6)
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    for workers, name in enumerate(("in the trainer's process, one core", "through one worker process")):
        yield f"loader {name}", ">= 5 M tokens/s", f"{median(rates[workers]):.1f} M (best {max(rates[workers]):.1f})"


def mixture(work: Path, encoder: DocumentEncoder) -> Iterator[Row]:
    asked = (0.7, 0.3)
    data = [f"{file}:{share}" for file, share in zip(sources(), asked, strict=True)]
    corpora = [corpus_of(work, encoder, data) for _ in range(2)]
    boundary = int(cast(Any, corpora[0].store).bounds[1])
    shares = []
    for epoch in range(3):
        plans = [corpus.plan(epoch) for corpus in corpora]
        pieces, again = (plan.pieces(range(plan.n_rows)) for plan in plans)
        assert all(map(np.array_equal, pieces, again)), "two plans differ"
        _, document, _, pairs = pieces
        # A pair is an input and its target, so these are the trained tokens.
        shares.append(pairs[document < boundary].sum() / pairs.sum())
    yield (
        f"mixture: share of the first source, asked {asked[0]:.0%}, in 3 epochs (the same when planned again)",
        ("within 1 %"),
        ", ".join(f"{share:.3%}" for share in shares),
    )


def huge(work: Path, gigabytes: float, seconds: float = 60) -> Iterator[Row]:
    """Tokenise and train with the trainer itself; sample the memory of all its processes."""
    data = repeated(work / f"{gigabytes:g}gb.jsonl", gigabytes * 1e9)
    # Tokenising is measured too, so no store may be there.
    shutil.rmtree(work / "huge", ignore_errors=True)
    began = time.perf_counter()
    with trainer(data, work / "huge", work / "out", "--num_workers", "1") as (process, lines):
        updates = 0
        phases = [Sampler(0.1, process.pid)]
        with phases[0]:
            for line in lines:
                print(line, end="", file=sys.stderr)
                if line.startswith("tokenised"):
                    break
        built = time.perf_counter() - began
        with Sampler(0.1, process.pid) as sampler:
            phases.append(sampler)
            first_update = 0.0
            for line in lines:
                updates += "loss:" in line
                if updates and not first_update:
                    first_update = time.perf_counter()
                if updates >= 10 and time.perf_counter() - first_update > seconds:
                    break
        code = stop(process, lines)
    name = f"{data.stat().st_size / 1e9:.1f} GB jsonl"
    for phase, sampler in zip((f"tokenised in {built:.0f} s", f"{updates} updates, exit {code}"), phases, strict=True):
        of = ", ".join(f"{kind} {sampler.peak(kind) / 1e6:.0f} MB" for kind in ("anonymous", "file", "both"))
        yield f"{name}: {phase}, largest process of {len(sampler.peaks)}", "< 1 GB, with pages < 2 GB", of


def corpus_of(work: Path, encoder: DocumentEncoder, data: list[str] | None = None) -> Corpus:
    return Corpus(data or sources(), encoder, max_seq_len=T, seed=42, cache_dir=str(work / "cache"), progress=False)


@contextlib.contextmanager
def trainer(data: Path, cache: Path, out: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """(process, its lines) of a tiny training run."""
    sizes = "--hidden_size 64 --num_hidden_layers 2 --num_attention_heads 4 --max_seq_len 512 --batch_size 8 "
    sizes += "--accumulation_steps 1 --log_interval 1 --save_interval 1000000 --use_compile 0 --device cpu"
    paths = ["--data_path", str(data), "--cache_dir", str(cache), "--out_dir", str(out)]
    command = [sys.executable, str(ROOT / "trainer" / "train_pretrain.py"), *paths, *sizes.split(), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        yield process, iter(process.stdout.readline, "")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def stop(process: subprocess.Popen[str], lines: Iterator[str]) -> int:
    """Its exit code."""
    process.send_signal(signal.SIGTERM)
    for _ in lines:
        pass
    return process.wait()


def resident(pid: int) -> dict[str, int]:
    """Bytes of a process: anonymous, file (mapped pages of files), both."""
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    anonymous, file_pages = (int(fields.get(name, "0").split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return {"anonymous": anonymous, "file": file_pages, "both": anonymous + file_pages}


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, task.read_text().split())
    return found


class Sampler:
    """Peaks of the memory of a process, of its descendants too if a pid is given, while the block runs."""

    def __init__(self, interval: float, pid: int | None = None) -> None:
        self.interval = interval
        self.pid = pid
        # {pid: the largest figures of `resident`}
        self.peaks: dict[int, dict[str, int]] = {}
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self.done.wait(self.interval):
            for pid in family(self.pid) if self.pid else [os.getpid()]:
                # A process may have ended since it was found.
                with contextlib.suppress(OSError):
                    figures = resident(pid)
                    peaks = self.peaks.setdefault(pid, {})
                    for kind, value in figures.items():
                        peaks[kind] = max(value, peaks.get(kind, 0))

    def peak(self, kind: str) -> int:
        return max(peaks[kind] for peaks in self.peaks.values())

    def __enter__(self) -> "Sampler":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()


SECTIONS = dict(zip(DATA_SECTIONS, (tokenise, start, packing, planning, loader, mixture), strict=True))


def main() -> None:
    p = data_parser()
    args = p.parse_args()
    for name in args.only.split(","):
        if name not in SECTIONS:
            p.error(f"--only: {name!r} is none of {', '.join(SECTIONS)}")
    with contextlib.ExitStack() as stack:
        work = Path(args.work or stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        print("| what | wanted | measured |\n|---|---|---|", flush=True)
        if args.huge:
            rows = [huge(work, args.huge)]
        else:
            encoder = DocumentEncoder(load_tokenizer(ROOT / "model"))
            rows = [SECTIONS[name](work, encoder) for name in args.only.split(",")]
        for section in rows:
            for what, wanted, measured in section:
                print(f"| {what} | {wanted} | {measured} |", flush=True)


if __name__ == "__main__":
    run_cli(main)
