"""Whether training is right and fast on the GPU of this machine, in nine minutes. What decides most comes first.

    make gpu                                                    # sections 0 to 6
    make gpu-speed                                              # 0, 1 and 6, in five minutes
    make gpu-bits                                               # benchmarks/gpu_bits.py: equal runs, in three minutes
    make gpu-electra                                            # sections 0 and 7, in two minutes
    python benchmarks/gpu.py --sections 2 3                     # some of them
    python benchmarks/gpu.py --device cpu --seconds small       # whether this command itself works, on a CPU

It needs no network, no data, and no virtual environment of this repository: PyTorch and transformers are
enough, in whatever versions an image has. Sections:

    0 machine                  versions, the best bf16 product, copies
    1 throughput               seconds until the first update; tokens/s with CUDA graphs and without, for each size
    2 trainer                  started without --device, killed, resumed: the same bits, with CUDA graphs and without?
    3 numbers                  losses and gradients against float64 on the CPU
    4 waiting and graphs       updates in which the host never waits for the GPU; updates by graphs and without, bit for bit
    5 bad numbers              NaN, infinity, the scale of float16
    6 against the plain loop   benchmarks/bench.py
    7 ELECTRA and GLUE         pretrained, killed, resumed, fine-tuned: the same bits, and what was learned?

The last one runs where it is asked for: all eight do not fit nine minutes.
Each section is a process with a time limit of its own, so that one that fails or hangs leaves the others alone. After
LAST_START_S no section starts any more, and after END_S none goes on. A CPU, which tells nothing but whether this command
works, may take longer. Compiled code is kept in --cache. What is found goes to --out
at once, a table of it comes last. `pytest -m gpu` runs the checks of 2 to 5 and 7 as tests. Exit code 1: a check failed, or a
section did not end or was left out.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    from common.start import begin

    begin(ends_at_ctrl_c=False)
    # --help and wrong flags are answered before torch is imported, which takes seconds.
    from benchmarks.arguments import gpu_parser

    ARGUMENTS = gpu_parser().parse_args()

import argparse
import contextlib
import gc
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import IO, Any, NoReturn

import torch
import transformers

from benchmarks import gpu_checks, gpu_electra
from benchmarks.arguments import GPU_SECTIONS, SIZES, USUAL_SECTIONS
from benchmarks.gpu_checks import Check, NotPromised
from benchmarks.training import Training, per_step
from common.errors import UserError, user_errors
from trainer.machine.command_line import run_cli
from trainer.machine.devices import pick_dtype
from trainer.machine.measure import describe_machine, peak_memory, product_rate, seconds
from trainer.pretrain.memory import flops_per_token

LAST_START_S = 500
END_S = 535
# Of a section, in seconds, where it is not this
LIMIT_S = 90
LIMITS_S = {1: 200, 2: 120, 3: 120, 7: 240}
# On a CPU: nobody waits for its figures, and other programs may use it too.
CPU_LIMIT_S = 1200
T = 512


# A result as a line of --out: {"what", "value", "unit"} of a figure, or {"what", "value", "ok"} of a check. ok: None is neither
# right nor wrong, see NotPromised.
Result = dict[str, Any]


def figure(what: str, value: str | float, unit: str = "") -> Result:
    """What was measured."""
    return {"what": what, "value": value, "unit": unit}


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
Measurement = Callable[[torch.device, Scale], Iterator[Result]]


def machine(device: torch.device, scale: Scale) -> Iterator[Result]:
    """Versions, and what the machine reaches without any of our code."""
    yield figure("torch", str(torch.__version__))
    yield figure("transformers", transformers.__version__)
    for name, value in describe_machine(device).items():
        yield figure(name, str(value))
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        yield figure("compute capability", f"{properties.major}.{properties.minor}")
        yield figure("memory of the GPU", round(properties.total_memory / 1e9, 1), "GB")
    dtype, notice = pick_dtype("bfloat16", device)
    yield figure("precision", notice or str(dtype))

    n = scale.product_sizes[-1]
    a = torch.randn(n, n, device=device, dtype=dtype)
    b = torch.randn(n, n, device=device, dtype=dtype)
    best = product_rate(device, dtype, scale.product_sizes)
    yield figure("best product", round(best / 1e12, 2), "TFLOP/s")
    of_one, _ = per_step(partial(torch.mm, a, b), device, scale.product_s)
    sustained = 2 * n**3 / of_one
    yield figure(f"products for {scale.product_s:g} s", round(sustained / 1e12, 2), "TFLOP/s")
    source = torch.empty(scale.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    of_copy, _ = per_step(partial(target.copy_, source), device, scale.turn_s / 3)
    # Each byte is read and written.
    yield figure("copy on the device", round(2 * scale.copied_bytes / of_copy / 1e9), "GB/s")


def throughput(device: torch.device, scale: Scale) -> Iterator[Result]:
    """Updates of one micro-batch of full rows."""
    dtype, _ = pick_dtype("bfloat16", device)
    rate = product_rate(device, dtype, scale.product_sizes)
    yield figure("best product, of which the shares are", round(rate / 1e12, 2), "TFLOP/s")
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
            figures = [figure("peak memory", "does not fit")]
        for found in figures:
            yield {**found, "what": f"{size}, {rows} rows: {found['what']}"}


def throughput_of(size: str, rows: int, device: torch.device, turn_s: float, rate: float) -> list[Result]:
    """Of one size with so many rows. rate: FLOP/s of large products. Errors: torch.OutOfMemoryError."""
    start = time.perf_counter()
    training = Training(SIZES[size], device, rows, T, cuda_graphs=False)
    seconds(training.step, device)
    figures = [figure("first update", round(time.perf_counter() - start, 1), "s")]
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
            figure(f"tokens, {how}", round(training.tokens / of_step), "1/s"),
            figure(f"share of the product rate, {how}", round(share, 1), "%"),
            figure(f"a step, {how}", round(of_step * 1e3, 2), "ms"),
            figure(f"the host's part of it, {how}", round(of_host * 1e3, 2), "ms"),
        ]
    return [*figures, figure("peak memory", round(peak_memory(device) / 1e9, 2), "GB")]


def against_plain_loop(device: torch.device, scale: Scale) -> Iterator[Result]:
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
        yield figure(f"{name}: text tokens", round(side["text_tokens_per_second"]), "1/s")
        yield figure(f"{name}: share of the product rate", round(100 * side["utilisation"], 1), "%")
        yield figure(f"{name}: peak memory", round(side["peak_memory_bytes"] / 1e9, 2), "GB")
        yield figure(f"{name}: first update", round(side["first_update_seconds"], 1), "s")
    for what, (middle, least, greatest) in record["ratios"].items():
        yield figure(what, f"{middle:.2f} ({least:.2f} to {greatest:.2f})")


MEASUREMENTS: dict[int, Measurement] = {
    0: machine,
    1: throughput,
    6: against_plain_loop,
}
CHECKS: dict[int, Mapping[str, Check]] = {
    2: gpu_checks.TRAINER,
    3: gpu_checks.NUMBERS,
    4: gpu_checks.WAITING,
    5: gpu_checks.BAD_NUMBERS,
    7: gpu_electra.ELECTRA,
}
# Checks that only start trainers and look at what they leave: their time is no figure, so they run side by side.
SIDE_BY_SIDE = (2, 7)
VERDICTS = {True: "ok", False: "FAILED", None: "not promised"}


def results_of(number: int, device: torch.device, small: bool) -> Iterator[Result]:
    """What a section finds, as it finds it."""
    if number in MEASUREMENTS:
        yield from MEASUREMENTS[number](device, SMALL if small else FULL)
        return
    checks = CHECKS[number]
    if number not in SIDE_BY_SIDE:
        for name, check in checks.items():
            yield result_of(name, check, device)
        return
    with ThreadPoolExecutor(len(checks)) as pool:
        # A section that is stopped keeps what has ended.
        for ended in as_completed(pool.submit(result_of, name, check, device) for name, check in checks.items()):
            yield ended.result()


def result_of(name: str, check: Check, device: torch.device) -> Result:
    """What one check finds."""
    start = time.perf_counter()
    ok: bool | None = True
    try:
        found = check(device)
    except NotPromised as seen:
        found = str(seen)
        ok = None
    except Exception as error:
        # The other checks of the section may still tell something.
        found = f"{type(error).__name__}: {error}"
        ok = False
    return {"what": name, "value": found, "ok": ok, "seconds": round(time.perf_counter() - start, 1)}


def run_section(args: argparse.Namespace) -> None:
    """Print a line of JSON for each result, and nothing else: what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for result in results_of(args.section, torch.device(args.device), args.seconds == "small"):
        print(json.dumps(result), file=answers, flush=True)


class Record:
    """What has been found. Each result is written and printed as it comes, and kept for the table."""

    def __init__(self, out: IO[str]) -> None:
        self.out = out
        self.results: list[Result] = []

    def add(self, section: int, result: Result) -> None:
        result = {"section": section, **result}
        self.results.append(result)
        print(json.dumps(result), file=self.out, flush=True)
        print(f"  {result['what']}: {found_text(result)}", flush=True)

    def names(self, ok: bool | None) -> list[str]:
        """Of the checks with this outcome."""
        return [
            f"{result['what']} (section {result['section']})"
            for result in self.results
            if result.get("ok", "a figure") is ok
        ]


def leave(signum: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM, and the SIGHUP of a terminal that closes, end this process as Ctrl-C does: by an exception, and its section with it."""
    sys.exit(128 + signum)


def limit_of(number: int, seconds_so_far: float, device: str) -> float:
    """Seconds that a section may take; 0 or less: it is not to start."""
    if device == "cpu":
        return CPU_LIMIT_S
    if seconds_so_far > LAST_START_S:
        return 0
    return min(LIMITS_S.get(number, LIMIT_S), END_S - seconds_so_far)


def end_with_its_own(process: "subprocess.Popen[str]") -> None:
    """Kill the process of a section, and the trainers that it may have started."""
    if not hasattr(os, "killpg"):
        process.kill()
        return
    # Its group has its number, and is gone where all of them have ended.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def section_command(number: int, args: argparse.Namespace) -> list[str]:
    """What runs a section."""
    command = [sys.executable, str(Path(__file__).resolve()), "--section", str(number)]
    return [*command, "--device", args.device, "--seconds", args.seconds]


def ask(number: int, args: argparse.Namespace, record: Record, limit: float) -> None:
    """Run a section in a process of its own, and record its results, also the first ones of a section that fails.

    limit: of its seconds.
    """
    start = time.monotonic()
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(Path(args.cache).absolute())}
    process = subprocess.Popen(
        section_command(number, args), stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    alarm = threading.Timer(limit, end_with_its_own, [process])
    try:
        alarm.start()
        assert process.stdout is not None
        for line in process.stdout:
            # Without its end it is one within which the section was stopped.
            if line.endswith("\n"):
                record.add(number, json.loads(line))
        code = process.wait()
    finally:
        alarm.cancel()
        # Ctrl-C and SIGTERM reach this process alone.
        end_with_its_own(process)
    seconds = time.monotonic() - start
    if code:
        reason = f"stopped after {limit:g} s" if seconds >= limit else f"exit code {code}; its error stands above"
        record.add(number, {"what": "the section did not end", "value": reason, "ok": False})
    record.add(number, {"what": "seconds of the section", "value": round(seconds, 1)})


def found_text(result: Result) -> str:
    """As `1,200,000 1/s`, or `ok: ...` of a check."""
    value = result["value"]
    text = f"{value:,}" if isinstance(value, (int, float)) else str(value)
    if "ok" in result:
        text = f"{VERDICTS[result['ok']]}: {text}"
    return f"{text} {result.get('unit', '')}".rstrip()


def table_of(results: Sequence[Result]) -> list[str]:
    """The summary, as a table of Markdown."""
    lines = ["| section | what | found |", "|---|---|---|"]
    for result in results:
        name = str(result["what"]).replace("|", "/")
        found = found_text(result).replace("|", "/").replace("\n", " ")[:200]
        lines.append(f"| {result['section']} | {name} | {found} |")
    return lines


def main(args: argparse.Namespace) -> int:
    """The exit code. Errors: UserError."""
    if args.section is not None:
        run_section(args)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("this machine shows no CUDA device; --device cpu --seconds small tries the command itself")
    path = Path(args.out)
    with user_errors():
        path.parent.mkdir(parents=True, exist_ok=True)
        out = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by the block below
    record = Record(out)
    start = time.monotonic()
    for name in ("SIGTERM", "SIGHUP"):
        # Windows has no SIGHUP.
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), leave)
    with out:
        for number in args.sections or USUAL_SECTIONS:
            print(f"section {number}: {GPU_SECTIONS[number]}", flush=True)
            limit = limit_of(number, time.monotonic() - start, args.device)
            if limit > 0:
                ask(number, args, record, limit)
            else:
                why = f"{LAST_START_S} s had passed; --sections {number} runs it alone"
                record.add(number, {"what": "left out", "value": why, "ok": False})
    print("\n".join(["", *table_of(record.results)]))
    print(f"\nall results: {path}")
    if not args.sections:
        print("ELECTRA and GLUE were not asked for: make gpu-electra, two minutes")
    not_promised = record.names(None)
    if not_promised:
        print(f"neither right nor wrong, since nobody promises it here: {', '.join(not_promised)}")
    failed = record.names(False)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    run_cli(partial(main, ARGUMENTS))
