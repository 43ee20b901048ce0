"""How fast training is on a GPU: what `make gpu` measures.

A measurement is a generator of Figures, which are printed as they come. All of them run on a CPU too, with small models
and short turns, which tells whether the measurements themselves work.
"""

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import transformers

from benchmarks.arguments import SIZES
from benchmarks.training import Training, per_step
from common.paths import ROOT
from trainer.machine.devices import pick_dtype
from trainer.machine.measure import describe_machine, peak_memory, product_rate, seconds
from trainer.pretrain.memory import flops_per_token

T = 512


@dataclass(frozen=True)
class Figure:
    """What was measured."""

    what: str
    value: str | float
    unit: str = ""


@dataclass(frozen=True)
class Scale:
    """How much is measured: all of it, or so little that a CPU has done it in a minute."""

    # (size, rows), what decides most first
    shapes: tuple[tuple[str, int], ...]
    turn_s: float
    product_s: float
    copied_bytes: int
    product_sizes: tuple[int, ...]


FULL = Scale(
    shapes=(("26m", 32), ("26m", 256), ("moe", 32), ("64m", 32), ("104m", 32), ("104m", 256)),
    turn_s=2.0,
    product_s=10.0,
    copied_bytes=1 << 30,
    product_sizes=(4096, 8192),
)
SMALL = Scale(
    shapes=(("tiny", 2), ("tiny", 4)), turn_s=0.5, product_s=0.5, copied_bytes=1 << 24, product_sizes=(512, 1024)
)
Measurement = Callable[[torch.device, Scale], Iterator[Figure]]


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
    yield Figure("best product", round(best / 1e12, 2), "TFLOP/s")
    of_one, _ = per_step(partial(torch.mm, a, b), device, scale.product_s)
    sustained = 2 * n**3 / of_one
    yield Figure(f"products for {scale.product_s:g} s", round(sustained / 1e12, 2), "TFLOP/s")
    source = torch.empty(scale.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    of_copy, _ = per_step(partial(target.copy_, source), device, scale.turn_s / 3)
    # Each byte is read and written.
    yield Figure("copy on the device", round(2 * scale.copied_bytes / of_copy / 1e9), "GB/s")


def throughput(device: torch.device, scale: Scale) -> Iterator[Figure]:
    """Updates of one micro-batch of full rows."""
    dtype, _ = pick_dtype("bfloat16", device)
    rate = product_rate(device, dtype, scale.product_sizes)
    yield Figure("best product, of which the shares are", round(rate / 1e12, 2), "TFLOP/s")
    for size, rows in scale.shapes:
        # What was compiled for other shapes counts towards a limit, beyond which nothing more is compiled.
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            figures = throughput_of(size, rows, device, scale.turn_s, rate)
        except torch.OutOfMemoryError:
            # Not within this block: the error holds the tensors that filled the memory.
            figures = [Figure("peak memory", "does not fit")]
        for figure in figures:
            yield replace(figure, what=f"{size}, {rows} rows: {figure.what}")


def throughput_of(size: str, rows: int, device: torch.device, turn_s: float, rate: float) -> list[Figure]:
    """Of one size with so many rows. rate: FLOP/s of large products. Errors: torch.OutOfMemoryError."""
    start = time.perf_counter()
    training = Training(SIZES[size], device, rows, T, cuda_graphs=False)
    seconds(training.step, device)
    figures = [Figure("first update", round(time.perf_counter() - start, 1), "s")]
    flops = flops_per_token(training.model.config, training.length)
    for graphs in (False, True) if training.engine.graphs is not None else (False,):
        if training.engine.graphs is not None:
            # With them the next step records them.
            training.engine.graphs.is_on = graphs
        training.step()
        of_step, of_host = per_step(training.step, device, turn_s)
        how = "with graphs" if graphs else "without graphs"
        share = 100 * training.tokens / of_step * flops / rate
        figures += [
            Figure(f"tokens, {how}", round(training.tokens / of_step), "1/s"),
            Figure(f"share of the product rate, {how}", round(share, 1), "%"),
            Figure(f"a step, {how}", round(of_step * 1e3, 2), "ms"),
            Figure(f"the host's part of it, {how}", round(of_host * 1e3, 2), "ms"),
        ]
    return [*figures, Figure("peak memory", round(peak_memory(device) / 1e9, 2), "GB")]


def against_plain_loop(device: torch.device, scale: Scale) -> Iterator[Figure]:
    """benchmarks/bench.py with the 26 M model on the documents inside Python: sides take turns in one run."""
    flags = ["--sizes", "26m", "--seconds", "40", "--slice", "2", "--documents", "2000"]
    if scale is not FULL:
        flags = ["--sizes", "tiny", "--seconds", "15", "--slice", "2", "--documents", "300"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "bench.json")
        command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), "--sides", "plain,ours", "--out", str(out)]
        # Its progress is not for this table.
        subprocess.run([*command, "--device", device.type, *flags], check=True, stdout=subprocess.DEVNULL)
        (record,) = json.loads(out.read_text())
    for name, side in record["sides"].items():
        yield Figure(f"{name}: text tokens", round(side["text_tokens_per_second"]), "1/s")
        yield Figure(f"{name}: share of the product rate", round(100 * side["utilisation"], 1), "%")
        yield Figure(f"{name}: peak memory", round(side["peak_memory_bytes"] / 1e9, 2), "GB")
        yield Figure(f"{name}: first update", round(side["first_update_seconds"], 1), "s")
    for what, (middle, least, greatest) in record["ratios"].items():
        yield Figure(what, f"{middle:.2f} ({least:.2f} to {greatest:.2f})")
