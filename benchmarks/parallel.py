"""Ranks on a CPU: the ways to add up gradients against each other, and the memory of a sharded model against whole ones.

    python benchmarks/parallel.py                            # 26 M, about two minutes
    python benchmarks/parallel.py --seconds 90 --rows 16

1. Two processes of one thread train in turns of one update with each way to add up gradients: in shared memory
   (trainer/shared_reducer.py), by DistributedDataParallel (trainer/distributed_reducer.py), by FSDP2 with the whole model on
   each rank, and by FSDP2 with half of it. Medians over the turns; ratios against shared memory.
2. For each number of ranks, the bytes of weights and moments that a rank has, and its peak of memory in three updates above
   what it had before the model, with whole models and with a sharded one. Saves are not part of it.

Linux alone.
"""

import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import parallel_parser

    parallel_parser().parse_args()

import argparse
import gc
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.arguments import MINIMIND_SIZES, parallel_parser
from benchmarks.training import LEARNING_RATE, WARM_UP, packed_batch
from dataset.packing import Totals
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.engine import Engine
from trainer.machine.children import side_by_side
from trainer.machine.command_line import run_cli
from trainer.machine.ranks import Ranks, join_copies
from trainer.optim.build import build_optimizer
from trainer.pretrain.loss import n_sums, pretrain_loss
from trainer.sharding import Shards, build_on_main
from trainer.tensor_parts import own_part

CPU = torch.device("cpu")
T = 128
MEAN_LENGTH = 80


class Way(NamedTuple):
    """How gradients are added up. group_size: ranks that have a model together; None: FSDP2 is not used. may_share: whether
    the ranks may share memory."""

    group_size: int | None = None
    may_share: bool = False


WAYS = {
    "shared memory": Way(may_share=True),
    "DistributedDataParallel": Way(),
    "FSDP2, whole models": Way(group_size=1),
    "FSDP2, halves": Way(group_size=2),
}
# By as many ranks as there are.
SHARDED = "sharded"
# Of the second part; the first is what the others are compared with.
MEMORY_WAYS = ("shared memory", "DistributedDataParallel", SHARDED)


def updates(args: argparse.Namespace, ranks: Ranks, way: Way) -> Iterator[Engine]:
    """Makes an update whenever the next element is asked for, and gives the engine."""
    torch.manual_seed(0)
    config = MiniMindConfig(**MINIMIND_SIZES[args.size])
    shards = None
    if way.group_size is None:
        model = MiniMindForCausalLM(config).train()
    else:
        model = build_on_main(ranks, partial(MiniMindForCausalLM, config)).train()
        shards = Shards(model, way.group_size, ranks, CPU)
    ranks_of_engine = replace(ranks, on_one_machine=way.may_share)
    engine = Engine(
        model,
        build_optimizer(model, LEARNING_RATE, ranks=ranks_of_engine, shards=shards),
        partial(pretrain_loss, model),
        device=CPU,
        dtype=getattr(torch, args.dtype),
        ranks=ranks_of_engine,
        n_sums=n_sums(config),
        shards=shards,
    )
    generator = torch.Generator().manual_seed(ranks.rank)
    batch, _ = packed_batch(args.rows, T, MEAN_LENGTH, config.vocab_size, generator)
    totals = Totals(ranks.world_size * args.rows * T, ranks.world_size * batch.n_documents)
    while True:
        engine.micro_batch(batch, totals, last=True)
        engine.update(LEARNING_RATE)
        engine.poll()
        yield engine


# ------------------------------------------------------------------------------------------------ speed


def compare_ways(args: argparse.Namespace) -> int:
    """Print the table of the ways to add up gradients."""

    def work(rank: int, meeting_place: socket.socket) -> int:
        torch.set_num_threads(1)
        ranks = join_copies(rank, 2, meeting_place)
        sides = {}
        for name, way in WAYS.items():
            sides[name] = updates(args, ranks, way)
            for _ in range(WARM_UP):
                next(sides[name])
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        started = time.monotonic()
        goes_on = torch.ones(1)
        while goes_on:
            for name, side in sides.items():
                dist.barrier()
                begun = time.perf_counter()
                next(side)
                seconds[name].append(time.perf_counter() - begun)
            goes_on.fill_(time.monotonic() - started < args.seconds)
            dist.broadcast(goes_on, src=0)
        if ranks.is_main:
            show_ways(args, seconds)
        # No engine may be left, also not that of the last turn.
        sides.clear()
        del side
        leave()
        return 0

    return side_by_side(2, work)


def show_ways(args: argparse.Namespace, seconds: dict[str, list[float]]) -> None:
    base = median(seconds["shared memory"])
    print(f"\n{args.size}, two ranks of one thread, updates of 2 x {args.rows} rows of {T}, AdamW, plain code")
    print("| gradients | seconds an update (least to most) | of shared memory |")
    print("|---|---|---|")
    for name, turns in seconds.items():
        spread = f"{min(turns):.3f} to {max(turns):.3f}, {len(turns)} turns"
        print(f"| {name} | {median(turns):.3f} ({spread}) | {median(turns) / base:.2f} |", flush=True)


# ------------------------------------------------------------------------------------------------ memory


def status(name: str) -> int:
    """Bytes in a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def measure_memory(args: argparse.Namespace, n_ranks: int, name: str) -> int:
    """Print, as JSON, [bytes of weights and moments, bytes at the peak] of each rank. name: one of MEMORY_WAYS."""
    way = Way(group_size=n_ranks) if name == SHARDED else WAYS[name]

    def work(rank: int, meeting_place: socket.socket) -> int:
        torch.set_num_threads(1)
        ranks = join_copies(rank, n_ranks, meeting_place)
        # A first small run: libraries are loaded, and connections made.
        next(updates(argparse.Namespace(**{**vars(args), "size": "tiny", "rows": 1}), ranks, way))
        gc.collect()
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        side = updates(argparse.Namespace(**{**vars(args), "rows": 1}), ranks, way)
        for _ in range(3):
            engine = next(side)
        peak = status("VmHWM") - before
        states = sum(own_part(parameter).nbytes for parameter in engine.parameters)
        for kept in engine.optimizer.state.values():
            states += own_part(kept["exp_avg"]).nbytes + own_part(kept["exp_avg_sq"]).nbytes
        found: list[list[int] | None] = [None] * n_ranks
        dist.all_gather_object(found, [states, peak])
        if ranks.is_main:
            print(json.dumps(found), flush=True)
        del engine, side
        leave()
        return 0

    return side_by_side(n_ranks, work)


def leave() -> None:
    """The process group, when the models are gone."""
    Shards.close()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def show_memory(args: argparse.Namespace) -> None:
    print(
        f"\n{args.size}, {args.dtype}, micro-batches of one row of {T}, AdamW, plain code: MB of the rank with the most"
    )
    print("| ranks | gradients | weights and moments | of whole ones, times ranks | peak | of shared memory |")
    print("|---|---|---|---|---|---|")
    # Large blocks are given back to the system at once, so that a peak shows what was used at one moment.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    for n in args.ranks:
        base: list[float] = []
        for way in MEMORY_WAYS:
            command = [sys.executable, __file__, "--size", args.size, "--dtype", args.dtype, "--memory_of", str(n), way]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            of_ranks = json.loads(done.stdout.splitlines()[-1])
            states, peak = (max(values) / 1e6 for values in zip(*of_ranks, strict=True))
            base = base or [states, peak]
            ratio = states / base[0] * (n if way == SHARDED else 1)
            print(f"| {n} | {way} | {states:.0f} | {ratio:.3f} | {peak:.0f} | {peak / base[1]:.2f} |", flush=True)


def main() -> int:
    args = parallel_parser().parse_args()
    if args.memory_of:
        n_ranks, name = args.memory_of
        return measure_memory(args, int(n_ranks), name)
    # First, since it starts processes of its own: this one must not have computed anything when it copies itself.
    show_memory(args)
    return compare_ways(args) if args.seconds else 0


if __name__ == "__main__":
    run_cli(main)
