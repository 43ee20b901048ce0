"""Sides that take turns of one update each, every one in processes of its own: which shape of a run trains faster here.

`Side` starts this file as a command. It trains a compiled model on full rows of random tokens, in documents of about 320,
an update for each line on its standard input, and answers in seconds. Between its turns it computes nothing. Linux alone.
"""

import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any, TextIO

import torch
import torch.distributed as dist

from benchmarks.training import LEARNING_RATE, MEAN_LENGTH, WARM_UP, packed_batch
from common.errors import UserError
from dataset.loader import Batch
from dataset.packing import Totals
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.engine import Engine
from trainer.machine.children import side_by_side
from trainer.machine.compiling import compile_blocks
from trainer.machine.devices import pick_dtype
from trainer.machine.ranks import Ranks, join_copies
from trainer.optim.build import build_optimizer
from trainer.pretrain.loss import n_sums, pretrain_loss

LEAST_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a side trains. fields: of the MiniMindConfig. rows: of an update; batch_size: of a micro-batch of all processes.

    threads: of all processes together. dtype: of matrix products, as --dtype says it.
    """

    fields: dict[str, Any]
    rows: int
    batch_size: int
    optimizer: str
    processes: int
    threads: int
    T: int = 512
    dtype: str = "bfloat16"

    @property
    def threads_of_each(self) -> int:
        return max(1, self.threads // self.processes)


class Side:
    """A command that trains a shape, an update whenever it is asked to. It is warm once this is made."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        command = [sys.executable, __file__, json.dumps(dataclasses.asdict(shape))]
        environment = {**os.environ, "OMP_NUM_THREADS": str(shape.threads)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        # Both are pipes, as asked for above.
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.commands = self.process.stdin
        self.answers = self.process.stdout
        self._answer()

    def turn(self) -> float:
        """Seconds of one update."""
        print("update", file=self.commands, flush=True)
        return float(self._answer())

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.commands.close()
        self.process.wait()

    def _answer(self) -> str:
        answer = self.answers.readline()
        if not answer:
            raise UserError(f"the side {self.shape} has ended (its error stands above)")
        return answer


def measure(sides: list[Side], seconds: float) -> list[list[float]]:
    """The seconds of each turn of each side. The sides alternate; each has three turns at least."""
    turns: list[list[float]] = [[] for _ in sides]
    order = list(range(len(sides)))
    deadline = time.monotonic() + seconds
    n_rounds = 0
    while n_rounds < LEAST_ROUNDS or time.monotonic() < deadline:
        # To and fro, so that no side always has its turn behind the same other one.
        for number in order if n_rounds % 2 else order[::-1]:
            turns[number].append(sides[number].turn())
        n_rounds += 1
    return turns


# --------------------------------------------------------------------------------------- within a side


def train(shape: Shape, answers: TextIO) -> int:
    """Train, an update for each line on standard input."""

    def work(rank: int, meeting_place: socket.socket) -> int:
        torch.set_num_threads(shape.threads_of_each)
        ranks = join_copies(rank, shape.processes, meeting_place) if shape.processes > 1 else Ranks()
        update = updates(shape, ranks)
        for _ in range(WARM_UP):
            next(update)
        if ranks.is_main:
            print("warm", file=answers, flush=True)
        while goes_on(ranks):
            start = time.perf_counter()
            next(update)
            if ranks.is_main:
                print(time.perf_counter() - start, file=answers, flush=True)
        return 0

    if shape.processes == 1:
        return work(0, socket.socket())
    return side_by_side(shape.processes, work)


def goes_on(ranks: Ranks) -> bool:
    """Whether another turn comes; rank 0 is told, and tells the others."""
    is_wanted = torch.tensor([float(bool(sys.stdin.readline()))]) if ranks.is_main else torch.zeros(1)
    if ranks.world_size > 1:
        dist.broadcast(is_wanted, src=0)
    return bool(is_wanted)


def updates(shape: Shape, ranks: Ranks) -> Iterator[None]:
    """Makes an update whenever the next element is asked for."""
    device = torch.device("cpu")
    dtype, _ = pick_dtype(shape.dtype, device)
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(**shape.fields)).train()
    engine = Engine(
        model,
        build_optimizer(model, LEARNING_RATE, kind=shape.optimizer, ranks=ranks),
        partial(pretrain_loss, model),
        device=device,
        dtype=dtype,
        ranks=ranks,
        n_sums=n_sums(model.config),
    )
    rows = ranks.rows_of(shape.batch_size)
    generator = torch.Generator().manual_seed(ranks.rank)
    batch: Batch
    batch, _ = packed_batch(rows, shape.T, MEAN_LENGTH, model.config.vocab_size, generator)
    totals = Totals(shape.rows * shape.T, batch.n_documents * shape.rows // rows)
    compile_blocks(model, "1", device, print, (rows, shape.T), dtype=dtype)
    n_micro_batches = shape.rows // shape.batch_size
    while True:
        for number in range(n_micro_batches):
            engine.micro_batch(batch, totals, last=number == n_micro_batches - 1)
        engine.update(LEARNING_RATE)
        engine.poll()
        yield


def main() -> int:
    shape = Shape(**json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    # What libraries print must not get into the answers.
    os.dup2(2, 1)
    return train(shape, answers)


if __name__ == "__main__":
    sys.exit(main())
