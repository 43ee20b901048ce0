"""Tokens that Muon needs for the validation loss that tuned AdamW reaches.

    python benchmarks/optimizers.py --data_path en.jsonl zh.jsonl --val_path valid.jsonl    # an hour and a half on two cores
    python benchmarks/optimizers.py --hidden_size 512 --shares 0.6 --data_path en.jsonl --val_path valid.jsonl    # 26 M: 4 hours

AdamW trains `--tokens` tokens of --data_path with each of `--rates`, and with every seed at the best of them. Muon trains
`--shares` of the tokens with every seed. Both sides are trained by the trainer itself, in the same model, initialisation, batch
and linear schedule, which ends with the run. Finished runs are kept in `--work`: the same command goes on where it was stopped.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run by path: nothing in benchmarks/ may shadow a dependency.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from common.start import begin

    begin(ends_at_ctrl_c=False)

import argparse
from statistics import mean

from benchmarks.trained import flag_words, runs_parser, text_words, trained
from common.flags import positive
from trainer.machine.command_line import run_cli

ROWS = 8
T = 512


def val_loss(args: argparse.Namespace, share: float, optimizer: str, rate: float, seed: int) -> float:
    """Validation loss after training on a share of the tokens."""
    updates = round(share * args.tokens / (ROWS * T))
    settings = {
        "eval_interval": 0, "optimizer": optimizer, "learning_rate": rate, "lr_schedule": "linear", "warmup_iters": 20,
        "seed": seed, "hidden_size": args.hidden_size, "init_scheme": "zero_out", "batch_size": ROWS, "max_seq_len": T,
        "accumulation_steps": 1, "max_updates": updates, "num_workers": 0, "report": 0,
    }  # fmt: skip
    name = f"{optimizer}_{rate:g}_{updates}_updates_seed{seed}"
    loss = trained(Path(args.work), name, [*text_words(args), *flag_words(settings)]).val_loss
    print(f"{optimizer:6} learning rate {rate:g}, {updates:,} updates, seed {seed}: loss {loss:.4f}", flush=True)
    return loss


def main() -> None:
    p = runs_parser("optimizers.py", "Tokens that Muon needs for the validation loss that tuned AdamW reaches.")
    p.add_argument("--hidden_size", type=positive(int), default=256, help="width of the model (default 256)")
    p.add_argument("--tokens", type=positive(int), default=4_000_000, help="that AdamW trains (default 4 M)")
    p.add_argument("--num_seeds", type=positive(int), default=3, help="runs of each (default 3)")
    p.add_argument(
        "--rates", type=positive(float), nargs="+", default=[2.5e-4, 5e-4, 1e-3, 2e-3], help="of AdamW (2.5e-4 to 2e-3)"
    )
    p.add_argument("--muon_rate", type=positive(float), default=2e-3, help="of AdamW's part beside Muon (default 2e-3)")
    p.add_argument("--shares", type=positive(float), nargs="+", default=[0.6], help="of the tokens, for Muon (0.6)")
    args = p.parse_args()
    seeds = range(1, args.num_seeds + 1)
    swept = {rate: val_loss(args, 1, "adamw", rate, 1) for rate in args.rates}
    best = min(swept, key=swept.__getitem__)
    adamw = [val_loss(args, 1, "adamw", best, seed) for seed in seeds]
    print(
        f"AdamW, {args.tokens:,} tokens, learning rate {best:g}: {mean(adamw):.4f} ({min(adamw):.4f} to {max(adamw):.4f})"
    )
    for share in args.shares:
        muon = [val_loss(args, share, "muon", args.muon_rate, seed) for seed in seeds]
        verdict = "missed"
        if mean(muon) <= mean(adamw):
            verdict = "reached on average"
        if max(muon) <= mean(adamw):
            verdict = "reached by all"
        print(f"Muon, {share:.0%} of the tokens: {mean(muon):.4f} ({min(muon):.4f} to {max(muon):.4f}): {verdict}")


if __name__ == "__main__":
    run_cli(main)
