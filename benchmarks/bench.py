"""Training speed against the plain MiniMind loop and the Hugging Face Trainer, side by side in one run.

    python benchmarks/bench.py                                             # 26 M, all cores, about 4 minutes
    python benchmarks/bench.py --sizes 26m 104m 64m moe --threads 1 2      # everything
    python benchmarks/bench.py --sizes tiny --threads 1 --seconds 30       # smoke test

    plain        each document padded to a full row, eager, AdamW; fp32 on a CPU, bf16 autocast on a GPU
    hf           Trainer with Llama (or Qwen3, Qwen2-MoE) of the same shape: bf16, fused AdamW, full rows of
                 concatenated documents, with attention across their borders
    hf-compiled  the same with torch_compile; ours is compared with the faster of the two
    ours         Corpus, loader, engine and compiled blocks as train_pretrain.py puts them together

Each side is a separate process, so that its peak memory is measured alone. Sides train in turns: rounds of short
slices, in which matrix products are timed too, in bf16 where supported. A ratio is the median over the rounds, with its
range.
All sides train on the same documents: English and Chinese Wikipedia (docs/corpora.md), or the embedded corpus if
MINIMIND_REFERENCE has none, cut to 325 tokens on average. "text" counts trained targets, without padding.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from benchmarks.corpora import corpus_files, texts_of
from benchmarks.sides import SIDES, train_side
from benchmarks.training import SIZES
from common.errors import UserError, user_errors
from common.files import atomic_file
from common.flags import Parser, at_least, positive
from common.start import ROOT
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.tokenizer_files import DEFAULT
from model.config import ModelConfig
from trainer.machine.command_line import run_cli
from trainer.machine.devices import pick_device, pick_dtype
from trainer.machine.measure import product_rate
from trainer.pretrain.memory import flops_per_token

# Tokens of a document, BOS and EOS included: drawn from this range, then cut to MAX_TOKENS.
LENGTHS = (64, 600)
MAX_TOKENS = 512

# Each side imports torch itself, with its own number of threads.
SPAWN = multiprocessing.get_context("spawn")

# Figures of a turn, such as updates, text, positions, seconds
Slice = dict[str, float]
# Figures of a run
Run = dict[str, Any]


def write_documents(path: Path, n: int) -> list[int]:
    """Write the starts of `n` texts, or of as many as there are; returns the number of (input, target) pairs of each.

    325 tokens on average, MAX_TOKENS at most; texts that are too short are skipped.
    """
    tokenizer = load_tokenizer(DEFAULT)
    draw = random.Random(0)
    length = min(draw.randint(*LENGTHS), MAX_TOKENS)
    documents: list[str] = []
    for text in itertools.chain.from_iterable(zip(*map(texts_of, corpus_files()), strict=False)):
        text = text[: 8 * MAX_TOKENS]
        ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        # The encoder adds BOS and EOS.
        if len(ends) >= length - 2:
            documents.append(text[: ends[length - 3][1]])
            length = min(draw.randint(*LENGTHS), MAX_TOKENS)
        if len(documents) == n:
            break
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    return [len(ids) - 1 for ids in DocumentEncoder(tokenizer).encode(documents)]


class Side:
    """The process of one side, seen from the run. An answer is None once the process has ended."""

    def __init__(self, name: str, size: str, args: argparse.Namespace, variables: Mapping[str, str]) -> None:
        """variables: of its environment. args: the command's, for one thread count."""
        self.name = name
        self.slices: list[Slice] = []
        self.turns, its_end = SPAWN.Pipe()
        train = partial(train_side, name, SIZES[size], args, its_end)
        self.process = SPAWN.Process(target=run_cli, args=(train,))
        with mock.patch.dict(os.environ, variables):
            self.process.start()
        # Only the process holds it now, so that its end is noticed here.
        its_end.close()
        self.first = self.answer()

    def answer(self) -> Slice | None:
        try:
            answer: Slice = self.turns.recv()
        except (EOFError, ConnectionError):
            return None
        return answer

    def ask(self, seconds: float | None) -> Slice | None:
        """seconds: of a turn; None: no further one."""
        with contextlib.suppress(ConnectionError):
            self.turns.send(seconds)
        return self.answer()

    def end(self) -> None:
        """Wait for its end, which comes after its turn, or when the pipe closes."""
        self.turns.close()
        self.process.join()


def measure(size: str, threads: int, args: argparse.Namespace, documents: Path, pairs: Sequence[int]) -> Run:
    """All sides on one size, in turns for `args.seconds`, setup included. Returns its figures.

    pairs: the number of (input, target) pairs of each document.
    """
    deadline = time.monotonic() + args.seconds
    device = torch.device(args.device)
    dtype, _ = pick_dtype("bfloat16", device)
    rates: list[float] = []
    T = args.max_seq_len
    torch.set_num_threads(threads)
    with contextlib.ExitStack() as stack:
        sides = start_sides(size, threads, args, documents, stack)
        if not sides:
            raise UserError(f"{size}: none of the sides {', '.join(args.sides)} could start")
        round_seconds = 0.0
        while len(rates) < 3 or time.monotonic() + round_seconds < deadline:
            begin = time.monotonic()
            rates.append(product_rate(device, dtype, (1024, 2048, 4096) if device.type == "cpu" else None))
            # Back and forth, so that no side always follows the same other one
            for side in sides if len(rates) % 2 else sides[::-1]:
                answer = side.ask(args.slice)
                if answer is None:
                    raise UserError(f"{side.name} on {size} has ended within the run (its error is above)")
                # Its rows have one document each, and a turn has too few of them to estimate the padding.
                if side.name == "plain":
                    answer["text"] = answer["positions"] * sum(min(n, T - 1) for n in pairs) / (len(pairs) * (T - 1))
                side.slices.append(answer)
            round_seconds = time.monotonic() - begin
        ends = {side.name: side.ask(None) for side in sides}
    run: Run = {"size": size, "threads": threads, "rounds": len(rates), "product_flops": max(rates), "sides": {}}
    run |= {name: getattr(args, name) for name in ("device", "rows", "max_seq_len", "slice")}
    for side in sides:
        # Context as in flops_per_token: the whole row for the Trainer, for the others a token's own document, at most a row.
        seen = [min(n, T) for n in pairs]
        context = T if side.name.startswith("hf") else sum(n * n for n in seen) / sum(seen)
        flops = flops_per_token(ModelConfig(**SIZES[size]), context)
        figures = summary(side.slices, flops, max(rates))
        run["sides"][side.name] = {**figures, **(side.first or {}), **(ends[side.name] or {}), "slices": side.slices}
    run["ratios"] = ratios({side.name: side.slices for side in sides})
    return run


def start_sides(
    size: str, threads: int, args: argparse.Namespace, documents: Path, stack: contextlib.ExitStack
) -> list[Side]:
    """Start sides one after the other, so that none disturbs another; returns those that could. `stack` ends them."""
    device = torch.device(args.device)
    variables = {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
    # The Trainer would take all GPUs, so the sides see only one, as their first.
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        variables["CUDA_VISIBLE_DEVICES"] = visible[device.index or 0] if visible[0] else str(device.index or 0)
    shared = {"threads": threads, "device": device.type, "documents_file": str(documents)}
    args_of_side = argparse.Namespace(**{**vars(args), **shared})
    sides = []
    for name in args.sides:
        side = Side(name, size, args_of_side, variables)
        stack.callback(side.end)
        if side.first is None:
            print(f"{name}: could not start (its error is above) and is left out", flush=True)
        else:
            sides.append(side)
    return sides


def rate(part: Slice) -> float:
    """Text tokens per second."""
    return part["text"] / part["seconds"]


def summary(slices: Sequence[Slice], flops: float, product_flops: float) -> Run:
    """Figures of one side. flops: of a text token; product_flops: the best rate of a matrix product in the run, FLOP/s."""
    text = sum(part["text"] for part in slices)
    positions = sum(part["positions"] for part in slices)
    middle = median(map(rate, slices))
    return {
        "text_tokens_per_second": middle,
        "updates_per_second": median(part["updates"] / part["seconds"] for part in slices),
        "padding": 1 - text / positions,
        "utilisation": middle * flops / product_flops,
    }


def ratios(slices: Mapping[str, Sequence[Slice]]) -> dict[str, tuple[float, float, float]]:
    """{what: (median, least, greatest) over the rounds} of ours against plain and the faster Trainer, from {side: its slices}."""
    ratio_of = {}
    middles = {name: median(map(rate, slices[name])) for name in slices if name.startswith("hf")}
    fastest = max(middles, key=middles.__getitem__, default="no Trainer")
    for other in ("plain", fastest):
        if "ours" in slices and other in slices:
            each = [rate(a) / rate(b) for a, b in zip(slices["ours"], slices[other], strict=True)]
            ratio_of[f"ours / {other}, text tokens"] = (median(each), min(each), max(each))
    return ratio_of


def show(run: Run) -> None:
    """Print a run as a table and its ratios."""
    print(
        f"\n{run['size']}, {run['threads']} threads, {run['device']}, {run['rows']} x {run['max_seq_len']}, "
        f"{run['rounds']} rounds; best product {run['product_flops'] / 1e9:,.0f} GFLOP/s"
    )
    print("| side | M parameters | text tokens/s | updates/s | padding | utilisation | peak GB | first update s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, side in run["sides"].items():
        print(
            f"| {name} | {side['parameters'] / 1e6:.2f} | {side['text_tokens_per_second']:,.0f} | {side['updates_per_second']:.3g} "
            f"| {side['padding']:.1%} | {side['utilisation']:.1%} | {side.get('peak_memory_bytes', 0) / 1e9:.2f} | "
            f"{side['first_update_seconds']:.1f} |"
        )
    for what, (middle, least, greatest) in run["ratios"].items():
        print(f"{what}: {middle:.2f} ({least:.2f} to {greatest:.2f})")
    sys.stdout.flush()


def main() -> None:
    p = Parser(prog="bench.py", description="Training speed against MiniMind's loop and the Hugging Face Trainer.")
    p.add_argument("--sizes", nargs="+", choices=SIZES, default=["26m"], help="models to train (default 26m)")
    p.add_argument("--threads", nargs="+", type=positive(int), help="one run for each (default: one per core)")
    p.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="those to compare (default: all)")
    p.add_argument("--seconds", type=positive(float), default=240, help="for a size and thread count (default 240)")
    p.add_argument("--slice", type=positive(float), default=3.0, help="seconds of a turn (default 3)")
    p.add_argument("--rows", type=positive(int), help="of a micro-batch (default: 32 on a GPU, 8 on a CPU)")
    p.add_argument(
        "--max_seq_len",
        type=at_least(2, "to hold an input and a target"),
        default=512,
        help="positions in a row (default 512)",
    )
    p.add_argument("--documents", type=positive(int), default=4000, help="how many (default 4000)")
    p.add_argument("--use_compile", choices=("0", "1"), default="1", help="1: compile our side (default 1)")
    p.add_argument("--device", help="cuda:0, mps or cpu (default: the first available)")
    p.add_argument("--out", default=str(ROOT / "out" / "bench.json"), help="all figures (default: out/bench.json)")
    args = p.parse_args()
    args.device = str(pick_device(args.device))
    args.threads = args.threads or [torch.get_num_threads()]
    args.rows = args.rows or (32 if args.device.startswith("cuda") else 8)
    out = Path(args.out)
    with user_errors():
        # Before minutes of work: an unwritable path fails at once.
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        documents = Path(folder, "documents.jsonl")
        pairs = write_documents(documents, args.documents)
        print(f"{len(pairs):,} documents of {sum(pairs) / len(pairs):.0f} tokens on average", flush=True)
        for size, threads in itertools.product(args.sizes, args.threads):
            runs.append(measure(size, threads, args, documents, pairs))
            show(runs[-1])
            with atomic_file(out) as file:
                file.write(json.dumps(runs, indent=1).encode())
    print(f"\nall figures: {out}")


if __name__ == "__main__":
    run_cli(main)
