"""What ranks send each other, measured and by formula, and what follows for a thousand of them (simulated).

    python benchmarks/scaling.py                              # 26 M, four minutes; root on Linux
    python benchmarks/scaling.py --forward_s 0.01 --backward_s 0.02 --gbit 100 400      # other machines: their own figures

1. Bytes: in a network namespace of their own, ranks of this machine train, and the kernel counts what goes over the
   network that they share. Beside it stands the formula of `bytes_of_update`.
2. Seconds: the same network at a low rate, so that sending takes most of the time of an update. Beside the measured seconds stand
   those in which the bytes of the formula are sent.
3. Simulated: the seconds of an update on 1 to 1,024 ranks, from the seconds of a micro-batch (measured here, or given) and
   the rate of each rank's link. Ranks send in rings, whatever the network offers beside that. There is no noise, and no
   other traffic.

What the ranks send, for a model whose layers have L bytes of fp32 weights, and O bytes are in no layer:

    --shard none    gradients are added up around a ring: each rank sends (n-1)/n of them, and once more to give the sums
                    back                                                                   2 (n-1)/n (L + O) an update
    --shard full    in each micro-batch weights are gathered, those of layers in the backward pass once more
                                                                                             (n-1)/n (2 L + O)
                    and gradients added up, of which each rank keeps a part                  (n-1)/n (L + O)
                    Gloo adds up whole tensors for it                                      2 (n-1)/n (L + O)
    --shard g       the same within a group of g ranks; and once an update a rank of each group adds up its part of the
                    gradients, (L + O)/g, with those of the other groups
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import scaling_parser

    scaling_parser().parse_args()

import argparse
import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks.arguments import MINIMIND_SIZES, scaling_parser
from benchmarks.parallel import Way, leave, updates
from benchmarks.training import Training
from common.errors import UserError
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.distributed_reducer import BUCKET_BYTES
from trainer.machine.children import side_by_side
from trainer.machine.command_line import run_cli
from trainer.machine.ranks import join_copies

FP32 = 4
# How often the bytes of a tensor go around the ring: to add up, and to give the sums to all.
ALL_REDUCE = 2
GATHER = 1
# Of gradients of which each rank keeps a part. Gloo makes an all-reduce of it, NCCL sends half of that.
REDUCE_SCATTER = {"Gloo": 2, "NCCL": 1}
MEASURED_UPDATES = 2
SIMULATED_RANKS = (1, 2, 4, 8, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Sizes:
    """Bytes of fp32 weights: of each layer, and of what is in none."""

    layers: Sequence[int]
    outside: int

    @property
    def total(self) -> int:
        return sum(self.layers) + self.outside


@dataclass(frozen=True)
class Link:
    """What connects each rank to the others: bytes a second that it sends, and seconds until a message is there."""

    rate: float
    latency: float

    def around(self, n: int, n_bytes: float, times: int) -> float:
        """Seconds in which the bytes go around a ring of n ranks, each of which sends a part of them n-1 times."""
        return times * (n - 1) * (n_bytes / n / self.rate + self.latency)


def sizes_of(model: torch.nn.Module) -> Sizes:
    layers = []
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            layers.append(FP32 * sum(parameter.numel() for parameter in module.parameters()))
    total = FP32 * sum(parameter.numel() for parameter in model.parameters())
    return Sizes(layers, total - sum(layers))


# ------------------------------------------------------------------------------------------------ formulas


def bytes_of_update(sizes: Sizes, n: int, group: int, micro_batches: int = 1, library: str = "Gloo") -> float:
    """That one of n ranks sends. group: how many have one model together; 1: each has its own."""
    if group == 1:
        return ALL_REDUCE * (n - 1) / n * sizes.total
    gathered = GATHER * (2 * sum(sizes.layers) + sizes.outside)
    added_up = REDUCE_SCATTER[library] * sizes.total
    within = micro_batches * (group - 1) / group * (gathered + added_up)
    groups = n // group
    between = ALL_REDUCE * (groups - 1) / groups * sizes.total / group
    return within + between


def seconds_of_whole(sizes: Sizes, n: int, link: Link, forward: float, backward: float, micro_batches: int) -> float:
    """Of an update with a whole model on each rank. Buckets are sent while the backward pass of the last micro-batch goes on.

    forward, backward: seconds of a micro-batch.
    """
    computed = micro_batches * (forward + backward)
    buckets = [BUCKET_BYTES] * (sizes.total // BUCKET_BYTES) + [sizes.total % BUCKET_BYTES]
    link_is_free = 0.0
    done = 0.0
    for bucket in buckets:
        done += bucket
        is_ready = computed - backward * (1 - done / sizes.total)
        link_is_free = max(link_is_free, is_ready) + link.around(n, bucket, ALL_REDUCE)
    return computed if n == 1 else max(computed, link_is_free)


def seconds_of_sharded(
    sizes: Sizes, n: int, link: Link, forward: float, backward: float, micro_batches: int, library: str
) -> float:
    """Of an update with one model on all ranks. The weights of a layer are gathered while the one before it is computed.

    Gradients of a layer are added up while the next ones are computed.
    """
    if n == 1:
        return micro_batches * (forward + backward)
    # What is in no layer is gathered once, and its gradients come last.
    link_is_free = link.around(n, sizes.outside, GATHER)
    computed = link_is_free
    for of_pass, layers, adds_up in ((forward, sizes.layers, False), (backward, sizes.layers[::-1], True)):
        outside = of_pass * sizes.outside / sizes.total
        if adds_up:
            # The head comes first in the backward pass.
            computed += outside
        may_be_sent = 0.0
        for layer in layers:
            link_is_free = max(link_is_free, may_be_sent) + link.around(n, layer, GATHER)
            begun = max(computed, link_is_free)
            # One layer is gathered ahead.
            may_be_sent = begun
            computed = begun + of_pass * layer / sizes.total
            if adds_up:
                link_is_free = max(link_is_free, computed) + link.around(n, layer, REDUCE_SCATTER[library])
        if not adds_up:
            computed += outside
    link_is_free = max(link_is_free, computed) + link.around(n, sizes.outside, REDUCE_SCATTER[library])
    return micro_batches * max(computed, link_is_free)


# ------------------------------------------------------------------------------------------------ measurements


def sent_bytes() -> int:
    """That all processes of this network namespace have sent to each other."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    raise KeyError("lo")


def measure_updates(args: argparse.Namespace, n: int, group: int) -> int:
    """Print, as JSON, [bytes that a rank sends, seconds] of an update. group: as in `bytes_of_update`."""

    def work(rank: int, meeting_place: socket.socket) -> int:
        torch.set_num_threads(1)
        ranks = join_copies(rank, n, meeting_place)
        # Machines of a cluster share no memory.
        way = Way(group_size=None if group == 1 else group)
        side = updates(argparse.Namespace(size=args.size, rows=1, dtype="bfloat16"), ranks, way)
        next(side)
        dist.barrier()
        sent = sent_bytes()
        begun = time.perf_counter()
        for _ in range(MEASURED_UPDATES):
            next(side)
        dist.barrier()
        seconds = (time.perf_counter() - begun) / MEASURED_UPDATES
        if ranks.is_main:
            print(json.dumps([(sent_bytes() - sent) / MEASURED_UPDATES / n, seconds]), flush=True)
        del side
        leave()
        return 0

    return side_by_side(n, work)


def measured(args: argparse.Namespace, n: int, group: int, mbit: float | None = None) -> tuple[float, float]:
    """(bytes, seconds) of `measure_updates` in a network namespace. mbit: a rate that it is limited to, in megabits a second.

    Errors: UserError where namespaces are not allowed.
    """
    prepare = "ip link set lo up"
    if mbit is not None:
        prepare += f" && tc qdisc add dev lo root tbf rate {mbit}mbit burst 256kb latency 400ms"
    command = [sys.executable, __file__, "--size", args.size, "--updates_of", str(n), str(group)]
    shell = ["unshare", "--net", "sh", "-c", f'{prepare} && exec "$@"', "sh"]
    # Errors alone: torch warns that the namespace knows no names.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        done = subprocess.run([*shell, *command], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"ranks cannot be run in a network namespace, which takes root on Linux: {error}") from error
    sent, seconds = json.loads(done.stdout.splitlines()[-1])
    return sent, seconds


def show_bytes(args: argparse.Namespace, sizes: Sizes) -> None:
    print(f"\n{args.size}, one micro-batch an update, Gloo: megabytes that a rank sends for an update")
    print("| ranks | --shard | measured | by formula | ratio |")
    print("|---|---|---|---|---|")
    for n in args.ranks:
        groups = {1: "none", n: "full"}
        if n % 2 == 0 and n > 2:
            groups[2] = "2"
        for group, flag in groups.items():
            sent, _ = measured(args, n, group)
            formula = bytes_of_update(sizes, n, group)
            print(f"| {n} | {flag} | {sent / 1e6:.1f} | {formula / 1e6:.1f} | {sent / formula:.3f} |", flush=True)


def show_slow_network(args: argparse.Namespace, sizes: Sizes) -> None:
    """The seconds in which the bytes of the formula are sent, beside a measured run of two ranks on a slow network."""
    # In bytes a second of one rank: both share the network.
    rate = args.slow_mbit * 1e6 / 8 / 2
    print(
        f"\n{args.size}, two ranks on {args.slow_mbit:g} Mbit/s together, one row of 128 an update: seconds of an update"
    )
    print("| --shard | measured | network alone, by formula | ratio |")
    print("|---|---|---|---|")
    for flag, group in (("none", 1), ("full", 2)):
        _, seconds = measured(args, 2, group, args.slow_mbit)
        formula = bytes_of_update(sizes, 2, group) / rate
        print(f"| {flag} | {seconds:.1f} | {formula:.1f} | {seconds / formula:.2f} |", flush=True)


def measure_micro_batch(args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a processor for the forward and the backward pass of a micro-batch on one thread."""
    torch.set_num_threads(1)
    training = Training(MINIMIND_SIZES[args.size], torch.device("cpu"), args.rows, compiled=False)
    seconds = []
    for _ in range(3):
        # Not those of the clock: other programs take a part of them.
        begun = time.process_time()
        training.engine.micro_batch(training.batch, training.totals, last=False)
        seconds.append(time.process_time() - begun)
    # The backward pass has two matrix products for each one of the forward pass.
    return median(seconds) / 3, median(seconds) * 2 / 3


def show_simulation(args: argparse.Namespace, sizes: Sizes) -> None:
    if args.forward_s and args.backward_s:
        forward, backward = args.forward_s, args.backward_s
        source = "given"
    else:
        forward, backward = measure_micro_batch(args)
        source = f"measured on one core: {args.rows} rows of 512"
    m = args.accumulation_steps
    for gbit in args.gbit:
        link = Link(gbit * 1e9 / 8, args.latency_us / 1e6)
        print(
            f"\nSIMULATED: {args.size}, micro-batches of {forward + backward:.3f} s ({source}), {m} of them an update on each "
            f"rank, links of {gbit:g} Gbit/s and {args.latency_us:g} us"
        )
        print("| ranks | none: s | share of computing | full, Gloo: s | share | full, NCCL: s | share |")
        print("|---|---|---|---|---|---|---|")
        for n in SIMULATED_RANKS:
            seconds = [seconds_of_whole(sizes, n, link, forward, backward, m)]
            for library in REDUCE_SCATTER:
                seconds.append(seconds_of_sharded(sizes, n, link, forward, backward, m, library))
            cells = [f"{each:.2f} | {m * (forward + backward) / each:.0%}" for each in seconds]
            print(f"| {n} | {' | '.join(cells)} |", flush=True)


def main() -> int:
    parser = scaling_parser()
    args = parser.parse_args()
    if args.updates_of:
        return measure_updates(args, *map(int, args.updates_of))
    if min(args.ranks) < 2:
        parser.error("--ranks: one rank sends nothing, 2 are the fewest")
    if (args.forward_s is None) != (args.backward_s is None):
        parser.error("--forward_s and --backward_s go together")
    with torch.device("meta"):
        sizes = sizes_of(MiniMindForCausalLM(MiniMindConfig(**MINIMIND_SIZES[args.size])))
    if not args.only_simulate:
        show_bytes(args, sizes)
        show_slow_network(args, sizes)
    show_simulation(args, sizes)
    return 0


if __name__ == "__main__":
    run_cli(main)
