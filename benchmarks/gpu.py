"""Is training right and fast on the GPU of this machine? In nine minutes, the most decisive parts first.

    make gpu                                                    # sections 0 to 6
    make gpu-speed                                              # 0, 1 and 6, in five minutes
    make gpu-bits                                               # benchmarks/gpu_bits.py: equal runs, in three minutes
    python benchmarks/gpu.py --sections 2 3                     # some of them
    python benchmarks/gpu.py --device cpu                       # try the command itself, with small models

It needs no network, no data, and no virtual environment of this repository: the PyTorch and transformers of an image
are enough, in any version. docs/gpu.md has a table of the sections.
Each section is a process with its own time limit, so that a failure or a hang does not affect the others. All sections end
at END_S, and none starts with less than MIN_LEFT_S left. A CPU, where only the command itself is tried, may take longer.
Compiled code is kept in --cache. Results go to --out at once, and are printed as rows of a Markdown table. `pytest -m gpu` runs the
checks of 2 to 5 as tests. Exit code 1: a check failed, or a section did not end or was left out.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder

import argparse
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_checks
from benchmarks.gpu_checks import Check
from benchmarks.training import SIZES, Training, per_step
from common.errors import UserError, user_errors
from common.flags import Parser
from common.start import ROOT
from trainer.machine.command_line import run_cli
from trainer.machine.devices import deterministic, pick_dtype
from trainer.machine.measure import describe_machine, peak_memory, product_rate, seconds, versions
from trainer.pretrain.memory import flops_per_token

# seconds at which all sections end, and seconds that must be left to start one
END_S = 535
MIN_LEFT_S = 35
# time limit of a section in seconds, and other limits by section
LIMIT_S = 90
LIMITS_S = {1: 200, 2: 120, 3: 120, 4: 150, 6: 120}
# A CPU may be shared, and its figures do not matter.
CPU_LIMIT_S = 1200
T = 512
# (size, rows) of section 1, the most decisive first
SHAPES = (("26m", 32), ("26m", 256), ("moe", 32), ("64m", 32), ("104m", 32), ("104m", 256))
SHAPES_ON_CPU = (("tiny", 2), ("tiny", 4))
# seconds of a turn
TURN_S = 2.0

# A result as a line of --out: {"what", "value", "unit"} of a figure, or {"what", "value", "ok", "seconds"} of a check.
Result = dict[str, Any]


def figure(what: str, value: str | float, unit: str = "") -> Result:
    """The result of a measurement."""
    return {"what": what, "value": value, "unit": unit}


def machine(device: torch.device) -> Iterator[Result]:
    """Versions, and the best matrix product."""
    for name, value in {**versions(), **describe_machine(device)}.items():
        yield figure(name, str(value))
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        yield figure("compute capability", f"{properties.major}.{properties.minor}")
        yield figure("memory of the GPU", round(properties.total_memory / 1e9, 1), "GB")
    dtype, notices = pick_dtype("bfloat16", device)
    yield figure("precision", ", ".join(notices) or str(dtype))
    yield figure("best product", round(product_rate(device, dtype) / 1e12, 2), "TFLOP/s")


def throughput(device: torch.device) -> Iterator[Result]:
    """Updates of one micro-batch of full rows."""
    dtype, _ = pick_dtype("bfloat16", device)
    rate = product_rate(device, dtype)
    for size, rows in SHAPES_ON_CPU if device.type == "cpu" else SHAPES:
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


def throughput_of(size: str, rows: int, device: torch.device, rate: float) -> list[Result]:
    """The figures of one size and number of rows. rate: FLOP/s of large products. Errors: torch.OutOfMemoryError."""
    start = time.perf_counter()
    training = Training(SIZES[size], device, rows, T, cuda_graphs=False)
    seconds(training.step, device)
    figures = [figure("first update", round(time.perf_counter() - start, 1), "s")]
    flops = flops_per_token(training.model.config, training.context)
    graphs = training.engine.graphs
    for is_on in (False, True) if graphs is not None else (False,):
        if graphs is not None:
            # The next step records the graphs; if that fails, it turns them off again.
            graphs.may_record = is_on
        training.step()
        step_s, host_s = per_step(training.step, device, TURN_S)
        how = "with graphs" if graphs is not None and graphs.may_record else "without graphs"
        share = 100 * training.tokens / step_s * flops / rate
        figures += [
            figure(f"tokens, {how}", round(training.tokens / step_s), "1/s"),
            figure(f"share of the product rate, {how}", round(share, 1), "%"),
            figure(f"a step, {how}", round(step_s * 1e3, 2), "ms"),
            figure(f"the host's part of it, {how}", round(host_s * 1e3, 2), "ms"),
        ]
    return [*figures, figure("peak memory", round(peak_memory(device) / 1e9, 2), "GB")]


def against_plain_loop(device: torch.device) -> Iterator[Result]:
    """benchmarks/bench.py with the 26 M model, on the text of corpora.py: sides take turns in one run."""
    flags = ["--sizes", "26m", "--seconds", "20", "--slice", "2", "--documents", "2000"]
    if device.type == "cpu":
        flags = ["--sizes", "tiny", "--seconds", "15", "--slice", "2", "--documents", "300"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "bench.json")
        command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), "--sides", "plain", "ours", "--out", str(out)]
        # Without its progress output
        subprocess.run([*command, "--device", device.type, *flags], check=True, stdout=subprocess.DEVNULL)
        (run,) = json.loads(out.read_text())
    for name, side in run["sides"].items():
        yield figure(f"{name}: text tokens", round(side["text_tokens_per_second"]), "1/s")
        yield figure(f"{name}: share of the product rate", round(100 * side["utilisation"], 1), "%")
        yield figure(f"{name}: peak memory", round(side["peak_memory_bytes"] / 1e9, 2), "GB")
        yield figure(f"{name}: first update", round(side["first_update_seconds"], 1), "s")
    for what, (middle, least, greatest) in run["ratios"].items():
        yield figure(what, f"{middle:.2f} ({least:.2f} to {greatest:.2f})")


def one_by_one(checks: Mapping[str, Check], device: torch.device) -> Iterator[Result]:
    for name, check in checks.items():
        yield result_of(name, check, device)


def at_once(checks: Mapping[str, Check], device: torch.device) -> Iterator[Result]:
    """As they end: a section that is stopped keeps finished results."""
    with ThreadPoolExecutor(len(checks)) as pool:
        for ended in as_completed(pool.submit(result_of, name, check, device) for name, check in checks.items()):
            yield ended.result()


def result_of(name: str, check: Check, device: torch.device) -> Result:
    """The result of one check."""
    start = time.perf_counter()
    ok = True
    try:
        findings = check(device)
    except Exception as error:
        # The other checks of the section still run.
        findings = f"{type(error).__name__}: {error}"
        ok = False
    return {"what": name, "value": findings, "ok": ok, "seconds": round(time.perf_counter() - start, 1)}


# (name, its measurements or checks)
SECTIONS: list[tuple[str, Callable[[torch.device], Iterator[Result]]]] = [
    ("machine", machine),
    ("throughput", throughput),
    # They only start trainers and look at their files: nothing is timed.
    ("trainer", partial(at_once, gpu_checks.TRAINER)),
    ("numbers", partial(one_by_one, gpu_checks.NUMBERS)),
    ("waiting and graphs", partial(one_by_one, gpu_checks.WAITING)),
    ("bad numbers", partial(one_by_one, gpu_checks.BAD_NUMBERS)),
    ("against the plain loop", against_plain_loop),
]


def limit_of(number: int, seconds_so_far: float, device: str) -> float:
    """Time limit of a section in seconds; 0: do not start it."""
    if device == "cpu":
        return CPU_LIMIT_S
    limit = min(LIMITS_S.get(number, LIMIT_S), END_S - seconds_so_far)
    return limit if limit >= MIN_LEFT_S else 0


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process of a section, and the trainers that it may have started."""
    if not hasattr(os, "killpg"):
        process.kill()
        return
    # Its process group has its pid, and is gone once all of them have ended.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_section(number: int, args: argparse.Namespace, limit: float) -> None:
    """Run a section in a process, which records its results; records how it ended. limit: in seconds."""
    if not limit:
        why = f"no time is left for it; --sections {number} runs it alone"
        record({"what": "left out", "value": why, "ok": False}, number, args.out)
        return
    start = time.monotonic()
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(Path(args.cache).absolute())}
    flags = ["--section", str(number), "--device", args.device, "--out", args.out]
    command = [sys.executable, str(Path(__file__).resolve()), *flags]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = process.wait(limit)
        reason = f"exit code {code}; its error is above" if code else ""
    except subprocess.TimeoutExpired:
        reason = f"stopped after {limit:g} s"
    finally:
        # Ctrl-C and SIGTERM reach only this process.
        kill_group(process)
    if reason:
        record({"what": "the section did not end", "value": reason, "ok": False}, number, args.out)
    record(figure("seconds of the section", round(time.monotonic() - start, 1)), number, args.out)


def record(result: Result, number: int, out: str) -> None:
    """Append a result of a section to the file `out`, and print it as a row: `1,200,000 1/s`, or `ok: ...` for a check."""
    with open(out, "a", encoding="utf-8") as file:
        file.write(json.dumps({"section": number, **result}) + "\n")
    value = result["value"]
    text = f"{value:,}" if isinstance(value, (int, float)) else str(value)
    if "ok" in result:
        text = f"{'ok' if result['ok'] else 'FAILED'}: {text}"
    cells = [
        f"{number} {SECTIONS[number][0]}",
        str(result["what"]),
        f"{text} {result.get('unit', '')}".rstrip().replace("\n", " ")[:200],
    ]
    print("|", " | ".join(cell.replace("|", "/") for cell in cells), "|", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code. Errors: UserError."""
    p = Parser(prog="gpu.py", description="Whether training is right and fast on this GPU.")
    numbers = range(len(SECTIONS))
    p.add_argument("--sections", type=int, nargs="+", choices=numbers, help="their numbers (default: 0 to 6)")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the command itself")
    p.add_argument("--out", default=str(ROOT / "out" / "gpu.jsonl"), help="all results (default: out/gpu.jsonl)")
    cache = str(ROOT / "out" / "gpu_cache")
    p.add_argument("--cache", default=cache, help="folder of compiled code, kept for the next time (out/gpu_cache)")
    # Set in the process of a section
    p.add_argument("--section", type=int, choices=numbers, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.section is not None:
        # As train_pretrain.py by default: without it PyTorch's attention gives other bits each time, and graphs are refused.
        with deterministic() if args.device == "cuda" else contextlib.nullcontext():
            _, results_of = SECTIONS[args.section]
            for result in results_of(torch.device(args.device)):
                record(result, args.section, args.out)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("this machine shows no CUDA device; --device cpu tries the command itself")
    path = Path(args.out)
    with user_errors():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    print("| section | what | found |\n|---|---|---|", flush=True)
    start = time.monotonic()
    for number in args.sections or numbers:
        run_section(number, args, limit_of(number, time.monotonic() - start, args.device))
    print(f"\nall results: {path}")
    results = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    failed = [f"{result['what']} (section {result['section']})" for result in results if not result.get("ok", True)]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    run_cli(main)
