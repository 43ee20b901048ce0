"""Which tensor differs first between two equal runs: the cause of an irreproducible run. Section `bits` of check.py.

Each case is trained in two independent processes at the same time. Both note a digest of every tensor in order of
computation: weights, batch, outputs of the modules (plain code only), sums, gradient of each parameter, then moments and
weights after updates. The first difference is reported: a sum in varying order, or another choice of kernel.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial

import torch

from benchmarks.checks import KINDS, SMALL, Check
from benchmarks.training import SIZES, Training
from model.backend import CompiledBackend
from trainer.machine.devices import deterministic

# updates after which moments and weights are compared
COMPARED_UPDATES = (1, 2, 10)
# rows and positions. The embedding's backward pass uses another kernel from 3,072 tokens on.
SHAPE = (8, 512)
Named = tuple[str, torch.Tensor]
# (name of a tensor, digest of its bits)
Note = tuple[str, str]


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


def notes_of(case: str, device: torch.device) -> list[Note]:
    """The notes of this process, which is a new one and compiles for itself: its choices must not depend on another's cache."""
    exact = deterministic() if device.type == "cuda" else nullcontext()
    with tempfile.TemporaryDirectory() as cache, exact:
        os.environ |= {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "2",
        }
        return [(name, digest_of(tensor)) for name, tensor in tensors_of(case, device)]


def sides(case: str, device: torch.device) -> list[list[Note]]:
    """The notes of two processes. Errors: those of a process, BrokenProcessPool if it crashes."""
    with ProcessPoolExecutor(2, max_tasks_per_child=1) as pool:
        return list(pool.map(notes_of, [case] * 2, [device] * 2))


def is_repeated(case: str, device: torch.device) -> str:
    """Two processes of a case agree in every bit."""
    first, second = sides(case, device)
    assert len(first) == len(second), f"{len(first)} and {len(second)} tensors"
    differing = [note[0] for note, other in zip(first, second, strict=True) if note != other]
    assert not differing, f"{len(differing)} of {len(first)} differ between processes, first {'; '.join(differing[:6])}"
    return f"{len(first)} tensors, the same to the last bit"


# How a model is computed, its optimizer, its kind
CASES: dict[str, Check] = {
    case: partial(is_repeated, case)
    for case in (
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
}
