"""One training micro-batch, forward, backward and update: tokens/s, and its share of the best bf16 matrix-product rate.

    python benchmarks/step.py --size 26m                       # compiled, all cores
    python benchmarks/step.py --size 104m --compile 0          # eager
    python benchmarks/step.py --size moe --threads 1 --profile # where the time goes

The rows are packed with random tokens in documents of about 320 tokens. Products and steps alternate, and the best of
each counts, so that other processes on the machine disturb the ratio less.
"""

import sys
from functools import partial
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
from dataset.loader import Batch
from dataset.packing import Totals
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.engine import Engine
from trainer.machine.compiling import compile_blocks
from trainer.machine.measure import peak_memory, product_rate, seconds
from trainer.machine.ranks import Ranks
from trainer.optim.build import build_optimizer
from trainer.pretrain.flops import flops_per_token
from trainer.pretrain.loss import n_sums, pretrain_loss


def packed_batch(
    rows: int, T: int, mean_length: int, vocab_size: int, generator: torch.Generator
) -> tuple[Batch, float]:
    """Full rows of random tokens, cut into documents of geometric-like lengths; (Batch, sum(len^2) / sum(len))."""
    document_ids = torch.zeros(rows, T).long()
    position_ids = torch.zeros(rows, T).long()
    lengths = []
    for row in range(rows):
        at = 0
        document = 0
        while at < T:
            draw = torch.empty(()).exponential_(1 / mean_length, generator=generator)
            n = min(max(int(draw), 16), T - at)
            document_ids[row, at : at + n] = document
            position_ids[row, at : at + n] = torch.arange(n)
            lengths.append(n)
            at += n
            document += 1
    ids = torch.randint(3, vocab_size, (rows, T + 1), generator=generator)
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), document_ids, position_ids, rows * T, len(lengths))
    return batch, sum(n * n for n in lengths) / sum(lengths)


def main() -> None:
    args = step_parser().parse_args()
    args.threads = args.threads or torch.get_num_threads()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)
    model = MiniMindForCausalLM(MiniMindConfig(**STEP_SIZES[args.size])).to(device).train()  # type: ignore[arg-type]  # transformers wraps it without its types
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    batch, length = packed_batch(
        args.rows, args.max_seq_len, args.mean_length, model.config.vocab_size, torch.Generator().manual_seed(1)
    )
    batch = batch.to(device)
    engine = Engine(
        model,
        build_optimizer(model, 5e-4),
        partial(pretrain_loss, model),
        device=device,
        dtype=torch.bfloat16,
        ranks=Ranks(),
        n_sums=n_sums(model.config),
    )
    compile_blocks(model, args.compile, device, print, (args.rows, args.max_seq_len))

    def step() -> None:
        engine.micro_batch(batch, Totals(batch.n_targets, batch.n_documents))
        engine.update(5e-4)

    first = seconds(step, device)
    times = []
    rate = 0.0
    for _ in range(args.steps):
        rate = max(rate, product_rate(device))
        time.sleep(args.pause)
        times.append(seconds(step, device))
    if args.profile:
        with torch.profiler.profile() as profile:
            step()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=70))

    tokens = args.rows * args.max_seq_len
    flops = flops_per_token(model.config, length)
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
    main()
