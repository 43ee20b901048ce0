"""Checks of training on a device against references, for check.py and `pytest -m gpu`.

A check is a function of a device. It raises AssertionError if something is wrong, and returns a line on its findings.
All of them run on a CPU too: those of `make report` for users, the others to try the checks themselves.
"""

import functools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.training import LEARNING_RATE, Training
from common.start import ROOT
from dataset.embedded_corpus import build_embedded_corpus
from dataset.loader import map_tensors, to_device
from dataset.packing import Totals
from trainer import train
from trainer.machine.measure import synchronize
from trainer.reporting.records import RunRecords

Check = Callable[[torch.device], str]


# Two layers are enough to run every kernel. The vocabulary is that of the shipped tokenizer.
SMALL: dict[str, Any] = {
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 6400,
}
KINDS: dict[str, dict[str, Any]] = {
    "minimind2": {},
    "minimind3": {"generation": "minimind3"},
    "minimind2 MoE": {"use_moe": True},
    "minimind3 MoE": {"generation": "minimind3", "use_moe": True},
}
ROWS = 2
# Not a multiple of any kernel's block size
T = 511
# From 5 * 2^20 activations on, Inductor computes both gradients of a norm in one kernel.
ROWS_OF_FUSED_NORMS = 56
# Relative errors of the loss and of the whole gradient, against float64. TF32 rounds the factors of a product to 10
# bits, bf16 to 7. A router may choose another expert where two scores are close.
LOSS_ERROR = {"float32": 1e-3, "bfloat16": 1e-2}
GRADIENT_ERROR = {"float32": 1e-2, "bfloat16": 5e-2}
GRADIENT_ERROR_OF_MOE = {"float32": 5e-2, "bfloat16": 3e-1}
# The run that is killed. It lasts some seconds beyond its first save, and saves seldom, since a save may take as long as a hundred
# updates. An epoch is no whole number of micro-batches.
PRETRAINED = """--hidden_size 128 --num_hidden_layers 2 --max_seq_len 512 --batch_size 8 --accumulation_steps 1 --max_updates 600
    --save_interval 150 --log_interval 10 --val_fraction 0.1 --eval_interval 200 --sample_prompts word1"""
PRETRAINED_ON_CPU = "--max_updates 8 --save_interval 3 --use_compile 0 --cpu_processes 1"
# Makes some gradient exceed 65,504, the largest float16
TOO_LARGE_SCALE = 2.0**24


def gradient_of(training: Training) -> tuple[float, torch.Tensor]:
    """(loss of the batch, its gradient as one float64 vector on the CPU)."""
    with training.engine.autocast():
        loss, _ = training.engine.objective(training.batch, training.totals)
    gradients = torch.autograd.grad(loss, list(training.model.parameters()), materialize_grads=True)
    return loss.item(), torch.cat([gradient.double().cpu().flatten() for gradient in gradients])


@functools.cache
def reference_of(kind: str, rows: int) -> tuple[float, torch.Tensor]:
    """Reference for `gradient_of`: plain code on the CPU with float64 products; norms and the loss stay in float32."""
    training = Training({**SMALL, **KINDS[kind]}, torch.device("cpu"), rows, T, compiled=False, dtype="float32")
    training.model.double()
    return gradient_of(training)


def agrees_with_float64(kind: str, dtype: str, compiled: bool, device: torch.device, rows: int = ROWS) -> str:
    """Loss and gradient of one batch, with a head dimension of 96."""
    loss, gradient = reference_of(kind, rows)
    training = Training({**SMALL, **KINDS[kind]}, device, rows, T, compiled=compiled, dtype=dtype)
    # The weights are the same: drawn on the CPU with the same seed, and moved.
    our_loss, our_gradient = gradient_of(training)
    loss_error = abs(our_loss - loss) / loss
    gradient_error = float((our_gradient - gradient).norm() / gradient.norm())
    # A CPU or GPU without bf16 trains in another precision.
    name = str(training.engine.dtype).removeprefix("torch.")
    findings = f"{backend_name(training)}, {name}: loss off by {loss_error:.1e}, gradient by {gradient_error:.1e}"
    limits = GRADIENT_ERROR_OF_MOE if "MoE" in kind else GRADIENT_ERROR
    assert loss_error < LOSS_ERROR.get(name, LOSS_ERROR["bfloat16"]), findings
    assert gradient_error < limits.get(name, limits["bfloat16"]), findings
    return findings


def backend_name(training: Training) -> str:
    """Name of the class that computes the blocks."""
    backend = training.model.compiled_backend
    return "plain code" if backend is None else type(backend).__name__


def an_expert_without_tokens_gets_a_zero_gradient(device: torch.device) -> str:
    """The gradients of the others are finite."""
    fields = {**SMALL, "use_moe": True, "num_experts_per_tok": 1}
    training = Training(fields, device, ROWS, T, compiled=False)
    layer: Any = training.model.model.layers[0]
    router = layer.mlp.gate.weight
    with torch.no_grad():
        # Opposite scores of the first two experts: one is above 0, and the others have 0.
        router.zero_()
        router[0] = 1
        router[1] = -1
    training.engine.micro_batch(training.batch, training.totals)
    slots = training.model.expert_slots()[0].tolist()
    gradients = [expert.down_proj.weight.grad for expert in layer.mlp.experts]
    for number, (tokens, gradient) in enumerate(zip(slots, gradients, strict=True)):
        assert gradient is not None and gradient.isfinite().all(), f"expert {number}: its gradient is not finite"
        if not tokens:
            assert not gradient.any(), f"expert {number} got no token and has a gradient"
    assert slots[0] and slots[1] and not any(slots[2:]), f"the router chose others: {slots}"
    return f"tokens of the experts: {[round(n) for n in slots]}"


def output_of(process: "subprocess.Popen[str]") -> str:
    """Wait for a trainer; returns its output. Errors: AssertionError if it failed."""
    printed, _ = process.communicate()
    assert process.returncode == 0, f"exit code {process.returncode}: {printed[-2000:]}"
    return printed


def start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def weights_in(folder: Path) -> dict[Path, bytes]:
    """{path in the folder: content} of the weights of a run."""
    paths = list(folder.rglob("*.pth"))
    assert paths, f"no weights are in {folder}"
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def kill_after_first_save(command: list[str], out_dir: Path) -> str:
    """Start a trainer and kill it; returns the name of its last checkpoint."""
    process = start(command)
    while process.poll() is None and not any(out_dir.rglob("*_resume/*.pt")):
        time.sleep(0.01)
    process.kill()
    printed, _ = process.communicate()
    assert process.returncode != 0, "the run had ended before it could be killed"
    saved = sorted(path.name for path in out_dir.rglob("*_resume/*.pt"))
    assert saved, f"nothing was saved before the run was killed: {printed[-2000:]}"
    return saved[-1]


def resumes_bitwise(flags: str, device: torch.device) -> str:
    """A small run that is killed and resumed ends with the bytes of an uninterrupted one; returns a line on it.

    On a GPU without --device, as most users do. The resumed run finds the other two's compiled code in the cache: the bits must not
    depend on that.
    """
    with tempfile.TemporaryDirectory() as name:
        data = Path(name, "text.jsonl")
        with open(data, "w", encoding="utf-8") as file:
            for number in range(600):
                text = " ".join(f"word{(number * 7 + i * i) % 13}" for i in range(20 + number % 60))
                file.write(json.dumps({"text": f"{number}: {text}"}) + "\n")
        command = [sys.executable, str(ROOT / "trainer" / "train_pretrain.py"), "--data_path", str(data)]
        command += [*PRETRAINED.split(), *flags.split()]
        if device.type == "cpu":
            command += ["--device", "cpu", *PRETRAINED_ON_CPU.split()]

        def command_for(out_dir: Path) -> list[str]:
            # A cache of its own: two start at once.
            return [*command, "--out_dir", str(out_dir), "--cache_dir", str(out_dir / "cache")]

        whole, again = Path(name, "whole"), Path(name, "again")
        uninterrupted = start(command_for(whole))
        try:
            last_save = kill_after_first_save(command_for(again), again)
            printed = output_of(uninterrupted)
        finally:
            uninterrupted.kill()
        assert device.type in printed, f"the trainer did not take the device: {printed[:1000]}"
        resumed = output_of(start([*command_for(again), "--from_resume", "1"]))
        assert "resumed from" in resumed, resumed[:1000]
        how = f"on {device.type}, killed behind {last_save}"
        assert weights_in(whole) == weights_in(again), f"{how}: the weights differ"
        return f"{how}: the same weights to the last bit"


def graphs_change_no_bit(device: torch.device, fields: dict[str, Any], optimizer: str) -> str:
    """Six updates with CUDA graphs and six without, from the same weights."""
    ends = []
    for graphs in (False, True):
        training = Training({**SMALL, **fields}, device, ROWS, T, optimizer=optimizer, cuda_graphs=graphs)
        for number in range(1, 7):
            # Another batch, count and rate each time: what a graph has kept from its recording shows.
            batch = training.batch._replace(input_ids=training.batch.input_ids.roll(number, dims=1))
            for _ in range(2):
                training.engine.micro_batch(batch, training.totals._replace(targets=training.totals.targets + number))
            training.engine.update(LEARNING_RATE / number)
        ends.append(weights_of(training))
        is_recorded = training.engine.graphs is not None and training.engine.graphs.replay_micro_batch is not None
        # A GPU without bfloat16 trains in float16, which has no graphs.
        expected = graphs and device.type == "cuda" and training.engine.dtype is not torch.float16
        assert is_recorded == expected, f"updates recorded: {is_recorded}, expected: {expected}"
    assert torch.equal(*ends), "other weights with graphs than without"
    return f"six updates, {backend_name(training)}: the same weights to the last bit"


def does_not_wait(device: torch.device, fields: dict[str, Any], optimizer: str, dtype: str = "bfloat16") -> str:
    """Five updates after two warm-up ones, on batches from main memory like the loader's."""
    on_gpu = device.type == "cuda"
    training = Training({**SMALL, **fields}, device, ROWS, T, compiled=on_gpu, optimizer=optimizer, dtype=dtype)
    poll = training.engine.poll if on_gpu else list
    batch = map_tensors(training.host_batch, torch.Tensor.pin_memory) if on_gpu else training.host_batch
    # A copy from unpinned memory may wait too, and torch does not report that.
    assert not on_gpu or batch.input_ids.is_pinned()

    def update() -> None:
        training.engine.micro_batch(to_device(batch, device), training.totals)
        training.engine.update(LEARNING_RATE)
        poll()

    for _ in range(2):
        update()
    synchronize(device)
    try:
        if on_gpu:
            # From here on anything that makes the host wait for it raises.
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            update()
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    return f"five updates, {backend_name(training)}, {training.engine.dtype}"


def weights_of(training: Training) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in training.model.parameters()]).cpu()


def a_bad_loss_changes_nothing(device: torch.device) -> str:
    """NaN and infinity in the loss: the weights stay, and the update is counted as skipped."""
    training = Training(SMALL, device, ROWS, T, compiled=False)
    engine = training.engine
    good = engine.objective
    # A tensor on the device, so that recorded updates read it anew.
    factor = torch.ones((), device=device)

    def multiplied(batch: Any, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        loss, sums = good(batch, totals)
        return loss * factor, sums

    engine.objective = multiplied
    # The second update is recorded where CUDA graphs are used.
    for _ in range(3):
        training.step()
    engine.drain()
    before = weights_of(training)
    for skipped, value in enumerate((math.nan, math.inf), start=1):
        factor.fill_(value)
        training.step()
        (outcome,) = [*engine.poll(), *engine.drain()]
        assert outcome.skipped == skipped, outcome
        assert torch.equal(weights_of(training), before), f"a loss of {value} changed the weights"
    factor.fill_(1)
    training.step()
    assert not torch.equal(weights_of(training), before), "the update behind the bad ones changed nothing"
    return "NaN and infinity skipped, the next update applied"


def float16_finds_its_scale(device: torch.device) -> str:
    """A scale that overflows is halved until gradients are finite; nothing of the overflow reaches the weights."""
    training = Training(SMALL, device, ROWS, T, compiled=False, dtype="float16")
    scaler = training.engine.scaler
    assert scaler.is_enabled()
    training.step()
    before = weights_of(training)
    scaler.update(TOO_LARGE_SCALE)
    updates = 0
    while torch.equal(weights_of(training), before):
        training.step()
        updates += 1
        assert updates < 60, "no update was applied"
    assert weights_of(training).isfinite().all() and scaler.get_scale() < TOO_LARGE_SCALE
    return f"the first update applied is number {updates}, with a scale of 2^{math.log2(scaler.get_scale()):.0f}"


# The run of `make report`: some seconds on a laptop
SHORT: dict[str, Any] = {
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "batch_size": 4,
    "optimizer": "muon",
    "max_updates": 10,
    "accumulation_steps": 1,
    "log_interval": 1,
    "num_workers": 0,
    "report": False,
}


def losses_of(device: torch.device, **precision: Any) -> tuple[str, Sequence[float]]:
    """(dtype, losses of the updates) of a training on Python's documentation. precision: other arguments of `train`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        text = build_embedded_corpus(Path(folder, "text.jsonl"))
        result = train(data_path=text, out_dir=folder, device=str(device), **SHORT, **precision)
        run = RunRecords.read(f"{str(result.weights).removesuffix('.pth')}.metrics.jsonl")
        return run.start_record("machine")["dtype"], run.columns["loss"][1]


def trains_as_float32_does(device: torch.device) -> str:
    """A small model trains, with the losses of plain float32 on the CPU."""
    dtype, losses = losses_of(device)
    _, plain = losses_of(torch.device("cpu"), dtype="float32", use_compile=0)
    # float32 adds in another order, half precision rounds.
    limit = 1e-3 if dtype == "torch.float32" else 5e-3
    difference = max(abs(one / other - 1) for one, other in zip(losses, plain, strict=True))
    findings = f"in {dtype}, loss {losses[0]:.3f} to {losses[-1]:.3f}, {difference:.1g} from float32 on the CPU"
    assert difference <= limit, f"{findings}: the limit is {limit:g}"
    return findings


STARTS: dict[str, Check] = {
    "losses": trains_as_float32_does,
    "resume": functools.partial(resumes_bitwise, "--use_compile 0"),
}
NUMBERS: dict[str, Check] = {
    **{
        f"{kind}, {dtype}, {'compiled' if compiled else 'eager'}, against float64 on the CPU": functools.partial(
            agrees_with_float64, kind, dtype, compiled
        )
        for kind in KINDS
        for dtype, compiled in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    },
    "minimind2, bfloat16, compiled, fused gradients of norms": functools.partial(
        agrees_with_float64, "minimind2", "bfloat16", True, rows=ROWS_OF_FUSED_NORMS
    ),
    "an expert without tokens": an_expert_without_tokens_gets_a_zero_gradient,
}
TRAINER: dict[str, Check] = {
    name: functools.partial(resumes_bitwise, flags)
    for name, flags in {
        "resume, AdamW, compiled": "--use_compile 1",
        "resume, AdamW, plain code without graphs": "--use_compile 0 --cuda_graphs 0",
        "resume, Muon, MoE, --batch_size auto, --save_minutes": "--optimizer muon --use_moe 1 --batch_size auto "
        "--save_interval 0 --save_minutes 0.01",
    }.items()
}
WAITING: dict[str, Check] = {
    "no wait, AdamW": lambda device: does_not_wait(device, {}, "adamw"),
    "no wait, Muon": lambda device: does_not_wait(device, {}, "muon"),
    "no wait, MoE": lambda device: does_not_wait(device, {"use_moe": True}, "adamw"),
    "no wait, minimind3": lambda device: does_not_wait(device, {"generation": "minimind3"}, "muon"),
    "no wait, float16": lambda device: does_not_wait(device, {}, "adamw", "float16"),
    "graphs, AdamW": lambda device: graphs_change_no_bit(device, {}, "adamw"),
    "graphs, Muon, MoE": lambda device: graphs_change_no_bit(device, {"use_moe": True}, "muon"),
    "graphs, minimind3": lambda device: graphs_change_no_bit(device, {"generation": "minimind3"}, "adamw"),
}
BAD_NUMBERS: dict[str, Check] = {
    "NaN and infinity": a_bad_loss_changes_nothing,
    "float16 scaler": float16_finds_its_scale,
}
