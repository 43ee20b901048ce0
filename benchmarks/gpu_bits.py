"""Which tensor differs first between two equal runs on a GPU: what makes a run that cannot be repeated.

    make gpu-bits                                     # in three minutes
    python benchmarks/gpu_bits.py --device cpu        # whether this command itself works

Each case is trained in two processes that know nothing of each other and run at the same time. Both note a digest of every
tensor in the order in which it comes to be: batch, outputs of the modules (plain code alone has them), loss, gradient of each
parameter, then moments and weights after updates. The first note that differs is named. `again` is the same micro-batch computed
a second time in one process: a difference there is an operation that adds up in any order; one only between processes is a
kernel that was chosen otherwise. The last cases compare the losses of whole runs of the trainer, its data included.
Exit code 1: a case differs that the documents promise.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    from common.start import begin

    begin(ends_at_ctrl_c=False)

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_checks import (
    DOCUMENTS_OF_RUN,
    KINDS,
    SMALL,
    documents_for,
    end_of,
    start,
    trainer_command,
    weights_in,
)
from benchmarks.training import LEARNING_RATE, SIZES, Training
from common.flags import Parser
from model.backend import CompiledBackend
from model.model_minimind import Block
from trainer.machine.command_line import run_cli
from trainer.machine.devices import deterministic

# A model, how it is computed, and what trains it; or the trainer with flags.
CASES = (
    "plain",
    "plain float32",
    "compiled with PyTorch's attention",
    "Flex",
    "Flex Muon",
    "Flex minimind3",
    "Flex minimind2 MoE",
    # Two equal micro-batches had other gradients in front of the norm behind attention.
    "Flex minimind2 MoE 2 x 511",
    "Flex 26m",
    # Between two lines of the log nobody waits for the device.
    "trainer --use_compile 0 --log_interval 50",
    "trainer --use_compile 1 --log_interval 50",
    "trainer --use_compile 1 --cuda_graphs 0 --log_interval 50",
    "trainer --use_compile 1 --use_moe 1 --optimizer muon --log_interval 50",
)
# Updates after which moments and weights are compared
COMPARED_UPDATES = (1, 2, 10)
T = 512
# 4,096 tokens: the embedding's backward pass has another kernel from 3,072 on.
ROWS = 8
# positions that are no multiple of any block of a kernel
ODD_ROWS, ODD_T = 2, 511

Note = Callable[[str, torch.Tensor], None]


def training_of(case: str, device: torch.device) -> Training:
    """The model of a case, compiled and with the optimiser that its name says."""
    fields = SIZES["26m"] if "26m" in case else SMALL
    for kind, differences in KINDS.items():
        if kind in case:
            fields = {**fields, **differences}
    optimizer = "muon" if "Muon" in case else "adamw"
    dtype = "float32" if "float32" in case else "bfloat16"
    compiled = "Flex" in case
    rows, positions = (ODD_ROWS, ODD_T) if "2 x 511" in case else (ROWS, T)
    training = Training(fields, device, rows, positions, compiled=compiled, optimizer=optimizer, dtype=dtype)
    if "PyTorch's attention" in case:
        training.model.compiled_backend = CompiledBackend(Block, (ROWS, T), on_gpu=device.type == "cuda")
    return training


def note_all(case: str, device: torch.device, note: Note) -> None:
    """Train the model of a case and note each tensor in the order in which it comes to be."""
    training = training_of(case, device)
    model, engine = training.model, training.engine
    for name, parameter in model.named_parameters():
        note(f"initial {name}", parameter)
    for name, column in training.batch._asdict().items():
        if isinstance(column, torch.Tensor):
            note(f"batch: {name}", column)

    hooks = []
    if model.compiled_backend is None:
        # Compiled code has no modules inside.
        for name, module in model.named_modules():
            hooks.append(module.register_forward_hook(partial(note_output, note, name)))
    engine.micro_batch(training.batch, training.totals)
    for hook in hooks:
        hook.remove()
    note("sums", engine.sums)
    first = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        first[name] = parameter.grad.clone()
        note(f"gradient of {name}", parameter.grad)
    for _ in range(3):
        engine.optimizer.zero_grad()
        engine.micro_batch(training.batch, training.totals)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            note(f"again: gradient of {name}", parameter.grad.ne(first[name]).sum())

    for update in range(1, max(COMPARED_UPDATES) + 1):
        engine.update(LEARNING_RATE)
        if update in COMPARED_UPDATES:
            note(f"outcome of update {update}", engine.outcome)
            for index, (name, parameter) in enumerate(model.named_parameters()):
                note(f"after update {update}: {name}", parameter)
                for kind, value in moments_of(engine.optimizer, parameter):
                    note(f"after update {update}: {kind} of parameter {index}", value)
        engine.micro_batch(training.batch, training.totals)


def note_output(note: Note, name: str, module: torch.nn.Module, inputs: object, output: Any) -> None:
    """A forward hook."""
    tensors = output if isinstance(output, tuple) else (output,)
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor):
            note(f"output {number} of {name or 'model'}", tensor)


def moments_of(optimizer: Any, parameter: torch.nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what an optimiser keeps of a parameter."""
    for part in getattr(optimizer, "optimizers", [optimizer]):
        for name, value in part.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield name, value


def run_side(case: str, device: torch.device) -> None:
    """Print the notes of one process as lines of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def note(name: str, tensor: torch.Tensor) -> None:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
        digest = hashlib.sha256(raw).hexdigest()[:16]
        wrong = name.startswith("again") and bool(tensor.item())
        print(json.dumps([name, digest, wrong]), file=answers, flush=True)

    with deterministic(device.type == "cuda"):
        note_all(case, device, note)


def side(case: str, device: str) -> list[tuple[str, str, bool]]:
    """The notes of a process of its own, as far as it came."""
    command = [sys.executable, str(Path(__file__).resolve()), "--side", case, "--device", device]
    with tempfile.TemporaryDirectory() as cache:
        # Each process compiles for itself: what it chooses must not depend on what another has left.
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
    notes = [tuple(json.loads(line)) for line in run.stdout.splitlines() if line.endswith("]")]
    if run.returncode:
        notes.append(("error", run.stderr.strip().splitlines()[-1][:300], True))
    return notes


def compare(case: str, device: str) -> tuple[str, bool]:
    """(what two processes of a case have in common, in words; whether all of it)."""
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: side(case, device), range(2))
    said = [f"{name}: {text}" for notes in (one, other) for name, text, _ in notes if name == "error"]
    if len(one) != len(other):
        said.append(f"{len(one)} and {len(other)} notes")
    unstable = [name for name, _, wrong in one if wrong and name != "error"]
    if unstable:
        said.append(f"in one process {len(unstable)} gradients came out otherwise again: {', '.join(unstable[:6])}")
    differing = [a[0] for a, b in zip(one, other, strict=False) if a[:2] != b[:2]]
    if differing:
        said.append(f"between processes {len(differing)} of {len(one)} differ, first {'; '.join(differing[:6])}")
    if said:
        return " | ".join(said), False
    return f"{len(one)} tensors, the same to the last bit", True


def compare_trainers(case: str, device: str) -> tuple[str, bool]:
    """The same of two runs of the trainer: the first line of the metrics file whose loss differs, and the weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents_for(folder, DOCUMENTS_OF_RUN[device])
        flags = ["--batch_size", "8", *case.split()[1:]]
        out_dirs = (folder / "one", folder / "other")
        runs = [start(trainer_command(folder, out_dir, torch.device(device), *flags)) for out_dir in out_dirs]
        try:
            for run in runs:
                end_of(run)
        except AssertionError as error:
            return f"error: {str(error).strip().splitlines()[-1][:300]}", False
        finally:
            for run in runs:
                run.kill()
        one, other = map(losses_in, out_dirs)
        same_weights = weights_in(out_dirs[0]) == weights_in(out_dirs[1])
    differing = [update for update in one if one[update] != other.get(update)]
    if not differing and same_weights:
        return f"{len(one)} losses and the weights, the same to the last bit", True
    first = (
        f"the first logged loss that differs is that of update {differing[0]}"
        if differing
        else "the losses are the same"
    )
    return f"{first}; the weights {'are the same' if same_weights else 'differ'}", False


def losses_in(out_dir: Path) -> dict[int, float]:
    """{update: loss} of the log lines of a run."""
    (metrics,) = out_dir.glob("*.metrics.jsonl")
    records = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return {record["update"]: record["loss"] for record in records if "loss" in record}


def main() -> int:
    """The exit code."""
    p = Parser(prog="gpu_bits.py", description="Which tensor differs first between two equal runs on this GPU.")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: whether this command itself works")
    p.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="some of them (default: all)")
    # This process is a side of that case.
    p.add_argument("--side", choices=CASES, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.side:
        run_side(args.side, torch.device(args.device))
        return 0
    # Bits need no quiet machine, and most of the time goes into compiling.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        found = pool.map(
            lambda case: (compare_trainers if case.startswith("trainer") else compare)(case, args.device), args.cases
        )
        failed = 0
        for case, (text, ok) in zip(args.cases, found, strict=True):
            print(f"{'same  ' if ok else 'DIFFER'} {case}: {text}", flush=True)
            failed += not ok
    return 1 if failed else 0


if __name__ == "__main__":
    run_cli(main)
