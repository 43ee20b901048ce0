"""How fast training is on a GPU: what `make gpu` measures.

A measurement is a generator of Figures, which are printed as they come. All of them run on a CPU too, with small models
and short turns, which tells whether the measurements themselves work.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

from benchmarks.arguments import SIZES
from benchmarks.timing import per_step
from benchmarks.training import MEAN_LENGTH, Training, packed_batch
from common.paths import ROOT
from common.wording import reason_of
from model.attention import document_mask, scaled_dot_product_attention
from model.config import MiniMindConfig
from model.fast.flex_attention import document_starts, flex_attend, flex_mask
from trainer.machine.devices import pick_dtype
from trainer.machine.measure import describe_machine, peak_memory, product_rate, seconds, synchronize
from trainer.pretrain.flops import flops_per_token
from trainer.pretrain.memory import training_memory
from trainer.saving.checkpoint import Checkpoints, snapshot

T = 512


@dataclass(frozen=True)
class Figure:
    """What was measured. predicted: what a calculation for one H200 gave before anything had been measured."""

    what: str
    value: str | float
    unit: str = ""
    predicted: str = ""


@dataclass(frozen=True)
class Scale:
    """How much is measured: all of it, or so little that a CPU has done it in a minute."""

    sizes: tuple[str, ...]
    rows: tuple[int, ...]
    turn_s: float
    product_s: float
    copied_bytes: int
    product_sizes: tuple[int, ...]


FULL = Scale(
    sizes=("26m", "104m", "64m", "moe"),
    rows=(32, 256),
    turn_s=2.0,
    product_s=10.0,
    copied_bytes=1 << 30,
    product_sizes=(4096, 8192),
)
SMALL = Scale(sizes=("tiny",), rows=(2, 4), turn_s=0.5, product_s=0.5, copied_bytes=1 << 24, product_sizes=(512, 1024))
# Of one H200 at 32 rows of 512: the share of the product rate, in percent.
PREDICTED_SHARE = {"26m": "38 to 43", "104m": "45", "64m": "30 to 35", "moe": "20 to 26"}
# How many times as fast as the plain loop, by text and by positions
PLAIN_RATIOS = ("ours / plain, text tokens", "ours / plain, padded positions")
# Of the small ELECTRA; docs/gpu.md has the arithmetic.
OF_ELECTRA = {
    "ours: share of the product rate": "15 to 20",
    "ours / plain, text tokens": "5 or more",
    "ours / plain-bf16, text tokens": "3 or more",
}

Measurement = Callable[[torch.device, Scale], Iterator[Figure]]


# -------------------------------------------------------------------------------------------- sections


def machine(device: torch.device, scale: Scale) -> Iterator[Figure]:
    """Versions, and what the machine reaches without any of our code."""
    yield Figure("torch", str(torch.__version__))
    yield Figure("transformers", transformers.__version__)
    for name, value in describe_machine(device).items():
        yield Figure(name, str(value))
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        yield Figure("compute capability", f"{properties.major}.{properties.minor}")
        yield Figure("memory of the GPU", round(properties.total_memory / 1e9, 1), "GB")
    dtype, notice = pick_dtype("bfloat16", device)
    yield Figure("precision", notice or str(dtype))

    n = scale.product_sizes[-1]
    a = torch.randn(n, n, device=device, dtype=dtype)
    b = torch.randn(n, n, device=device, dtype=dtype)
    best = product_rate(device, dtype, scale.product_sizes)
    yield Figure("best product", round(best / 1e12, 2), "TFLOP/s", "790")
    of_one, _ = per_step(partial(torch.mm, a, b), device, scale.product_s)
    sustained = 2 * n**3 / of_one
    yield Figure(f"products for {scale.product_s:g} s", round(sustained / 1e12, 2), "TFLOP/s")
    source = torch.empty(scale.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    of_copy, _ = per_step(partial(target.copy_, source), device, scale.turn_s / 3)
    # Each byte is read and written.
    yield Figure("copy on the device", round(2 * scale.copied_bytes / of_copy / 1e9), "GB/s", "4,000")


def compiling(device: torch.device, scale: Scale) -> Iterator[Figure]:
    """Seconds until the first update, with an empty cache of compiled code and with a full one."""
    for number, size in enumerate(scale.sizes):
        # How much a full cache saves is much the same for all of them.
        for state in ("empty cache", "full cache") if number == 0 else ("empty cache",):
            torch.compiler.reset()
            start = time.perf_counter()
            training = Training(SIZES[size], device, scale.rows[0], T)
            seconds(training.step, device)
            yield Figure(f"{size}: first update, {state}", round(time.perf_counter() - start, 1), "s")


def throughput(device: torch.device, scale: Scale) -> Iterator[Figure]:
    """Updates of one micro-batch of full rows."""
    dtype, _ = pick_dtype("bfloat16", device)
    rate = product_rate(device, dtype, scale.product_sizes)
    yield Figure("best product, of which the shares are", round(rate / 1e12, 2), "TFLOP/s")
    for size in scale.sizes:
        for rows in scale.rows:
            # What was compiled for other shapes counts towards a limit, beyond which nothing more is compiled.
            torch.compiler.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            name = f"{size}, {rows} rows"
            try:
                figures = throughput_of(size, rows, device, scale.turn_s, rate)
            except torch.OutOfMemoryError:
                # Not within this block: the error holds the tensors that filled the memory.
                figures = [Figure(f"{name}: peak memory", "does not fit")]
            yield from figures


def throughput_of(size: str, rows: int, device: torch.device, turn_s: float, rate: float) -> list[Figure]:
    """Of one size with so many rows. rate: FLOP/s of large products. Errors: torch.OutOfMemoryError."""
    training = Training(SIZES[size], device, rows, T)
    training.step()
    of_step, of_host = per_step(training.step, device, turn_s)
    config = training.model.config
    flops = flops_per_token(config, training.length)
    share = 100 * training.tokens / of_step * flops / rate
    predicted = PREDICTED_SHARE.get(size, "") if rows == 32 else ""
    estimate = training_memory(
        config, rows, T, "adamw", compiled=True, gradient_checkpointing=False, device=device.type
    )
    name = f"{size}, {rows} rows"
    return [
        Figure(f"{name}: tokens", round(training.tokens / of_step), "1/s"),
        Figure(f"{name}: share of the product rate", round(share, 1), "%", predicted),
        Figure(f"{name}: a step", round(of_step * 1e3, 2), "ms"),
        Figure(f"{name}: the host's part of it", round(of_host * 1e3, 2), "ms"),
        Figure(f"{name}: peak memory", round(peak_memory(device) / 1e9, 2), "GB", f"{estimate.total / 1e9:.1f}"),
    ]


def against_plain_loop(device: torch.device, scale: Scale) -> Iterator[Figure]:
    """The 26 M model against the plain loop."""
    flags = ["--sizes", "26m", "--seconds", "40", "--slice", "2", "--documents", "2000"]
    if scale is not FULL:
        flags = ["--sizes", "tiny", "--seconds", "15", "--slice", "2", "--documents", "300"]
    yield from side_by_side(device, ("plain", "ours"), flags, dict.fromkeys(PLAIN_RATIOS, "3 or more"))


def step_of_electra(device: torch.device, scale: Scale) -> Iterator[Figure]:
    """The small ELECTRA, 128 examples of 128 positions, against the public trainers' step in fp32 and in bf16."""
    # To start three sides takes most of it.
    flags = ["--sizes", "electra", "--seconds", "100", "--slice", "2", "--documents", "4000"]
    if scale is not FULL:
        flags = ["--sizes", "electra", "--seconds", "5", "--slice", "0.1", "--documents", "60"]
        # Four examples, and nothing compiled: the networks have no smaller size.
        flags += ["--rows", "1", "--use_compile", "0"]
    yield from side_by_side(device, ("plain", "plain-bf16", "ours"), flags, OF_ELECTRA)


def side_by_side(
    device: torch.device, sides: Sequence[str], flags: Sequence[str], predicted: Mapping[str, str]
) -> Iterator[Figure]:
    """benchmarks/bench.py on the documents inside Python: sides take turns in one run. predicted: by the names of figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "bench.json")
        command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), "--sides", ",".join(sides), "--out", str(out)]
        # Its progress is not for this table.
        subprocess.run([*command, "--device", device.type, *flags], check=True, stdout=subprocess.DEVNULL)
        (record,) = json.loads(out.read_text())
    figures = []
    for name in sides:
        side = record["sides"].get(name)
        if side is None:
            figures.append(Figure(name, "does not run here; its error stands above"))
            continue
        figures.append(Figure(f"{name}: text tokens", round(side["text_tokens_per_second"]), "1/s"))
        figures.append(Figure(f"{name}: share of the product rate", round(100 * side["utilisation"], 1), "%"))
        figures.append(Figure(f"{name}: peak memory", round(side["peak_memory_bytes"] / 1e9, 2), "GB"))
        figures.append(Figure(f"{name}: first update", round(side["first_update_seconds"], 1), "s"))
    for what, (middle, least, greatest) in record["ratios"].items():
        figures.append(Figure(what, f"{middle:.2f} ({least:.2f} to {greatest:.2f})"))
    for figure in figures:
        yield replace(figure, predicted=predicted.get(figure.what, ""))


def profile(device: torch.device, scale: Scale) -> Iterator[Figure]:
    """Where the time of a step goes: the kernels that take most of it, how many there are, how long none runs."""
    size = scale.sizes[0]
    training = Training(SIZES[size], device, scale.rows[0], T)
    for _ in range(3):
        training.step()
    steps = 3
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    synchronize(device)
    start = time.perf_counter()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            training.step()
        synchronize(device)
        wall = time.perf_counter() - start
    events = profiler.key_averages()
    on_gpu = device.type == "cuda"

    def own_time(event: Any) -> float:
        """Microseconds."""
        return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)

    kernels = sorted((event for event in events if own_time(event)), key=own_time, reverse=True)
    if on_gpu:
        kernels = [event for event in kernels if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(own_time(event) for event in kernels) / 1e6
    launches = sum(event.count for event in kernels) / steps
    yield Figure(f"{size}: kernels of a step" if on_gpu else f"{size}: operators of a step", round(launches))
    yield Figure(f"{size}: time in which none runs", round(100 * max(1 - busy / wall, 0), 1), "%")
    for event in kernels[:25]:
        yield Figure(f"{event.key[:60]} (x{event.count / steps:g})", round(own_time(event) / steps / 1e3, 3), "ms")


def parts(device: torch.device, scale: Scale) -> Iterator[Figure]:
    """A save beside the training, the exchange of gradients with one rank, and attention and its mask alone.

    Attention comes last: a kernel that fails within a GPU takes the whole process with it.
    """
    yield from save(device, scale)
    yield from exchange(device, scale)
    yield from attention(device, scale)


def attention(device: torch.device, scale: Scale) -> Iterator[Figure]:
    """Forward and backward of one layer of the 26 M model."""
    rows = scale.rows[0]
    dtype, _ = pick_dtype("bfloat16", device)
    batch, _ = packed_batch(rows, T, MEAN_LENGTH, MiniMindConfig().vocab_size, torch.Generator().manual_seed(0))
    document_ids = batch.document_ids.to(device)
    shapes = [(rows, heads, T, 64) for heads in (8, 2, 2)]
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)

    def both_ways(attend: Callable[..., torch.Tensor], mask: Any) -> None:
        attend(q, k, v, mask).sum().backward()

    of_mask, of_host = per_step(partial(flex_mask, document_ids), device, scale.turn_s / 3)
    yield Figure("block mask: on the device", round(of_mask * 1e3, 3), "ms", "0.09")
    yield Figure("block mask: the host's part", round(of_host * 1e3, 3), "ms")
    plain = partial(scaled_dot_product_attention, dropout=0.0)
    of_plain, _ = per_step(partial(both_ways, plain, document_mask(document_ids)), device, scale.turn_s / 3)
    yield Figure("attention: PyTorch's with a mask", round(of_plain * 1e3, 3), "ms")
    if device.type == "cuda":
        compiled = torch.compile(flex_attend, dynamic=False)
        mask = flex_mask(document_ids)
        both_ways(compiled, mask)
        of_flex, _ = per_step(partial(both_ways, compiled, mask), device, scale.turn_s / 3)
        yield Figure("attention: FlexAttention", round(of_flex * 1e3, 3), "ms")
        yield from varlen_attention(q, k, v, document_ids, scale.turn_s / 3)


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, document_ids: torch.Tensor, turn_s: float
) -> Iterator[Figure]:
    """torch's attention of a list of documents, which training does not use, forward and backward.

    With a list of the documents that are there, whose length the host has to know, and with one that is always long enough.
    """
    exact = document_bounds(document_ids)
    longest = int(exact.diff().max())
    # A document for each position, most of them empty
    fixed = F.pad(exact, (0, document_ids.numel() + 1 - len(exact)), value=document_ids.numel())
    # [B, heads, T, D] -> [B*T, heads, D], as the kernel wants it: no copy is to be timed.
    rows = [x.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for x in (q, k, v)]
    for name, bounds in (("its documents", exact), ("a fixed length", fixed)):
        what = f"attention: varlen_attn with a list of {name}"

        def both_ways(bounds: torch.Tensor = bounds) -> None:
            varlen_attend(rows, bounds, longest).sum().backward()

        try:
            of_varlen, _ = per_step(both_ways, q.device, turn_s)
        except Exception as error:
            # Versions of torch without it, or with other arguments, and cards that it does not know.
            yield Figure(what, f"does not work here ({reason_of(error)})")
        else:
            yield Figure(what, round(of_varlen * 1e3, 3), "ms")


def document_bounds(document_ids: torch.Tensor) -> torch.Tensor:
    """document_ids [B, T] -> int32 [documents + 1]: where each document begins among the B*T positions, and B*T."""
    B, T = document_ids.shape
    begins = document_starts(document_ids) == torch.arange(T, device=document_ids.device)
    return F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=B * T).int()


def varlen_attend(rows: Sequence[torch.Tensor], bounds: torch.Tensor, longest: int) -> torch.Tensor:
    """Queries, keys and values [positions, heads, D] -> [positions, heads, D]. longest: the positions of a document."""
    from torch.nn.attention import varlen

    q, k, v = rows
    causal = (-1, 0)
    attended = varlen.varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=causal, enable_gqa=True)
    # A pair where it was asked for more.
    assert isinstance(attended, torch.Tensor)
    return attended


def save(device: torch.device, scale: Scale) -> Iterator[Figure]:
    """What a save takes of the training."""
    training = Training(SIZES[scale.sizes[0]], device, scale.rows[0], T)
    training.step()
    of_step, _ = per_step(training.step, device, scale.turn_s / 3)
    state = {"model": training.model.state_dict(), "engine": training.engine.state_dict()}
    # The first one takes the memory on the host, and later ones take it over.
    for which in ("the first", "the next"):
        of_copy = seconds(lambda: snapshot(state), device)
        yield Figure(f"save: {which} copy to main memory, which training waits for", round(of_copy * 1e3, 1), "ms")
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder, keep=1)
        checkpoints.save(state, 1)
        synchronize(device)
        start = time.perf_counter()
        steps = 0
        while checkpoints.writing():
            training.step()
            synchronize(device)
            steps += 1
        beside = time.perf_counter() - start
        checkpoints.wait()
    yield Figure("save: written beside the training within", round(beside, 2), "s")
    if steps:
        yield Figure("save: a step beside it, of one alone", round(beside / steps / of_step, 3))


def exchange(device: torch.device, scale: Scale) -> Iterator[Figure]:
    """All gradients of the 26 M model as one message."""
    n = 26_000_000 if scale is FULL else 1_000_000
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1)
    gradients = torch.zeros(n, device=device)
    of_reduction, _ = per_step(partial(dist.all_reduce, gradients), device, scale.turn_s / 3)
    dist.destroy_process_group()
    yield Figure("sum of the gradients, one rank", round(of_reduction * 1e3, 3), "ms")
