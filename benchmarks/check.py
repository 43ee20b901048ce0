"""Does training work on this machine, is it right, and how fast is it? A Markdown table of what was found.

    make report                                     # does it work here: a table to post, in two minutes
    make gpu                                        # right and fast on the GPU, in nine; make gpu-speed: in five
    python benchmarks/check.py numbers trainer      # some sections; docs/gpu.md has a table of them
    python benchmarks/check.py gpu --device cpu     # try the command itself, with small models
    python benchmarks/check.py --against HEAD~20    # do small runs of a commit's files give the bits of this tree's?
    python benchmarks/check.py --python ../newer/.venv/bin/python    # ... do another Python's packages?

It needs no network, no data, and no virtual environment of this repository: the PyTorch, transformers and psutil of an
image are enough, in any version.
Each section is a process with its own time limit, so that a failure, a crash or a hang is a row and does not affect the
others. On a GPU all sections end at END_S, and none starts with less than MIN_LEFT_S left. A row goes to --out at once; what
trainers and libraries print goes to the .log beside it. The table has no folders, addresses, or names of user and machine.
`pytest -m gpu` runs the checks as tests. Exit code 1: a check failed, or a section did not end or was left out.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import NamedTuple, TextIO

import torch

from benchmarks import checks, measures, other_side
from benchmarks.checks import Check
from benchmarks.measures import Result
from common.errors import user_errors
from common.flags import Parser
from common.start import ROOT
from common.wording import one_line
from trainer.machine.command_line import run_cli
from trainer.machine.devices import deterministic, pick_device

# seconds at which all sections end on a GPU, which may be lent for minutes, and seconds that must be left to start one
END_S = 535
MIN_LEFT_S = 35
# Compiled code is kept here for the next time.
CACHE = ROOT / "out" / "check_cache"
# folders; addresses of IPv4; with three colons or more those of IPv6 and hardware
PLACES = re.compile(
    r"(?<!\w)(\w:)?[\\/](?=[^\s\\/])([^'\"\\/]+[\\/])*[^'\"\\/\s]+|(?<![\w.-])\d+(\.\d+){3}|([\da-fA-F]*:){3,}[\da-fA-F]*"
)


def one_by_one(of_section: Mapping[str, Check], device: torch.device) -> Iterator[Result]:
    for name, check in of_section.items():
        yield result_of(name, check, device)


def at_once(of_section: Mapping[str, Check], device: torch.device) -> Iterator[Result]:
    """Where nothing is timed. As they end: a section that is stopped keeps finished results."""
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        for ended in as_completed(pool.submit(result_of, name, check, device) for name, check in of_section.items()):
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


class Section(NamedTuple):
    """Measurements or checks of one process. on_cpu: its limit where a GPU's sections are only tried, perhaps on a busy machine."""

    results: Callable[[torch.device], Iterator[Result]]
    limit_s: float = 90
    on_cpu_s: float = 1200


SECTIONS: dict[str, Section] = {
    "machine": Section(measures.machine, on_cpu_s=90),
    "throughput": Section(measures.throughput, 200),
    "trainer": Section(partial(at_once, checks.TRAINER), 120),
    "numbers": Section(partial(one_by_one, checks.NUMBERS), 120),
    "waiting": Section(partial(one_by_one, checks.WAITING), 150),
    "bad_numbers": Section(partial(one_by_one, checks.BAD_NUMBERS)),
    # One process each: a machine that nobody has tried may crash in any of them.
    **{name: Section(partial(one_by_one, {name: check}), 150, 150) for name, check in checks.STARTS.items()},
    "plain_code": Section(measures.plain_code, 150, 150),
}
# {command: its sections, the most decisive first}
GROUPS: dict[str, Sequence[str]] = {
    "report": ("machine", *checks.STARTS, "plain_code"),
    "gpu": ("machine", "throughput", "trainer", "numbers", "waiting", "bad_numbers"),
    "speed": ("machine", "throughput"),
}
# Those that a CPU only tries, when it is named
GPU_GROUPS = {"gpu", "speed"}


def run_section(name: str, args: argparse.Namespace, left_s: float) -> Iterator[Result]:
    """Run a section in a process, which records its results; yields how it ended. left_s: seconds of the whole command."""
    section = SECTIONS[name]
    limit = min(section.limit_s if args.device.startswith("cuda") else section.on_cpu_s, left_s)
    if limit < MIN_LEFT_S < section.limit_s:
        yield {"what": "left out", "value": f"no time is left for it: run {name} alone", "ok": False}
        return
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(CACHE), **os.environ}
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--section",
        name,
        "--device",
        args.device,
        "--out",
        args.out,
    ]
    start = time.monotonic()
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = process.wait(limit)
        reason = f"exit code {code}: {last_line(log_path(args.out))}" if code else ""
    except subprocess.TimeoutExpired:
        reason = f"stopped after {limit:g} s"
    finally:
        # Ctrl-C and SIGTERM reach only this process.
        kill_group(process)
    if reason:
        yield {"what": "the section did not end", "value": reason, "ok": False}
    yield measures.figure("seconds of the section", round(time.monotonic() - start, 1))


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process of a section, and the trainers that it may have started."""
    if not hasattr(os, "killpg"):
        process.kill()
        return
    # Its process group has its pid, and is gone once all of them have ended.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def log_path(out: str) -> Path:
    return Path(out).with_suffix(".log")


def last_line(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2]


def record(results: Iterable[Result], section: str, out: str, table: TextIO | None = None) -> bool:
    """Append the results of a section to the file `out`, and print them as rows. Returns False if one failed."""
    all_right = True
    for result in results:
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps({"section": section, **result}) + "\n")
        cells = (section, without_names(str(result["what"])), without_names(text_of(result)))
        print("|", " | ".join(cells), "|", file=table, flush=True)
        all_right &= bool(result.get("ok", True))
    return all_right


def text_of(result: Result) -> str:
    """`1,200,000 1/s` for a figure, `ok: ..., 3 s` for a check."""
    value = result["value"]
    text = f"{value:,}" if isinstance(value, (int, float)) else str(value)
    if "ok" in result:
        text = f"{'ok' if result['ok'] else 'FAILED'}: {text}"
    seconds = f", {result['seconds']:.0f} s" if "seconds" in result else ""
    return f"{text[:300]} {result.get('unit', '')}".rstrip() + seconds


def without_names(text: str) -> str:
    """A cell of the table, without places and the names of the user and the machine."""
    user = [os.environ.get(name, "") for name in ("USER", "USERNAME", "LOGNAME")]
    for name in filter(None, [*user, Path(os.path.expanduser("~")).name, *platform.node().split(".")]):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "***", text)
    return PLACES.sub("***", one_line(text)).replace("|", "/")


def in_section(name: str, args: argparse.Namespace) -> int:
    """The process of a section: records its results; everything else that is printed goes to the log."""
    table = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(log_path(args.out), "ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    device = torch.device(args.device)
    # As train_pretrain.py by default: without it PyTorch's attention gives other bits each time, and graphs are refused.
    with table, deterministic() if device.type == "cuda" else contextlib.nullcontext():
        record(SECTIONS[name].results(device), name, args.out, table)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code. Errors: UserError."""
    p = Parser(prog="check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"{', '.join([*GROUPS, *SECTIONS])} (default: report)"
    )
    p.add_argument("--device", help="cuda:0, mps or cpu (default: the best available)")
    p.add_argument("--out", default=str(ROOT / "out" / "check.jsonl"), help="all results (default: out/check.jsonl)")
    p.add_argument("--against", metavar="COMMIT", help="compare small runs with those of a commit's files")
    p.add_argument("--python", default=sys.executable, help="... with those of this Python's packages")
    p.add_argument("--flags", help="of train_pretrain.py: one run in place of the built-in small ones")
    # Set in the process of a section
    p.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    for word in args.sections:
        if word not in {*GROUPS, *SECTIONS}:
            p.error(f"{word}: expected one of {', '.join([*GROUPS, *SECTIONS])}")
    names = [name for word in args.sections or ["report"] for name in GROUPS.get(word, (word,))]
    args.device = str(pick_device(args.device or ("cuda" if GPU_GROUPS & {*args.sections} else None)))
    if args.section:
        return in_section(args.section, args)
    with user_errors():
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        for path in (Path(args.out), log_path(args.out)):
            path.write_bytes(b"")
    print("| section | what | found |\n|---|---|---|", flush=True)
    if args.against or args.python != sys.executable or args.flags:
        return 1 - record(other_side.compare(args.against, args.python, args.flags), "other side", args.out)
    start = time.monotonic()
    for name in names:
        left_s = END_S - (time.monotonic() - start) if args.device.startswith("cuda") else float("inf")
        record(run_section(name, args, left_s), name, args.out)
    results = map(json.loads, Path(args.out).read_text(encoding="utf-8").splitlines())
    failed = [f"{result['what']} ({result['section']})" for result in results if not result.get("ok", True)]
    print(f"failed: {', '.join(failed)}; more in {log_path(args.out)}" if failed else "", end="\n" * bool(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    run_cli(main)
