"""Which size of model learns the most from as many floating-point operations, and the law of the loss that this shows.

    python benchmarks/isoflop.py --data_path en.jsonl zh.jsonl --val_path valid.jsonl     # two cores: an hour and a half
    python benchmarks/isoflop.py --flops 1e12 --widths 64 96 --data_path en.jsonl --val_path valid.jsonl    # to see it work

For each of `--flops` a model of each of `--widths` is trained with so many operations: a large one sees few tokens, a small one
many. Shape, batch, rates and schedule are those of the trainer's own plans (trainer/budget/laws.py), which give long runs more
layers; `--flags "--num_hidden_layers 2"` gives all of them two. One table shows all runs.
The next one has the best size of each curve: the lowest point of a parabola through its losses over the logarithm of the size.
Last comes the law `loss = E + A / N^a + B / D^b`, fitted to all runs, with the range of what fits nearly as well. It knows
nothing of the layers. What these gain after 10 M tokens is `Depth` in laws.py; runs of two layers alone give the rest.
Time plays no part, so other programs change nothing, and two commands with different widths may share the work: finished runs
are kept in `--work`, and a third command with all widths prints the tables.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import isoflop_parser

    isoflop_parser().parse_args()

import argparse
import math
from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

import numpy as np

from benchmarks.arguments import isoflop_parser
from benchmarks.trained import flag_words, text_words, trained
from trainer.budget.laws import LossLaw
from trainer.machine.command_line import run_cli

# The floors and powers that are tried.
FLOORS = np.arange(0.0, 3.51, 0.1)
POWERS = np.arange(0.10, 0.701, 0.01)
# A fit is nearly as good as the best one where its error is no more than so many times as large.
NEARLY = 1.1
# A parabola needs so many points.
FEWEST_SIZES = 3


class Run(NamedTuple):
    """A trained model. loss: on the validation text, nats per token."""

    flops: float
    width: int
    seed: int
    parameters: int
    tokens: int
    loss: float
    bits_per_byte: float


class Best(NamedTuple):
    """The lowest point of the curve of one number of FLOPs. is_inside: whether sizes on both sides of it were trained."""

    flops: float
    parameters: float
    tokens: float
    loss: float
    is_inside: bool


class Fit(NamedTuple):
    """A law, and the root mean square of its relative errors."""

    law: LossLaw
    error: float


def best_of(curve: Sequence[Run]) -> Best:
    """Of the runs with one number of FLOPs, at least FEWEST_SIZES sizes."""
    sizes = np.log([run.parameters for run in curve])
    losses = np.array([run.loss for run in curve])
    lowest = curve[int(np.argmin(losses))]
    # Around their middle, since the logarithms of sizes are large and near to each other.
    middle = float(sizes.mean())
    parabola = np.polyfit(sizes - middle, losses, 2)
    square, slope, _ = parabola.tolist()
    at = -slope / (2 * square)
    if square <= 0 or not sizes.min() < middle + at < sizes.max():
        return Best(lowest.flops, lowest.parameters, lowest.tokens, lowest.loss, is_inside=False)
    order = np.argsort(sizes)
    tokens = np.log([run.tokens for run in curve])
    tokens_at = np.interp(middle + at, sizes[order], tokens[order])
    loss = float(np.polyval(parabola, at))
    return Best(lowest.flops, math.exp(middle + at), math.exp(tokens_at), loss, is_inside=True)


def growth(bests: Sequence[Best]) -> float:
    """The power of the FLOPs with which the best number of parameters grows."""
    flops = np.log([best.flops for best in bests])
    return float(np.polyfit(flops, np.log([best.parameters for best in bests]), 1)[0])


def fits(runs: Sequence[Run]) -> list[Fit]:
    """All laws of the grid whose factors are positive, the best one first.

    For a floor and two powers the factors A and B with the smallest sum of squared relative errors follow from two linear
    equations. So the powers of a grid are all looked at, and no search can end in the wrong place.
    """
    losses = np.array([run.loss for run in runs])
    # [powers, runs]: what a factor is multiplied with, relative to the loss.
    of_size = np.array([run.parameters for run in runs], dtype=float) ** -POWERS[:, None] / losses
    of_data = np.array([run.tokens for run in runs], dtype=float) ** -POWERS[:, None] / losses
    found = []
    for floor in FLOORS:
        rest = 1 - floor / losses
        size_rest = (of_size @ rest)[:, None]
        data_rest = (of_data @ rest)[None, :]
        size_size = (of_size**2).sum(1)[:, None]
        data_data = (of_data**2).sum(1)[None, :]
        both = of_size @ of_data.T
        determinant = size_size * data_data - both**2
        size_factors = (size_rest * data_data - data_rest * both) / determinant
        data_factors = (data_rest * size_size - size_rest * both) / determinant
        squares = (rest**2).sum() - size_factors * size_rest - data_factors * data_rest
        for i, j in zip(*np.nonzero((size_factors > 0) & (data_factors > 0)), strict=True):
            law = LossLaw(
                floor=round(float(floor), 2),
                size_factor=float(size_factors[i, j]),
                size_power=round(float(POWERS[i]), 2),
                data_factor=float(data_factors[i, j]),
                data_power=round(float(POWERS[j]), 2),
            )
            found.append(Fit(law, math.sqrt(max(float(squares[i, j]), 0.0) / len(runs))))
    return sorted(found, key=lambda fit: fit.error)


def growth_of(law: LossLaw) -> float:
    """The power of the FLOPs with which the best number of parameters grows, by a law and FLOPs = 6 N D."""
    return law.data_power / (law.size_power + law.data_power)


def folder_of(args: argparse.Namespace, flops: float, width: int, seed: int) -> Path:
    """Where a run is kept."""
    return Path(args.work) / f"{flops:g}_{width}_seed{seed}"


def run(args: argparse.Namespace, flops: float, width: int, seed: int) -> Run:
    """Train a model, unless an earlier start has done it."""
    folder = folder_of(args, flops, width, seed)
    flags = {"budget_flops": f"{flops:g}", "hidden_size": width, "max_seq_len": args.max_seq_len, "seed": seed}
    end = trained(folder, [*flag_words({**flags, "report": 0}), *text_words(args), *args.flags])
    print(f"{flops:g} FLOP, width {width}, seed {seed}: loss {end.val_loss:.4f}", flush=True)
    return Run(flops, width, seed, end.parameters, end.tokens, end.val_loss, end.bits_per_byte)


def runs_table(runs: Sequence[Run], law: LossLaw | None) -> list[str]:
    """All runs. law: what it says beside what came out."""
    lines = [
        "| FLOP | width | seed | parameters | tokens | loss | by the law | bits per byte |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in runs:
        told = "" if law is None else f"{law.loss(one.parameters, one.tokens):.3f}"
        lines.append(
            f"| {one.flops:g} | {one.width} | {one.seed} | {one.parameters / 1e6:.2f} M | {one.tokens / 1e6:.2f} M | {one.loss:.3f} "
            f"| {told} | {one.bits_per_byte:.3f} |"
        )
    return lines


def bests_table(bests: Sequence[Best]) -> list[str]:
    """The best size of each curve."""
    lines = ["| FLOP | best parameters | tokens | for each parameter | loss | |", "|---|---|---|---|---|---|"]
    for best in bests:
        note = "" if best.is_inside else "at the end of the widths: try others"
        lines.append(
            f"| {best.flops:g} | {best.parameters / 1e6:.2f} M | {best.tokens / 1e6:.2f} M | {best.tokens / best.parameters:.1f} "
            f"| {best.loss:.3f} | {note} |"
        )
    if len(bests) > 1:
        lines.append(f"The best number of parameters grows as FLOP^{growth(bests):.2f}.")
    return lines


def law_lines(found: Sequence[Fit]) -> list[str]:
    """The best law, and between which numbers those lie that are nearly as good."""
    law, error = found[0]
    near = [fit.law for fit in found if fit.error <= NEARLY * error]
    lines = [f"{law}, which misses the runs by {error:.2%} (root mean square)"]
    for name, numbers in (
        ("floor", [one.floor for one in near]),
        ("size_power", [one.size_power for one in near]),
        ("data_power", [one.data_power for one in near]),
        ("power of the best number of parameters", [growth_of(one) for one in near]),
        ("loss of 26 M parameters and 1 G tokens", [one.loss(26e6, 1e9) for one in near]),
    ):
        lines.append(f"{name}: {min(numbers):.2f} to {max(numbers):.2f}, mean {mean(numbers):.2f}")
    return lines


def main() -> None:
    args = isoflop_parser().parse_args()
    Path(args.work).mkdir(parents=True, exist_ok=True)
    runs = []
    bests = []
    for flops in args.flops:
        curve = [run(args, flops, width, seed) for width in args.widths for seed in args.seeds]
        runs += curve
        if len(args.widths) >= FEWEST_SIZES:
            bests.append(best_of(curve))
    # Five numbers are fitted.
    found = fits(runs) if len(runs) > 5 else []
    print("", *runs_table(runs, found[0].law if found else None), sep="\n")
    print("", *bests_table(bests), sep="\n")
    if found:
        print("", *law_lines(found), sep="\n")


if __name__ == "__main__":
    run_cli(main)
