"""One process with all threads against several with few, on a CPU: training speed alone, and beside a busy program.

    python benchmarks/processes.py                                 # 26 M, updates of 16 rows, about 4 minutes
    python benchmarks/processes.py --rows 64 --seconds 220
    python benchmarks/processes.py --optimizer muon --processes 2

The sides take turns of one update, first on the quiet machine, then beside a process that computes for ever. Rates are
medians over the turns, ratios are against one process on the quiet machine. The rows are full, of random tokens in
documents of about 320, and the model is compiled. Linux alone.
"""

import sys
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
import subprocess
import time
from collections.abc import Iterator
from statistics import median

import torch

from benchmarks.arguments import STEP_SIZES, processes_parser
from benchmarks.update_sides import Shape, Side, measure
from trainer.machine.command_line import run_cli

# It ends with the benchmark, also where that is killed.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


@contextlib.contextmanager
def busy_program() -> Iterator[None]:
    """Within the block a process computes for ever."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def shape_of(args: argparse.Namespace, processes: int) -> Shape:
    """What so many processes train."""
    return Shape(STEP_SIZES[args.size], args.rows, args.batch_size, args.optimizer, processes, args.threads)


def show(machine: str, shapes: list[Shape], turns: list[list[float]], one_quiet: float) -> None:
    """Print the table's rows of one state of the machine. one_quiet: tokens/s of one process on the quiet one."""
    for shape, seconds in zip(shapes, turns, strict=True):
        rates = [shape.rows * shape.T / one for one in seconds]
        middle = median(rates)
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}, {len(rates)} turns"
        divided = f"{shape.processes} x {shape.threads_of_each}"
        print(f"| {machine} | {divided} | {middle:,.0f} ({spread}) | {middle / one_quiet:.3f} |", flush=True)


def main() -> int:
    args = processes_parser().parse_args()
    if args.rows % args.batch_size:
        processes_parser().error(f"--rows {args.rows}: a multiple of --batch_size {args.batch_size} is wanted")
    for n in args.processes:
        if args.batch_size % n:
            processes_parser().error(
                f"--processes {n}: they cannot share the {args.batch_size} rows of --batch_size alike"
            )
    args.threads = args.threads or torch.get_num_threads()
    shapes = [shape_of(args, n) for n in (1, *args.processes)]
    with contextlib.ExitStack() as at_end:
        sides = []
        start = time.monotonic()
        # One after the other, so that none disturbs another while it compiles.
        for shape in shapes:
            side = Side(shape)
            at_end.callback(side.end)
            sides.append(side)
            warm_after = time.monotonic() - start
            print(f"{shape.processes} x {shape.threads_of_each}: warm after {warm_after:.0f} s", flush=True)
        print(
            f"\n{args.size}, {args.rows} rows of {shapes[0].T} an update, micro-batches of {args.batch_size}, {args.optimizer}"
        )
        print("| machine | processes x threads | tokens/s (least to most) | of one process on the quiet machine |")
        print("|---|---|---|---|")
        quiet = measure(sides, args.seconds / 2)
        one_quiet = args.rows * shapes[0].T / median(quiet[0])
        show("quiet", shapes, quiet, one_quiet)
        with busy_program():
            beside = measure(sides, args.seconds / 2)
        show("beside a busy program", shapes, beside, one_quiet)
    return 0


if __name__ == "__main__":
    run_cli(main)
