"""Whether training is right and fast on the GPU of this machine, in nine minutes.

    make gpu                                                    # everything
    make gpu-quick                                              # sections 0 to 2
    python benchmarks/gpu.py --sections 3 6                     # some of them
    python benchmarks/gpu.py --device cpu --seconds small       # whether this command itself works, on a CPU

It needs no network, no data, and no virtual environment of this repository: PyTorch, transformers and simple-parsing are
enough, in whatever versions an image has. Sections:

    0 machine                  versions, the best bf16 product, copies
    1 compiling                seconds until the first update
    2 numbers                  losses and gradients against float64 on the CPU
    3 trainer                  started without --device, killed, resumed: the same bits?
    4 waiting                  updates in which the host never waits for the GPU
    5 bad numbers              NaN, infinity, the scale of float16
    6 throughput               tokens/s and the share of the product rate, for each size
    7 against the plain loop   benchmarks/bench.py
    8 profile                  kernels of a step
    9 parts                    attention, a save beside training, the exchange of gradients

Each section is a process with a time limit of its own, so that one that fails or hangs leaves the others alone. After
LAST_START_S no section starts any more, and after END_S none goes on. Compiled code is kept from section to section, and for
no later command. What is found goes to --out at once, a table of it comes last. `pytest -m gpu`
runs the checks of 2 to 5 as tests. Exit code 1: a check failed, or a section did not end.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import gpu_parser

    gpu_parser().parse_args()

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any, NoReturn

import torch

from benchmarks import gpu_checks, gpu_figures
from benchmarks.arguments import GPU_SECTIONS, gpu_parser
from benchmarks.gpu_checks import Check
from benchmarks.gpu_figures import FULL, SMALL, Measurement

LAST_START_S = 500
END_S = 535
# Of a section, in seconds, where it is not this
LIMIT_S = 90
LIMITS_S = {1: 120, 2: 120, 3: 150, 6: 120}
MEASUREMENTS: dict[int, Measurement] = {
    0: gpu_figures.machine,
    1: gpu_figures.compiling,
    6: gpu_figures.throughput,
    7: gpu_figures.against_plain_loop,
    8: gpu_figures.profile,
    9: gpu_figures.parts,
}
CHECKS: dict[int, Mapping[str, Check]] = {
    2: gpu_checks.NUMBERS,
    3: gpu_checks.TRAINER,
    4: gpu_checks.WAITING,
    5: gpu_checks.BAD_NUMBERS,
}
# A result as a line of --out: of a Figure, or {"what", "value", "ok"} of a check.
Result = dict[str, Any]


# ------------------------------------------------------------------------------- the process of a section


def results_of(number: int, device: torch.device, small: bool) -> Iterator[Result]:
    """What a section finds, as it finds it."""
    if number in MEASUREMENTS:
        for figure in MEASUREMENTS[number](device, SMALL if small else FULL):
            yield dataclasses.asdict(figure)
        return
    for name, check in CHECKS[number].items():
        start = time.perf_counter()
        try:
            found = check(device)
            ok = True
        except Exception as error:
            # The other checks of the section may still tell something.
            found = f"{type(error).__name__}: {error}"
            ok = False
        yield {"what": name, "value": found, "ok": ok, "seconds": round(time.perf_counter() - start, 1)}


def run_section(args: argparse.Namespace) -> None:
    """Print a line of JSON for each result, and nothing else: what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for result in results_of(args.section, torch.device(args.device), args.seconds == "small"):
        print(json.dumps(result), file=answers, flush=True)


# ---------------------------------------------------------------------------------------- the command


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Within the block SIGTERM, and the SIGHUP of a terminal that closes, end this process as Ctrl-C does: by an exception.

    Without it they would end it at once, and its section would go on by itself. Errors: SystemExit.
    """

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + signum)

    before = {}
    for name in ("SIGTERM", "SIGHUP"):
        # Windows has no SIGHUP.
        if hasattr(signal, name):
            number = getattr(signal, name)
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def limit_of(number: int, seconds_so_far: float) -> float:
    """Seconds that a section may take."""
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


def ask(number: int, args: argparse.Namespace, out: IO[str], limit: float, compiled_code: str) -> list[Result]:
    """Run a section in a process of its own; its results, also the first ones of a section that fails.

    limit: of its seconds. compiled_code: the folder of what torch.compile keeps.
    """
    results: list[Result] = []

    def add(result: Result) -> None:
        result = {"section": number, **result}
        results.append(result)
        print(json.dumps(result), file=out, flush=True)
        print(f"  {line_of(result)}", flush=True)

    start = time.monotonic()
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": compiled_code}
    process = subprocess.Popen(
        section_command(number, args), stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    alarm = threading.Timer(limit, end_with_its_own, [process])
    try:
        alarm.start()
        assert process.stdout is not None
        for line in process.stdout:
            add(json.loads(line))
        code = process.wait()
    finally:
        alarm.cancel()
        # Ctrl-C and SIGTERM reach this process alone.
        end_with_its_own(process)
    seconds = time.monotonic() - start
    if code:
        reason = f"stopped after {limit:g} s" if seconds >= limit else f"exit code {code}; its error stands above"
        add({"what": "the section did not end", "value": reason, "ok": False})
    add({"what": "seconds of the section", "value": round(seconds, 1)})
    return results


def found_text(result: Result) -> str:
    """As `1,200,000 1/s`, or `ok: ...` of a check."""
    value = result["value"]
    text = f"{value:,}" if isinstance(value, (int, float)) else str(value)
    if "ok" in result:
        text = f"{'ok' if result['ok'] else 'FAILED'}: {text}"
    return f"{text} {result.get('unit', '')}".rstrip()


def line_of(result: Result) -> str:
    """As `26m, 32 rows: tokens: 1,200,000 1/s (predicted: ...)`."""
    predicted = f" (predicted: {result['predicted']})" if result.get("predicted") else ""
    return f"{result['what']}: {found_text(result)}{predicted}"


def table_of(results: Sequence[Result]) -> list[str]:
    """The summary, as a table of Markdown."""
    lines = ["| section | what | found | predicted |", "|---|---|---|---|"]
    for result in results:
        name = str(result["what"]).replace("|", "/")
        found = found_text(result).replace("|", "/").replace("\n", " ")[:200]
        lines.append(f"| {result['section']} | {name} | {found} | {result.get('predicted', '')} |")
    return lines


def main() -> int:
    args = gpu_parser().parse_args()
    if args.section is not None:
        run_section(args)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("this machine shows no CUDA device; --device cpu --seconds small tries the command itself")
        return 2
    numbers = args.sections or list(range(len(GPU_SECTIONS)))
    path = Path(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    results: list[Result] = []
    with (
        ended_in_order(),
        open(path, "w", encoding="utf-8") as out,
        tempfile.TemporaryDirectory() as compiled_code,
    ):
        for number in numbers:
            so_far = time.monotonic() - start
            if so_far > LAST_START_S:
                print(f"section {number} is left out: {LAST_START_S} s have passed")
                continue
            print(f"section {number}: {GPU_SECTIONS[number]}", flush=True)
            results += ask(number, args, out, limit_of(number, so_far), compiled_code)
    print("\n".join(["", *table_of(results)]))
    failed = [result["what"] for result in results if result.get("ok") is False]
    print(f"\nall results: {path}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
