"""A plan of --budget against configurations near it, all trained for the same time on a CPU. Linux only.

    python benchmarks/budget.py --budget 3m --data_path en.jsonl zh.jsonl --val_path valid.jsonl    # half an hour
    python benchmarks/budget.py --budget 10m --only deeper wider --data_path en.jsonl --val_path valid.jsonl

The trainer plans the budget, which takes half a minute. `hand_made` has the others: width, layers, batch and rates, each
larger and smaller; narrower and deeper; twice the heads. A model of one layer lacks the heads that copy, which need two.
A short run of each shape measures how many updates fit the plan's time: until then nothing else should run on the machine.
Then each is trained to its number of updates; the machine's speed no longer matters. The table shows the bits per byte of
the validation text and their ratio to the plan's; below 1 the plan was beaten. The plan, the speeds and finished runs are
kept in `--work`: the same command resumes where it was stopped.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder

import argparse
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.trained import TRAINER, Outcome, data_args, flag_args, folder_of, runs_parser, trained
from common.errors import UserError
from common.flags import at_least, seed
from trainer.budget import laws
from trainer.machine.command_line import run_cli
from trainer.pretrain.settings import PretrainSettings, duration

PLAN = "plan"


def hand_made(plan: PretrainSettings) -> dict[str, Mapping[str, object]]:
    """{name: the flags that differ from the plan's} of the configurations around a plan."""

    def of_width(width: int) -> dict[str, object]:
        """Flags with the heads that a plan would choose."""
        heads = laws.heads_for(width)
        kv_heads = laws.kv_heads_for(heads)
        return {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads}

    def rates(factor: float) -> dict[str, object]:
        return {name: factor * getattr(plan, name) for name in ("learning_rate", "muon_lr", "embed_lr")}

    place = laws.WIDTHS.index(plan.hidden_size)
    narrower = of_width(laws.WIDTHS[max(place - 1, 0)])
    wider = of_width(laws.WIDTHS[min(place + 1, len(laws.WIDTHS) - 1)])
    assert plan.num_hidden_layers is not None and plan.num_attention_heads is not None
    layers = plan.num_hidden_layers
    more_heads = 2 * plan.num_attention_heads
    return {
        "narrower": narrower,
        "wider": wider,
        "deeper": {"num_hidden_layers": 2 * layers},
        # Heads that copy need two layers.
        "shallower": {
            "num_hidden_layers": max(layers // 2, 1),
            "init_scheme": plan.init_scheme if layers >= 4 else "zero_out",
        },
        "narrower and deeper": {**narrower, "num_hidden_layers": layers + (layers + 1) // 2},
        "more heads": {"num_attention_heads": more_heads, "num_key_value_heads": laws.kv_heads_for(more_heads)},
        "half the batch": {"batch_size": max(plan.batch_size // 2, 1)},
        "twice the batch": {"accumulation_steps": 2 * plan.accumulation_steps},
        "half the rates": rates(0.5),
        "higher rates": rates(1.5),
    }


def planned(args: argparse.Namespace) -> list[str]:
    """The flags of the plan, or of that of an earlier start. Errors: UserError if planning fails."""
    # Updates are timed on the CPU.
    asked = ["--budget", args.budget, "--seed", str(args.seed), "--device", "cpu", *data_args(args)]
    folder = folder_of(Path(args.work), PLAN, asked)
    plan_file = folder / "plan.txt"
    if not plan_file.exists():
        command = [sys.executable, str(TRAINER), "--dry_run", "1", *asked, "--out_dir", str(folder)]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, encoding="utf-8")
        if done.returncode:
            raise UserError(f"{TRAINER.name} could not plan (its error is above)")
        folder.mkdir(parents=True, exist_ok=True)
        plan_file.write_text(done.stdout, encoding="utf-8")
    lines = plan_file.read_text(encoding="utf-8").splitlines()
    _python, _trainer, *flags = shlex.split(lines[lines.index("the same run by flags:") + 1])
    return flags


def main() -> None:
    p = runs_parser("budget.py", "A plan of --budget against configurations near it.")
    p.add_argument("--budget", type=duration, default="3m", help="of each run (default 3m)")
    p.add_argument("--only", nargs="+", help="names of the configurations to try (default: all)")
    p.add_argument("--timed_updates", type=at_least(2, "to log twice"), default=40, help="of a timing run (default 40)")
    p.add_argument("--seed", type=seed, default=42, help="of all runs (default 42)")
    args = p.parse_args()
    plan_flags = planned(args)
    plan = PretrainSettings.parse(plan_flags)
    assert plan.max_updates is not None
    changes_of: dict[str, Mapping[str, object]] = {PLAN: {}, **hand_made(plan)}
    unknown = sorted(set(args.only or ()) - set(changes_of))
    if unknown:
        raise UserError(f"--only: {unknown[0]!r} is none of {', '.join(changes_of)}")
    tried = [name for name in changes_of if not args.only or name in (PLAN, *args.only)]
    timing = {"max_updates": args.timed_updates, "log_interval": args.timed_updates // 2, "eval_interval": 0}
    seconds: dict[str, float] = {}
    # All timings come first, so that the machine is the same for all of them.
    for name in tried:
        flags = [*plan_flags, *flag_args({**changes_of[name], **timing})]
        seconds[name] = trained(Path(args.work), "timing", flags).update_seconds
    ends: dict[str, Outcome] = {}
    for name in tried:
        updates = round(plan.max_updates * seconds[PLAN] / seconds[name])
        changes_of[name] = {**changes_of[name], "max_updates": updates}
        ends[name] = trained(Path(args.work), name.replace(" ", "_"), [*plan_flags, *flag_args(changes_of[name])])
        print(f"{name}: {ends[name].bits_per_byte:.4f} bits per byte", flush=True)
    print("\n| run | flags | updates | tokens | loss | bits per byte | of the plan's |\n|---|---|---|---|---|---|---|")
    for name, end in sorted(ends.items(), key=lambda item: item[1].bits_per_byte):
        ratio = end.bits_per_byte / ends[PLAN].bits_per_byte
        print(
            f"| {name} | {' '.join(flag_args(changes_of[name]))} | {end.updates:,} | {end.tokens:,} | {end.val_loss:.3f} "
            f"| {end.bits_per_byte:.4f} | {ratio:.4f} |"
        )


if __name__ == "__main__":
    run_cli(main)
