"""How long an update takes: estimated from what the machine multiplies, and measured for one model.

The estimate is the work of an update divided by the rate of large matrix products, times the share of that rate that
training reaches. The shares were measured on two cores with AVX512-BF16, by runs of 64 to 384 wide models. A machine that
behaves otherwise is found out by `measured_seconds`.
"""

import contextlib
import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from dataset.loader import Batch
from dataset.packing import Totals
from model.checkpointing import recompute_layers
from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from trainer.budget.reserves import EAGER_TIMES
from trainer.cuda_graphs import why_without_graphs
from trainer.engine import Engine
from trainer.machine.collectives import least_of_ranks, on_main
from trainer.machine.compiling import compile_blocks
from trainer.machine.measure import seconds
from trainer.machine.ranks import Ranks
from trainer.optim.build import build_optimizer
from trainer.optim.muon import NEWTON_SCHULZ_STEPS
from trainer.pretrain.footprint import flops_per_token
from trainer.pretrain.loss import n_sums, pretrain_loss

# Of the rate of large products that was measured, what a compiled micro-batch of width 128 reaches on a CPU, and what each
# doubling of the width adds. `assumed_product_rate` in trainer/machine/compiling.py is another figure: of the products alone,
# and without a measurement.
CPU_SHARE = 0.49
CPU_SHARE_OF_DOUBLING = 0.13
# Guesses, for widths that were not measured: without bounds narrow models would reach nothing, and wide ones more than all.
LOWEST_SHARE = 0.2
HIGHEST_SHARE = 0.8
# Large cards wait for small products. No measurement exists yet.
GPU_SHARE = 0.35
# Of Muon's products, which are smaller.
MUON_SHARE = 0.7


@dataclass(frozen=True)
class Machine:
    """What the run has. product_rate: FLOP/s of large matrix products of all ranks together."""

    device: torch.device
    dtype: torch.dtype
    ranks: Ranks
    product_rate: float


def share_of_product_rate(device_type: str, width: int) -> float:
    """What a compiled micro-batch of this width reaches."""
    if device_type != "cpu":
        return GPU_SHARE
    share = CPU_SHARE + CPU_SHARE_OF_DOUBLING * math.log2(width / 128)
    return min(max(share, LOWEST_SHARE), HIGHEST_SHARE)


def muon_flops(config: MiniMindConfig) -> float:
    """Of the orthogonalisation of all matrices in the blocks: 2 m^2 n + 2 m^3 + 2 m^2 n in each step, m the short side."""
    H = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    inner = config.moe_intermediate_size if config.use_moe else config.intermediate_size
    mlps = config.num_experts + config.n_shared_experts if config.use_moe else 1
    flops = 0.0
    # {matrices of a block: how many}; a router is none of them.
    for shape, count in (((queries, H), 2), ((keys, H), 2), ((inner, H), 3 * mlps)):
        m, n = sorted(shape)
        flops += count * (4 * m * m * n + 2 * m**3)
    return config.num_hidden_layers * NEWTON_SCHULZ_STEPS * flops


def estimated_seconds(
    config: MiniMindConfig, machine: Machine, rows: int, T: int, length: float, muon: bool, compiled: bool
) -> float:
    """Of an update of `rows` rows of T positions. length: see flops_per_token."""
    share = share_of_product_rate(machine.device.type, config.hidden_size)
    work = rows * T * flops_per_token(config, length) / share
    if not compiled:
        work *= EAGER_TIMES
    if muon:
        # The processes of one command share it; of a launcher's ranks each does all of it.
        times = 1 if machine.ranks.sharing > 1 else machine.ranks.world_size
        work += muon_flops(config) / MUON_SHARE * times
    return work / machine.product_rate


class TimeUp(BaseException):
    """The time of a block is over. No `except Exception` on the way catches it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End the block after so many seconds. Errors: TimeUp. Windows has no such timer: the block goes on."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def end(*_: object) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measured_seconds(
    config: MiniMindConfig,
    machine: Machine,
    *,
    rows: int,
    T: int,
    optimizer: str,
    compiled: bool,
    gradient_checkpointing: bool,
    times: int,
    least_seconds: float = 0.0,
    compile_seconds: float = math.inf,
) -> tuple[float, float] | None:
    """(seconds of a micro-batch of `rows` rows on this rank, of the rest of an update), on random tokens.

    Both are the middle of at least `times`, and of as many more as it takes until `least_seconds` were timed: a machine may be
    slower for the first of them than it will be in the run. The rest is the exchange of gradients and the optimiser.
    None: compiling took more than compile_seconds on some rank. All ranks must call it: they wait for each other, as in the run.
    """
    # What was compiled for another size is in the way. What is compiled here stays: the run most often has this size.
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, config.vocab_size, (rows, T + 1), generator=generator)
    zeros = torch.zeros(rows, T, dtype=torch.long)
    positions = torch.arange(T).expand(rows, T).contiguous()
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), zeros, positions, rows * T, rows)
    batch = batch.to(machine.device)
    model = MiniMindForCausalLM(config).to(machine.device).train()  # type: ignore[arg-type]  # transformers wraps it without its types
    if gradient_checkpointing:
        recompute_layers(model)
    without_graphs = why_without_graphs(
        machine.device, machine.ranks, machine.dtype, gradient_checkpointing, config.dropout
    )
    engine = Engine(
        model,
        build_optimizer(model, 1e-6, kind=optimizer, muon_lr=1e-6, ranks=machine.ranks),
        partial(pretrain_loss, model),
        device=machine.device,
        dtype=machine.dtype,
        ranks=machine.ranks,
        n_sums=n_sums(config),
        cuda_graphs=None if without_graphs else True,
    )
    # Also where nothing is compiled: it prepares the device for plain code as the run does.
    choice = "1" if compiled else "0"
    compile_blocks(model, choice, machine.device, lambda _: None, (rows, T), dtype=machine.dtype)
    totals = Totals(rows * T, rows)

    def micro_batch() -> None:
        engine.micro_batch(batch, totals)

    def last_of_update() -> None:
        # Ranks may exchange gradients in its backward pass.
        engine.micro_batch(batch, totals, last=True)
        engine.update(1e-6)

    # The first one compiles, and waits for no other rank.
    is_compiled = 1.0
    try:
        with time_limit(compile_seconds) if compiled and compile_seconds < math.inf else contextlib.nullcontext():
            micro_batch()
    except TimeUp:
        is_compiled = 0.0
    if least_of_ranks(machine.ranks, is_compiled, machine.device) == 0.0:
        engine.close()
        torch.compiler.reset()
        return None
    last_of_update()
    of_micro_batch: list[float] = []
    of_last: list[float] = []

    def is_too_short() -> bool:
        return sum(of_micro_batch) + sum(of_last) < least_seconds

    # Rank 0 decides, so that all ranks time as many.
    while len(of_last) < times or on_main(machine.ranks, is_too_short):
        of_micro_batch.append(seconds(micro_batch, machine.device))
        of_last.append(seconds(last_of_update, machine.device))
    engine.close()
    return median(of_micro_batch), median(of_last) - median(of_micro_batch)
