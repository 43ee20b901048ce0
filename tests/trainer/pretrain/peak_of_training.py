"""Trains a MiniMind for a few updates and prints the peak of its memory, in a process of its own.

The argument is JSON: config (fields), rows, T, optimizer, compiled, gradient_checkpointing.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch

from dataset.loader import Batch
from dataset.packing import Totals
from model.checkpointing import recompute_layers
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.engine import Engine
from trainer.machine.compiling import compile_blocks
from trainer.machine.ranks import Ranks
from trainer.optim.build import build_optimizer
from trainer.pretrain.loss import n_sums, pretrain_loss

CPU = torch.device("cpu")


def status(name: str) -> int:
    """Bytes in a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def two_documents_a_row(rows: int, T: int, vocab_size: int) -> Batch:
    """Random tokens; each row is cut in the middle."""
    ids = torch.randint(3, vocab_size, (rows, T + 1))
    half = T // 2
    document_ids = (torch.arange(T) // half).expand(rows, T).contiguous()
    position_ids = (torch.arange(T) % half).expand(rows, T).contiguous()
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), document_ids, position_ids, rows * T, 2 * rows)


def main() -> None:
    asked = json.loads(sys.argv[1])
    rows, T = asked["rows"], asked["T"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = status("VmRSS")
    config = MiniMindConfig(**asked["config"])
    model = MiniMindForCausalLM(config).train()
    if asked["gradient_checkpointing"]:
        recompute_layers(model)
    engine = Engine(
        model,
        build_optimizer(model, 5e-4, kind=asked["optimizer"]),
        partial(pretrain_loss, model),
        device=CPU,
        dtype=torch.bfloat16,
        ranks=Ranks(),
        n_sums=n_sums(config),
    )
    compile_blocks(model, "1" if asked["compiled"] else "0", CPU, print, (rows, T))
    batch = two_documents_a_row(rows, T, config.vocab_size)
    totals = Totals(2 * batch.n_targets, 2 * batch.n_documents)
    # The heap grows for some updates.
    for _ in range(3):
        engine.micro_batch(batch, totals)
        engine.micro_batch(batch, totals)
        engine.update(5e-4)
    print(status("VmHWM") - before)


if __name__ == "__main__":
    main()
