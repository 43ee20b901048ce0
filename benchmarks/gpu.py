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
import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from types import FrameType
from typing import IO, Any, NoReturn

import torch

from benchmarks import gpu_checks, gpu_electra, gpu_figures
from benchmarks.arguments import GPU_SECTIONS, USUAL_SECTIONS
from benchmarks.gpu_checks import Check, NotPromised
from benchmarks.gpu_figures import FULL, SMALL, Measurement
from benchmarks.out_file import check_out
from common.errors import UserError
from trainer.machine.command_line import run_cli

LAST_START_S = 500
END_S = 535
# Of a section, in seconds, where it is not this
LIMIT_S = 90
LIMITS_S = {1: 200, 2: 120, 3: 120, 7: 240}
# On a CPU: nobody waits for its figures, and other programs may use it too.
CPU_LIMIT_S = 1200
MEASUREMENTS: dict[int, Measurement] = {
    0: gpu_figures.machine,
    1: gpu_figures.throughput,
    6: gpu_figures.against_plain_loop,
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
# A result as a line of --out: of a Figure, or {"what", "value", "ok"} of a check. ok: None is neither right nor wrong, see
# NotPromised.
Result = dict[str, Any]
VERDICTS = {True: "ok", False: "FAILED", None: "not promised"}


def results_of(number: int, device: torch.device, small: bool) -> Iterator[Result]:
    """What a section finds, as it finds it."""
    if number in MEASUREMENTS:
        for figure in MEASUREMENTS[number](device, SMALL if small else FULL):
            yield dataclasses.asdict(figure)
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
    check_out(path)
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
