"""One process with all threads against several with few, on a CPU: training speed alone, and beside a busy program.

    python benchmarks/processes.py                                 # 26 M, updates of 16 rows, about 4 minutes
    python benchmarks/processes.py --rows 64 --seconds 220
    python benchmarks/processes.py --optimizer muon --processes 2

The sides take turns of one update, first on the quiet machine, then beside a process that computes for ever. Rates are
medians over the turns, ratios are against one process on the quiet machine. The rows are full, of random tokens in
documents of about 320, and the model is compiled. Linux alone.
"""

import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import processes_parser

    processes_parser().parse_args()

import argparse
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from statistics import median
from typing import TextIO

import torch
import torch.distributed as dist

from benchmarks.arguments import STEP_SIZES, processes_parser
from benchmarks.training import MEAN_LENGTH, packed_batch
from dataset.loader import Batch
from dataset.packing import Totals
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.engine import Engine
from trainer.machine.children import side_by_side
from trainer.machine.compiling import compile_blocks
from trainer.machine.ranks import Ranks, join_copies
from trainer.optim.build import build_optimizer
from trainer.pretrain.loss import n_sums, pretrain_loss

T = 512
LR = 5e-4
# Updates before the first turn: compiling, and what the second still has to set up.
WARM_UP = 2
# It ends with the benchmark, also where that is killed.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


class Side:
    """The command that trains with some number of processes, an update whenever it is asked to."""

    def __init__(self, processes: int, args: argparse.Namespace) -> None:
        self.processes = processes
        flags = [
            "--rows",
            args.rows,
            "--batch_size",
            args.batch_size,
            "--size",
            args.size,
            "--optimizer",
            args.optimizer,
        ]
        command = [sys.executable, __file__, "--side", str(processes), *map(str, flags)]
        threads = str(args.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        # Both are pipes, as asked for above.
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.commands = self.process.stdin
        self.answers = self.process.stdout
        # It is warm.
        self.answers.readline()

    def turn(self) -> float:
        """Tokens per second of one update."""
        print("update", file=self.commands, flush=True)
        answer = self.answers.readline()
        if not answer:
            raise SystemExit(f"the side of {self.processes} processes has ended (its error stands above)")
        return float(answer)

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.commands.close()
        self.process.wait()


# --------------------------------------------------------------------------------------- within a side


def train(args: argparse.Namespace, n: int, answers: TextIO) -> int:
    """Train with n processes, an update for each line on standard input."""
    n_threads = max(1, torch.get_num_threads() // n)

    def work(rank: int, meeting_place: socket.socket) -> int:
        torch.set_num_threads(n_threads)
        ranks = join_copies(rank, n, meeting_place) if n > 1 else Ranks()
        update = updates(args, ranks)
        for _ in range(WARM_UP):
            next(update)
        if ranks.is_main:
            print("warm", file=answers, flush=True)
        while goes_on(ranks):
            start = time.perf_counter()
            next(update)
            if ranks.is_main:
                print(args.rows * T / (time.perf_counter() - start), file=answers, flush=True)
        return 0

    if n == 1:
        return work(0, socket.socket())
    return side_by_side(n, work)


def goes_on(ranks: Ranks) -> bool:
    """Whether another turn comes; rank 0 is told, and tells the others."""
    is_wanted = torch.tensor([float(bool(sys.stdin.readline()))]) if ranks.is_main else torch.zeros(1)
    if ranks.world_size > 1:
        dist.broadcast(is_wanted, src=0)
    return bool(is_wanted)


def updates(args: argparse.Namespace, ranks: Ranks) -> Iterator[None]:
    """Makes an update whenever the next element is asked for."""
    device = torch.device("cpu")
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(**STEP_SIZES[args.size])).train()
    engine = Engine(
        model,
        build_optimizer(model, LR, kind=args.optimizer, ranks=ranks),
        partial(pretrain_loss, model),
        device=device,
        dtype=torch.bfloat16,
        ranks=ranks,
        n_sums=n_sums(model.config),
    )
    rows = ranks.rows_of(args.batch_size)
    generator = torch.Generator().manual_seed(ranks.rank)
    batch: Batch
    batch, _ = packed_batch(rows, T, MEAN_LENGTH, model.config.vocab_size, generator)
    totals = Totals(args.rows * T, batch.n_documents * args.rows // rows)
    compile_blocks(model, "1", device, print, (rows, T))
    n_micro_batches = args.rows // args.batch_size
    while True:
        for number in range(n_micro_batches):
            engine.micro_batch(batch, totals, last=number == n_micro_batches - 1)
        engine.update(LR)
        engine.poll()
        yield


# ------------------------------------------------------------------------------------------- the run


@contextlib.contextmanager
def busy_program() -> Iterator[None]:
    """Within the block a process computes for ever."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(sides: list[Side], seconds: float) -> dict[int, list[float]]:
    """{processes: tokens per second of each turn}. The sides alternate; each has three turns at least."""
    rates: dict[int, list[float]] = {side.processes: [] for side in sides}
    deadline = time.monotonic() + seconds
    n_rounds = 0
    while n_rounds < 3 or time.monotonic() < deadline:
        # To and fro, so that no side always has its turn behind the same other one.
        for side in sides if n_rounds % 2 else sides[::-1]:
            rates[side.processes].append(side.turn())
        n_rounds += 1
    return rates


def show(args: argparse.Namespace, machine: str, rates: dict[int, list[float]], one_quiet: float) -> None:
    """Print the table's rows of one state of the machine. one_quiet: tokens/s of one process on the quiet one."""
    for n, turns in rates.items():
        middle = median(turns)
        spread = f"{min(turns):,.0f} to {max(turns):,.0f}, {len(turns)} turns"
        shape = f"{n} x {max(1, args.threads // n)}"
        print(f"| {machine} | {shape} | {middle:,.0f} ({spread}) | {middle / one_quiet:.3f} |", flush=True)


def main() -> int:
    args = processes_parser().parse_args()
    if args.rows % args.batch_size:
        processes_parser().error(f"--rows {args.rows}: a multiple of --batch_size {args.batch_size} is wanted")
    args.threads = args.threads or torch.get_num_threads()
    if args.side:
        answers = os.fdopen(os.dup(1), "w")
        # What libraries print must not get into the answers.
        os.dup2(2, 1)
        return train(args, args.side, answers)
    with contextlib.ExitStack() as at_end:
        sides = []
        start = time.monotonic()
        # One after the other, so that none disturbs another while it compiles.
        for n in (1, *args.processes):
            side = Side(n, args)
            at_end.callback(side.end)
            sides.append(side)
            print(f"{n} x {max(1, args.threads // n)}: warm after {time.monotonic() - start:.0f} s", flush=True)
        print(f"\n{args.size}, {args.rows} rows of {T} an update, micro-batches of {args.batch_size}, {args.optimizer}")
        print("| machine | processes x threads | tokens/s (least to most) | of one process on the quiet machine |")
        print("|---|---|---|---|")
        quiet = measure(sides, args.seconds / 2)
        one_quiet = median(quiet[1])
        show(args, "quiet", quiet, one_quiet)
        with busy_program():
            beside = measure(sides, args.seconds / 2)
        show(args, "beside a busy program", beside, one_quiet)
    return 0


if __name__ == "__main__":
    sys.exit(main())
