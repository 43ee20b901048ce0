"""The figures of the data engine: packing, planning, speed of loading.

    python benchmarks/data.py                             # about 2 minutes on two cores
    python benchmarks/data.py --only packing loader       # of: packing, planning, loader

The text is English and Chinese Wikipedia (docs/corpora.md), or the documentation inside the installed Python if
MINIMIND_REFERENCE has none. Prints a markdown table. Rates are medians of alternating runs, so that other processes
disturb them less.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.corpora import corpus_files
from common.flags import Parser, positive
from common.start import ROOT
from dataset.corpus import Corpus
from dataset.loader import Assembler, Loader, UpdateSchedule
from dataset.packing import EpochPlan
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from trainer.machine.command_line import run_cli
from trainer.machine.measure import peak_memory

CPU = torch.device("cpu")
T = 512
# rounds of each comparison
ROUNDS = 5

# (what, target, measured)
Row = tuple[str, str, str]


def packing(work: Path, args: argparse.Namespace) -> Iterator[Row]:
    plan = corpus_of(work).plan(0)
    yield f"packing at {T}: positions that hold a token", ">= 98 %", f"{plan.fill:.4%} of {plan.n_rows:,} rows"


def planning(work: Path, args: argparse.Namespace) -> Iterator[Row]:
    """An epoch of synthetic documents with the lengths of an encyclopaedia."""
    lengths = np.random.default_rng(0).lognormal(5.2, 1, args.documents).astype(np.int64) + 2
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    del lengths
    start = time.perf_counter()
    plan = EpochPlan(offsets, T, 42, 0)
    took = time.perf_counter() - start
    peak = peak_memory(CPU)
    what = f"planning {args.documents / 1e6:g} M documents ({plan.n_rows / 1e6:.1f} M rows), peak of the process"
    yield what, "20 M: <= 60 s, <= 3 GB", f"{took:.1f} s, {peak / 1e9:.2f} GB"


def loader(work: Path, args: argparse.Namespace) -> Iterator[Row]:
    corpus = corpus_of(work)
    plan = corpus.plan(0)
    schedule = UpdateSchedule(plan.n_rows, 32, 32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rates: dict[int, list[float]] = {0: [], 1: []}
    for workers in (0, 1) * ROUNDS:
        source = Loader(Assembler(corpus.store), num_workers=workers)
        batches = source.updates(plan.recipe, schedule)
        # The start of the worker process is not counted.
        next(batches)
        start = time.perf_counter()
        tokens = 0
        for _, (batch,) in batches:
            assert batch is not None
            tokens += batch.n_targets
        source.close()
        rates[workers].append(tokens / (time.perf_counter() - start) / 1e6)
    torch.set_num_threads(threads)
    for workers, name in enumerate(("in the trainer's process, one thread", "through one worker process")):
        yield f"loader {name}", ">= 5 M tokens/s", f"{median(rates[workers]):.1f} M (best {max(rates[workers]):.1f})"


def corpus_of(work: Path) -> Corpus:
    files = [str(file) for file in corpus_files()]
    encoder = DocumentEncoder(load_tokenizer(ROOT / "model"))
    return Corpus(files, encoder, max_seq_len=T, seed=42, cache_dir=str(work / "cache"), progress=False)


SECTIONS = {"packing": packing, "planning": planning, "loader": loader}


def main() -> None:
    p = Parser(prog="data.py", description="The figures of the data engine: packing, planning, loading.")
    p.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections (default: all)")
    p.add_argument("--documents", type=positive(int), default=20_000_000, help="to plan an epoch of (20 M)")
    args = p.parse_args()
    print("| what | target | measured |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as work:
        for name in args.only:
            for what, target, measured in SECTIONS[name](Path(work), args):
                print(f"| {what} | {target} | {measured} |", flush=True)


if __name__ == "__main__":
    run_cli(main)
