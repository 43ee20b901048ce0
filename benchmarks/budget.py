"""A plan of --budget against configurations that a person would try around it, all for the same time.

    python benchmarks/budget.py --budget 3m --data_path en.jsonl zh.jsonl --val_path valid.jsonl    # half an hour
    python benchmarks/budget.py --budget 10m --only plan deeper wider --data_path en.jsonl --val_path valid.jsonl

The trainer plans and trains once, then each of the others under the same clock: a narrower and a wider model, one with
twice the layers, one that is narrower and has twice the layers, half and twice the batch, half and one and a half times the
rates. The table shows the bits per byte of the validation text and their ratio to the plan's; below 1 the plan was beaten.
Finished runs are kept in `--work`: the same command goes on where it was stopped. Nothing else should run meanwhile.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import budget_parser

    budget_parser().parse_args()

import argparse
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.arguments import budget_parser
from common.settings import parse
from trainer.budget import laws
from trainer.pretrain.settings import DESCRIPTION, PROG, PretrainSettings

PLAN = "plan"


@dataclass(frozen=True)
class Outcome:
    """Of a finished run. flags: those that were said instead of being planned."""

    name: str
    flags: Mapping[str, object]
    bits_per_byte: float
    val_loss: float
    updates: int
    tokens: int


def hand_made(plan: PretrainSettings) -> dict[str, dict[str, object]]:
    """{name: the flags that are said instead of being planned} of the configurations around a plan."""
    widths = laws.WIDTHS
    place = widths.index(plan.hidden_size)
    narrower = widths[max(place - 1, 0)]
    wider = widths[min(place + 1, len(widths) - 1)]
    layers = plan.num_hidden_layers
    assert layers is not None
    half_batch = {"batch_size": max(plan.batch_size // 2, 1), "accumulation_steps": plan.accumulation_steps}
    twice_the_batch = {"batch_size": plan.batch_size, "accumulation_steps": 2 * plan.accumulation_steps}
    return {
        "narrower": {"hidden_size": narrower},
        "wider": {"hidden_size": wider},
        "deeper": {"hidden_size": plan.hidden_size, "num_hidden_layers": 2 * layers},
        "narrower and deeper": {"hidden_size": narrower, "num_hidden_layers": 2 * layers},
        "half the batch": {"hidden_size": plan.hidden_size, **half_batch},
        "twice the batch": {"hidden_size": plan.hidden_size, **twice_the_batch},
        "half the rates": {"hidden_size": plan.hidden_size, **rates(plan, 0.5)},
        "higher rates": {"hidden_size": plan.hidden_size, **rates(plan, 1.5)},
    }


def rates(plan: PretrainSettings, factor: float) -> dict[str, object]:
    """The flags of the plan's learning rates, times `factor`."""
    return {"learning_rate": factor * plan.learning_rate, "muon_lr": factor * plan.muon_lr}


def run(args: argparse.Namespace, name: str, changes: Mapping[str, object]) -> Outcome:
    """Train once, unless an earlier start of this benchmark has done it."""
    folder = Path(args.work) / f"{args.budget} {name}".replace(" ", "_")
    done = folder / "done"
    if not done.exists():
        command = [sys.executable, str(ROOT / "trainer" / "train_pretrain.py"), "--budget", args.budget]
        command += ["--data_path", *args.data_path, "--val_path", *args.val_path, "--out_dir", str(folder)]
        command += ["--seed", str(args.seed)]
        for flag, value in changes.items():
            command += [f"--{flag}", str(value)]
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "log.txt", "w", encoding="utf-8") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
        done.touch()
    return outcome(folder, name, changes)


def outcome(folder: Path, name: str, changes: Mapping[str, object]) -> Outcome:
    """What the metrics of a run say of its end."""
    (metrics,) = folder.glob("pretrain_*.metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if "val_loss" in line][-1]
    updates = max(line["update"] for line in lines if "update" in line)
    tokens = max(line["tokens"] for line in lines if "tokens" in line)
    return Outcome(name, changes, last["bits_per_byte"], last["val_loss"], updates, tokens)


def plan_of(args: argparse.Namespace) -> PretrainSettings:
    """The settings that the planned run has kept."""
    path = Path(args.work) / f"{args.budget}_{PLAN}" / "pretrain.plan.yaml"
    return parse(PretrainSettings, PROG, DESCRIPTION, ["--config", str(path)])


def main() -> None:
    args = budget_parser().parse_args()
    outcomes = [run(args, PLAN, {})]
    planned = outcomes[0]
    for name, changes in hand_made(plan_of(args)).items():
        if args.only and name not in args.only:
            continue
        outcomes.append(run(args, name, changes))
        print(
            f"{name}: {outcomes[-1].bits_per_byte:.4f} bits per byte, the plan {planned.bits_per_byte:.4f}", flush=True
        )
    print("\n| run | flags | updates | tokens | loss | bits per byte | of the plan's |\n|---|---|---|---|---|---|---|")
    for one in sorted(outcomes, key=lambda outcome: outcome.bits_per_byte):
        flags = " ".join(f"--{flag} {value}" for flag, value in one.flags.items())
        ratio = one.bits_per_byte / planned.bits_per_byte
        print(
            f"| {one.name} | {flags} | {one.updates:,} | {one.tokens:,} | {one.val_loss:.3f} | {one.bits_per_byte:.4f} "
            f"| {ratio:.4f} |"
        )


if __name__ == "__main__":
    main()
