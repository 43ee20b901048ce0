"""What check.py measures: the machine, and throughput. No figure is judged."""

import gc
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.training import SIZES, Training
from trainer.machine.devices import cpu_has_bfloat16, pick_dtype
from trainer.machine.measure import (
    describe_machine,
    peak_memory,
    product_rate,
    seconds,
    synchronize,
    total_memory,
    versions,
)
from trainer.pretrain.memory import flops_per_token

T = 512
# (size, rows), the most decisive first
SHAPES = (("26m", 32), ("26m", 256), ("moe", 32), ("64m", 32), ("104m", 32), ("104m", 256))
SHAPES_ON_CPU = (("tiny", 2), ("tiny", 4))
# seconds in which steps are timed
TURN_S = 2.0

# A result as a line of --out: {"what", "value", "unit"} of a figure, or {"what", "value", "ok", "seconds"} of a check.
Result = dict[str, Any]


def figure(what: str, value: str | float, unit: str = "") -> Result:
    """The result of a measurement."""
    return {"what": what, "value": value, "unit": unit}


def machine(device: torch.device) -> Iterator[Result]:
    """System, processor, GPU, versions, precision, and the best matrix product."""
    facts, simd = describe_machine(device), torch.backends.cpu.get_cpu_capability()
    memory, of_device = (f"{(total_memory(torch.device(name)) or 0) / 1e9:.0f} GB" for name in ("cpu", device))
    yield figure("system", f"{platform.platform()}, {memory}")
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    processor = f"{facts['processor']} {capabilities.get('cpu_name')}, {facts['cores']} cores"
    yield figure("processor", f"{processor}, {facts['threads']} threads, {simd}, bfloat16: {cpu_has_bfloat16()}")
    if device.type == "cuda":
        driver = subprocess.getoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader").partition("\n")[0]
        chip = ".".join(map(str, torch.cuda.get_device_capability(device)))
        build = f"CUDA {torch.version.cuda} (ROCm {torch.version.hip})"
        yield figure("GPU", f"{facts['gpu']}, {chip}, {of_device}, driver {driver}, {build}")
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    yield figure("versions", f"Python {facts['python']}, {packages}")
    dtype, notices = pick_dtype("bfloat16", device)
    yield figure("precision", f"on {device}: {', '.join(notices) or dtype}")
    yield figure("best product", round(product_rate(device, dtype) / 1e12, 2), "TFLOP/s")


def throughput(device: torch.device) -> Iterator[Result]:
    """Updates of one micro-batch of full rows."""
    dtype, _ = pick_dtype("bfloat16", device)
    rate = product_rate(device, dtype)
    for size, rows in SHAPES if device.type == "cuda" else SHAPES_ON_CPU:
        # Code compiled for other shapes counts towards torch's limit of compilations.
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            figures = throughput_of(size, rows, device, rate)
        except torch.OutOfMemoryError:
            # Nothing is yielded in this block: the error holds the tensors that filled the memory.
            figures = [figure("peak memory", "does not fit")]
        for result in figures:
            yield {**result, "what": f"{size}, {rows} rows: {result['what']}"}


def plain_code(device: torch.device) -> Iterator[Result]:
    """MiniMind's 26 M model in plain code; compiling could take more than the two minutes of `make report`."""
    rate = product_rate(device, pick_dtype("bfloat16", device)[0])
    rows = 32 if device.type == "cuda" else 4
    yield from throughput_of("26m", rows, device, rate, compiled=False)


def throughput_of(size: str, rows: int, device: torch.device, rate: float, compiled: bool = True) -> list[Result]:
    """The figures of one size and number of rows. rate: FLOP/s of large products. Errors: torch.OutOfMemoryError."""
    start = time.perf_counter()
    training = Training(SIZES[size], device, rows, T, compiled=compiled, cuda_graphs=False)
    seconds(training.step, device)
    figures = [figure("first update", round(time.perf_counter() - start, 1), "s")]
    flops = flops_per_token(training.model.config, training.context)
    graphs = training.engine.graphs
    for is_on in (False, True) if graphs is not None else (False,):
        if graphs is not None:
            # The next step records the graphs; if that fails, it turns them off again.
            graphs.may_record = is_on
        training.step()
        step_s, host_s = per_step(training.step, device)
        how = "with graphs" if graphs is not None and graphs.may_record else "without graphs"
        share = 100 * training.tokens / step_s * flops / rate
        figures += [
            figure(f"tokens, {how}", round(training.tokens / step_s), "1/s"),
            figure(f"share of the product rate, {how}", round(share, 1), "%"),
            figure(f"a step, {how}", round(step_s * 1e3, 2), "ms"),
            figure(f"the host's part of it, {how}", round(host_s * 1e3, 2), "ms"),
        ]
    return [*figures, figure("peak memory", round(peak_memory(device) / 1e9, 2), "GB")]


def per_step(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """(seconds of a step on the device, seconds of the host to launch it), over TURN_S.

    Waiting for a GPU in each step would add the host's work, which overlaps with the device in training.
    """
    step_s = seconds(step, device)
    steps = max(3, int(TURN_S / max(step_s, 1e-6)))
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    launched = time.perf_counter() - start
    synchronize(device)
    return (time.perf_counter() - start) / steps, launched / steps
