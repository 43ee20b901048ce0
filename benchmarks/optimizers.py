"""Tokens that the recipe of plans needs for the validation loss of tuned AdamW.

    python benchmarks/optimizers.py --data_path en.jsonl zh.jsonl --val_path valid.jsonl    # an hour and a half on two cores
    python benchmarks/optimizers.py --hidden_size 512 --shares 0.5 --data_path en.jsonl --val_path valid.jsonl    # 26 M: 4 hours

AdamW trains on `--tokens` tokens of --data_path at each of `--rates`, and with every seed at the best of them, with linear decay and
blocks that start as the identity. The recipe is that of `--budget`: Muon with its rates and schedule, and initial weights that copy.
It trains on `--shares` of the tokens with every seed. Both use the trainer itself, the same model and batch. Finished runs are kept
in `--work`: the same command resumes where it was stopped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run by path: nothing in benchmarks/ may shadow a dependency.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from common.start import guard_imports

    guard_imports(exit_on_ctrl_c=False)

import argparse
from collections.abc import Mapping
from statistics import mean

from benchmarks.trained import data_args, flag_args, runs_parser, trained
from common.flags import positive
from trainer.budget import laws
from trainer.machine.command_line import run_cli

ROWS = 8
T = 512
RECIPE = {
    "optimizer": "muon", "muon_lr": laws.MUON_RATE, "embed_lr": laws.EMBED_RATE, "lr_schedule": "wsd",
    "decay_share": laws.DECAY_SHARE, "init_scheme": "induction",
}  # fmt: skip
ADAMW = {"optimizer": "adamw", "lr_schedule": "linear", "init_scheme": "zero_out"}


def val_loss(args: argparse.Namespace, share: float, recipe: Mapping[str, object], rate: float, seed: int) -> float:
    """Validation loss after training on a share of the tokens."""
    updates = round(share * args.tokens / (ROWS * T))
    settings = {
        **recipe,
        "eval_interval": 0, "learning_rate": rate, "warmup_iters": laws.WARMUP_UPDATES, "seed": seed,
        "hidden_size": args.hidden_size, "batch_size": ROWS, "max_seq_len": T, "accumulation_steps": 1,
        "max_updates": updates, "num_workers": 0, "report": 0,
    }  # fmt: skip
    optimizer = recipe["optimizer"]
    name = f"{optimizer}_{rate:g}_{updates}_updates_seed{seed}"
    loss = trained(Path(args.work), name, [*data_args(args), *flag_args(settings)]).val_loss
    print(f"{optimizer:6} learning rate {rate:g}, {updates:,} updates, seed {seed}: loss {loss:.4f}", flush=True)
    return loss


def main() -> None:
    p = runs_parser("optimizers.py", "Tokens that the recipe of plans needs for the loss of tuned AdamW.")
    p.add_argument("--hidden_size", type=positive(int), default=256, help="width of the model (default 256)")
    p.add_argument("--tokens", type=positive(int), default=4_000_000, help="for AdamW (default 4 M)")
    p.add_argument("--num_seeds", type=positive(int), default=3, help="runs of each recipe (default 3)")
    p.add_argument(
        "--rates", type=positive(float), nargs="+", default=[2.5e-4, 5e-4, 1e-3, 2e-3], help="of AdamW (2.5e-4 to 2e-3)"
    )
    p.add_argument("--shares", type=positive(float), nargs="+", default=[0.5], help="of tokens, for the recipe (0.5)")
    args = p.parse_args()
    seeds = range(1, args.num_seeds + 1)
    swept = {rate: val_loss(args, 1, ADAMW, rate, 1) for rate in args.rates}
    best = min(swept, key=swept.__getitem__)
    adamw = [val_loss(args, 1, ADAMW, best, seed) for seed in seeds]
    print(
        f"AdamW, {args.tokens:,} tokens, learning rate {best:g}: {mean(adamw):.4f} ({min(adamw):.4f} to {max(adamw):.4f})"
    )
    for share in args.shares:
        ours = [val_loss(args, share, RECIPE, laws.SIDE_RATE, seed) for seed in seeds]
        verdict = "missed"
        if mean(ours) <= mean(adamw):
            verdict = "reached on average"
        if max(ours) <= mean(adamw):
            verdict = "reached by all"
        print(
            f"The recipe, {share:.0%} of the tokens: {mean(ours):.4f} ({min(ours):.4f} to {max(ours):.4f}): {verdict}"
        )


if __name__ == "__main__":
    run_cli(main)
