"""One training micro-batch, forward, backward and update: tokens/s, and its share of the best bf16 matrix-product rate.

    python benchmarks/step.py --size 26m                       # compiled, all cores
    python benchmarks/step.py --size 104m --compile 0          # eager
    python benchmarks/step.py --size moe --threads 1 --profile # where the time goes

The rows are packed with random tokens in documents of about 320 tokens. Products and steps alternate, and the best of
each counts, so that other processes on the machine disturb the ratio less. On a GPU a step is the mean of a second of steps.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import step_parser

    step_parser().parse_args()

import json
import time

import torch

from benchmarks.arguments import STEP_SIZES, step_parser
from benchmarks.timing import step_seconds
from benchmarks.training import Training
from trainer.machine.command_line import run_cli
from trainer.machine.devices import pick_device, pick_dtype
from trainer.machine.measure import peak_memory, product_rate, seconds, synchronize
from trainer.pretrain.flops import flops_per_token


def main() -> None:
    args = step_parser().parse_args()
    args.threads = args.threads or torch.get_num_threads()

    torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    dtype, _ = pick_dtype("bfloat16", device)
    training = Training(
        STEP_SIZES[args.size],
        device,
        args.rows,
        args.max_seq_len,
        compiled=args.compile == "1",
        gradient_checkpointing=args.gradient_checkpointing,
        mean_length=args.mean_length,
    )
    first = seconds(training.step, device)
    times = []
    rate = 0.0
    for _ in range(args.steps):
        rate = max(rate, product_rate(device, dtype))
        time.sleep(args.pause)
        times.append(step_seconds(training.step, device))
    if args.profile:
        with torch.profiler.profile() as profile:
            training.step()
            synchronize(device)
        where = "cuda" if device.type == "cuda" else "cpu"
        table = profile.key_averages().table(sort_by=f"self_{where}_time_total", row_limit=40, max_name_column_width=70)
        print(table)

    tokens = training.tokens
    flops = flops_per_token(training.model.config, training.length)
    figures = {
        "size": args.size,
        "compile": int(args.compile),
        "threads": args.threads,
        "tokens_per_second": round(tokens / min(times)),
        "step_seconds": [round(t, 3) for t in times],
        "mflop_per_token": round(flops / 1e6, 1),
        "product_gflops": round(rate / 1e9),
        "utilisation": round(tokens / min(times) * flops / rate, 3),
        "first_step_seconds": round(first, 1),
        "peak_memory_gb": round(peak_memory(device) / 1e9, 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    run_cli(main)
