"""Which tensor differs first between two equal runs on a GPU: the cause of an irreproducible run.

    make gpu-bits                                             # in three minutes
    python benchmarks/gpu_bits.py --device cpu --cases plain  # try the command itself

Each case is trained in two independent processes at the same time. Both note a digest of every tensor in order of
computation: weights, batch, outputs of the modules (plain code only), sums, gradient of each parameter, then moments and
weights after updates. The first difference is reported: a sum in varying order, or another choice of kernel. Whole runs of the
trainer are compared by section 2 of `make gpu`.
Exit code 1: a case FAILED, because something differs or a process failed.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_checks import KINDS, SMALL
from benchmarks.training import SIZES, Training
from common.errors import UserError
from common.flags import Parser
from model.backend import CompiledBackend
from trainer.machine.command_line import run_cli
from trainer.machine.devices import deterministic

# How a model is computed, its optimizer, its kind
CASES = (
    "plain",
    "plain float32",
    "compiled with PyTorch's attention",
    "Flex",
    "Flex Muon",
    "Flex minimind3",
    "Flex minimind2 MoE",
    # Two equal micro-batches had different gradients before the norm that follows attention.
    "Flex minimind2 MoE 2 x 511",
    "Flex 26m",
)
# updates after which moments and weights are compared
COMPARED_UPDATES = (1, 2, 10)
# rows and positions. The embedding's backward pass uses another kernel from 3,072 tokens on.
SHAPE = (8, 512)
Named = tuple[str, torch.Tensor]
# (name of a tensor, digest of its bits)
Note = tuple[str, str]
# name of the last note of a failed process
FAILURE = "error"


def tensors_of(case: str, device: torch.device) -> Iterator[Named]:
    """Each tensor of a case's training, in order of computation."""
    fields = SIZES["26m"] if "26m" in case else SMALL
    for model_kind, differences in KINDS.items():
        if model_kind in case:
            fields = {**fields, **differences}
    shape = (2, 511) if "2 x 511" in case else (32, 512) if "26m" in case else SHAPE
    optimizer = "muon" if "Muon" in case else "adamw"
    dtype = "float32" if "float32" in case else "bfloat16"
    training = Training(fields, device, *shape, compiled="Flex" in case, optimizer=optimizer, dtype=dtype)
    model, engine = training.model, training.engine
    if "PyTorch's attention" in case:
        model.compiled_backend = CompiledBackend(shape, on_gpu=device.type == "cuda")
    outputs: list[Named] = []

    def keep(name: str, module: torch.nn.Module, inputs: object, output: object) -> None:
        for number, tensor in enumerate(output if isinstance(output, tuple) else (output,)):
            if isinstance(tensor, torch.Tensor):
                outputs.append((f"output {number} of {name or 'model'}", tensor.detach().clone()))

    yield from ((f"initial {name}", parameter) for name, parameter in model.named_parameters())
    yield from ((name, value) for name, value in training.batch._asdict().items() if isinstance(value, torch.Tensor))
    # Compiled code calls no modules.
    modules = [] if model.compiled_backend else model.named_modules()
    hooks = [module.register_forward_hook(partial(keep, name)) for name, module in modules]
    engine.micro_batch(training.batch, training.totals)
    for hook in hooks:
        hook.remove()
    yield from outputs
    yield "sums", engine.sums
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        yield f"gradient of {name}", parameter.grad
    model.zero_grad()
    for update in range(1, max(COMPARED_UPDATES) + 1):
        training.step()
        for name, parameter in model.named_parameters() if update in COMPARED_UPDATES else ():
            yield f"{name} after update {update}", parameter
            for part in engine.optimizers:
                for key, kept in part.state.get(parameter, {}).items():
                    if isinstance(kept, torch.Tensor):
                        yield f"{key} of {name} after update {update}", kept


def digest_of(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()


def side(case: str, device: str) -> list[Note]:
    """The notes of a separate process, also those before a failure."""
    command = [sys.executable, str(Path(__file__).resolve()), "--side", case, "--device", device]
    with tempfile.TemporaryDirectory() as cache:
        # Each process compiles for itself: its choices must not depend on another's cache.
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
    # Libraries print too.
    lines = [line for line in run.stdout.splitlines() if line.startswith('["') and line.endswith('"]')]
    notes: list[Note] = [tuple(json.loads(line)) for line in lines]
    if run.returncode:
        notes.append((FAILURE, (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1][:300]))
    return notes


def compare(case: str, device: str) -> tuple[bool, str]:
    """(True if two processes of a case agree in every bit, a line about it)."""
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: side(case, device), range(2))
    findings = [f"{name}: {text}" for name, text in first + second if name == FAILURE]
    if len(first) != len(second):
        findings.append(f"{len(first)} and {len(second)} notes")
    differing = [note[0] for note, other in zip(first, second, strict=False) if note != other]
    if differing:
        findings.append(f"{len(differing)} of {len(first)} differ between processes, first {'; '.join(differing[:6])}")
    return not findings, " | ".join(findings) or f"{len(first)} tensors, the same to the last bit"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code. Errors: UserError."""
    p = Parser(prog="gpu_bits.py", description="Which tensor differs first between two equal runs on this GPU.")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the command itself")
    p.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="some of them (default: all)")
    # Set in the process of a side
    p.add_argument("--side", choices=CASES, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("this machine shows no CUDA device; --device cpu --cases plain tries the command itself")
    if args.side:
        with deterministic() if args.device == "cuda" else contextlib.nullcontext():
            for name, tensor in tensors_of(args.side, torch.device(args.device)):
                print(json.dumps((name, digest_of(tensor))), flush=True)
        return 0
    n_failed = 0
    # Bits need no quiet machine, and most of the time is compilation.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        comparisons = pool.map(lambda case: compare(case, args.device), args.cases)
        for case, (is_same, findings) in zip(args.cases, comparisons, strict=True):
            print(f"{'same  ' if is_same else 'FAILED'} {case}: {findings}", flush=True)
            n_failed += not is_same
    return 1 if n_failed else 0


if __name__ == "__main__":
    run_cli(main)
