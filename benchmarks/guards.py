"""What the guards against bad numbers cost, and what a save costs the training thread, on the 26 M model.

    python benchmarks/guards.py                 # all cores, 4 rows of 512 tokens an update
    python benchmarks/guards.py --rows 32       # the default micro-batch

Guarded and plain updates take turns in one run, and so do steps with and without a save beside them, so that both
sides meet the same machine. The plain side is the same engine without finiteness checks, found_inf, requests and poll;
clipping needs the norm anyway. Medians, and the ratio.
"""

import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import guards_parser

    guards_parser().parse_args()

import tempfile
import time
from statistics import median
from typing import Any

import torch

from benchmarks.arguments import guards_parser
from benchmarks.timing import step_seconds
from dataset.loader import Batch
from dataset.packing import Totals
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.engine import Engine, Outcome
from trainer.machine.command_line import run_cli
from trainer.machine.devices import pick_device, pick_dtype
from trainer.machine.measure import seconds
from trainer.machine.ranks import Ranks
from trainer.optim.build import build_optimizer
from trainer.pretrain.loss import pretrain_loss
from trainer.saving.checkpoint import Checkpoints, snapshot
from trainer.saving.weights import save_weights


class PlainEngine(Engine):
    """The engine without its guards."""

    def micro_batch(self, batch: Batch, totals: Totals, last: bool = True, counts: bool = True) -> None:
        with self.autocast():
            loss, sums = self.objective(batch, totals)
        loss.backward()
        self.sums += sums

    def update(self, lr: float, stop_signal: int = 0, save: bool = False) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        torch.nn.utils.clip_grad_norm_(self.parameters, self.grad_clip, foreach=True)
        # The optimisers ask for it; the base class does not declare it.
        self.optimizer.found_inf = None  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def poll(self, where: Any = None) -> list[Outcome]:
        return []


def random_batch(rows: int, T: int, vocab_size: int) -> Batch:
    """Full rows of one document each."""
    ids = torch.randint(3, vocab_size, (rows, T + 1))
    document_ids = torch.zeros(rows, T).long()
    position_ids = torch.arange(T).repeat(rows, 1)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), document_ids, position_ids, rows * T, rows)


def one_update(engine: Engine, batch: Batch, totals: Totals) -> None:
    """A micro-batch, its update and the poll."""
    engine.micro_batch(batch, totals)
    engine.update(1e-4)
    engine.poll()


def main() -> None:
    args = guards_parser().parse_args()

    torch.manual_seed(0)
    device = pick_device(args.device)
    dtype, _ = pick_dtype(args.dtype, device)
    model = MiniMindForCausalLM(MiniMindConfig()).to(device).train()  # type: ignore[arg-type]  # transformers wraps it without its types
    optimizer = build_optimizer(model, 1e-4)
    engines = [
        kind(model, optimizer, partial(pretrain_loss, model), device=device, dtype=dtype, ranks=Ranks())
        for kind in (Engine, PlainEngine)
    ]
    batch = random_batch(args.rows, 512, model.config.vocab_size).to(device)
    totals = Totals(batch.n_targets, batch.n_documents)
    print(f"26 M model, {args.rows} rows of 512, {device}, {dtype}, {torch.get_num_threads()} threads")
    sides = [partial(one_update, engine, batch, totals) for engine in engines]
    for update in sides:
        update()

    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(args.pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            times[side].append(step_seconds(sides[side], device))
    guarded, plain = map(median, times)
    pairwise = median(a / b for a, b in zip(*times, strict=True))
    print(
        f"update: guarded {guarded:.3f} s, plain {plain:.3f} s; ratio of medians {guarded / plain:.4f}, of pairs {pairwise:.4f}"
    )

    state = {"model": model.state_dict(), "engine": engines[0].state_dict()}
    copies = []
    waits = []
    extra = []
    with tempfile.TemporaryDirectory(dir=ROOT / "out") as folder:
        checkpoints = Checkpoints(folder, keep=2)
        for number in range(args.saves):
            start = time.perf_counter()
            snapshot(state)
            copies.append(time.perf_counter() - start)
            start = time.perf_counter()
            checkpoints.save(
                state, number, before=lambda copy: save_weights(copy["model"], {}, Path(folder, "weights"))
            )
            begun = time.perf_counter()
            beside = []
            while checkpoints.writing():
                beside.append(seconds(sides[0], device))
            waits.append(time.perf_counter() - begun)
            alone = [seconds(sides[0], device) for _ in beside]
            extra.append(sum(beside) - sum(alone))
    print(
        f"save of 310 MB and the weights: copy {median(copies):.3f} s; written beside the training within {median(waits):.2f} s, "
        f"which slowed it by {median(extra):.3f} s = {median(extra) / guarded:.1%} of an update of {args.rows} rows, "
        f"{median(extra) / guarded * args.rows / 256:.2%} of a default one (256 rows)"
    )


if __name__ == "__main__":
    run_cli(main)
