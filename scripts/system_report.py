"""Which machine is this, and does training work on it? A Markdown table to paste into an issue, in about two minutes.

    make report
    python scripts/system_report.py --device cpu      # not the GPU

Each check is a process that calls `trainer.train`: one that fails, crashes or hangs is a row that says so. The table has no folders,
addresses, or names of user and machine. Exit code 1: a check does not hold.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder, and answers wrong flags

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from threading import Event, Timer
from typing import Any

import torch

from common.wording import one_line
from dataset.embedded_corpus import build_embedded_corpus
from scripts.arguments import CHECK_NAMES, system_report_parser
from trainer import train
from trainer.machine.command_line import run_cli
from trainer.machine.devices import cpu_has_bfloat16, pick_device
from trainer.machine.measure import describe_machine, total_memory, versions
from trainer.reporting.records import RunRecords

SECONDS_OF_A_CHECK = 120
SMALL: dict[str, Any] = {"hidden_size": 192, "num_hidden_layers": 2, "optimizer": "muon", "max_updates": 20}
# folders; addresses of IPv4; with three colons or more those of IPv6 and hardware
PLACES = re.compile(
    r"(?<!\w)(\w:)?[\\/](?=[^\s\\/])([^'\"\\/]+[\\/])*[^'\"\\/\s]+|(?<![\w.-])\d+(\.\d+){3}|([\da-fA-F]*:){3,}[\da-fA-F]*"
)


def run(args: Namespace, name: str, **arguments: Any) -> RunRecords:
    """The metrics of a training on Python's documentation. name: of its folder. arguments: of `train`."""
    text = build_embedded_corpus(Path(args.folder, "text.jsonl"))
    usual = {"device": args.device, "batch_size": 8, "accumulation_steps": 1, "log_interval": 1, "num_workers": 0}
    result = train(data_path=text, out_dir=Path(args.folder, name), report=False, **{**usual, **arguments})
    return RunRecords.read(f"{str(result.weights).removesuffix('.pth')}.metrics.jsonl")


def start(args: Namespace) -> str:
    """A small model trains."""
    records = run(args, "start", **SMALL)
    first, *_, last = records.columns["loss"][1]
    return f"in {records.start_record('machine')['dtype']}, loss {first:.3f} to {last:.3f}"


def losses(args: Namespace) -> str:
    """Those of `start` are those of plain float32 on the CPU."""
    ours = RunRecords.read(next(Path(args.folder, "start").glob("*.metrics.jsonl"), "the first run"))
    theirs = run(args, "losses", **SMALL, device="cpu", dtype="float32", use_compile=0).columns["loss"][1]
    # float32 adds in another order, half precision rounds.
    limit = 1e-3 if ours.start_record("machine")["dtype"] == "torch.float32" else 5e-3
    difference = max(abs(one / other - 1) for one, other in zip(ours.columns["loss"][1], theirs, strict=True))
    assert difference <= limit, f"{difference:.1g} from float32 on the CPU (limit {limit:g})"
    return f"within {difference:.1g} of float32 on the CPU (limit {limit:g})"


def resume(args: Namespace) -> str:
    """A run that is stopped and resumed ends with the weights of `start`."""
    stop = Event()
    records = run(args, "resume", **SMALL, stop=stop, on_log=lambda line: stop.set() if line["update"] == 8 else None)
    run(args, "resume", **SMALL, from_resume=True)
    one, other = ([path.read_bytes() for path in Path(args.folder, name).glob("*.pth")] for name in ("start", "resume"))
    assert one and one == other, "other weights than without a stop"
    return (
        f"stopped after update {records.last('update'):g} of {SMALL['max_updates']}: the same weights to the last bit"
    )


def speed(args: Namespace) -> str:
    """Of MiniMind's 26 M model in plain code; compiling could take more than the two minutes."""
    stop = Event()
    Timer(args.seconds, stop.set).start()
    size = {"batch_size": 32, "log_interval": 50} if args.device.startswith("cuda") else {}
    columns = run(args, "speed", **size, max_updates=10**6, use_compile=0, stop=stop).columns
    # The first line has the start too.
    rate, share = (median(columns[f][1][1:] or columns[f][1]) for f in ("tokens_per_second", "flops_utilisation"))
    peak = max(columns["memory"][1]) / 1e9
    return f"26 M, plain code: {rate:,.0f} text tokens/s, {share:.1%} of the best matrix product, {peak:.1f} GB at most"


def rows(args: Namespace) -> Iterator[tuple[str, str]]:
    """(what, what was found) on the machine, then of each check."""
    facts, simd = describe_machine(torch.device(args.device)), torch.backends.cpu.get_cpu_capability()
    cpu: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    memory, of_gpu = (f"{(total_memory(torch.device(name)) or 0) / 1e9:.0f} GB" for name in ("cpu", args.device))
    yield "system", f"{platform.platform()}, {memory}"
    name = f"{facts['processor']} {cpu.get('cpu_name')}"
    yield "processor", f"{name}, {facts['cores']} cores, {simd}, bfloat16: {cpu_has_bfloat16()}"
    if "gpu" in facts:
        driver = subprocess.getoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader").partition("\n")[0]
        yield "GPU", f"{facts['gpu']}, {of_gpu}, driver {driver}, CUDA {torch.version.cuda} (ROCm {torch.version.hip})"
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    yield "versions", f"Python {facts['python']}, {packages}; on {args.device}, {facts['threads']} threads"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as args.folder:
        for name in CHECK_NAMES:
            yield name, outcome(name, args)


def outcome(name: str, args: Namespace) -> str:
    """What a check has found, from a process of its own; it begins with FAILED if the check does not hold."""
    flags = ["--check", name, "--folder", args.folder, "--device", args.device, "--seconds", str(args.seconds)]
    command, begin = [sys.executable, str(Path(__file__).resolve()), *flags], time.monotonic()
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS_OF_A_CHECK + args.seconds
        )
    except subprocess.TimeoutExpired:
        return f"FAILED: no end after {SECONDS_OF_A_CHECK + args.seconds:g} s"
    code = ended.returncode
    state, said = (f"FAILED, exit code {code}", ended.stderr) if code else ("ok", ended.stdout)
    last = said.strip().rpartition("\n")[2]
    return f"{state}: {last}, {time.monotonic() - begin:.0f} s"


def without_names(text: str) -> str:
    """A cell of the table, without places and the names of the user and the machine."""
    user = [os.environ.get(name, "") for name in ("USER", "USERNAME", "LOGNAME")]
    for name in filter(None, [*user, Path(os.path.expanduser("~")).name, *platform.node().split(".")]):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "***", text)
    return PLACES.sub("***", one_line(text)).replace("|", "/")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    args = system_report_parser().parse_args(argv)
    if args.check:
        print({"start": start, "losses": losses, "resume": resume, "speed": speed}[args.check](args))
        return 0
    args.device = str(pick_device(args.device))
    print("| what | found |\n|---|---|")
    has_failed = False
    for what, found in rows(args):
        print(f"| {what} | {without_names(found)} |", flush=True)
        has_failed |= found.startswith("FAILED")
    return int(has_failed)


if __name__ == "__main__":
    run_cli(main)
