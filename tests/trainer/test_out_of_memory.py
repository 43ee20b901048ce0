"""Memory that is used up. References: the errors that torch raises, a limit of the system, and a run that had enough."""

import itertools
import sys

import pytest
import torch

from common.errors import UserError
from tests.helpers import complaint, flags, run_program, write_corpus
from trainer import train_pretrain
from trainer.evaluation import Sampler
from trainer.machine.measure import is_out_of_memory, out_of_memory_as_user_error
from trainer.optim.build import AdamW
from trainer.pretrain import initial_model, job, memory

CPU = torch.device("cpu")
GB = 10**9
ON_THE_CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000 bytes. Error code 12 (Cannot allocate memory)"
)
ON_WINDOWS = RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory")
ON_CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
FAILURES = {"cpu": ON_THE_CPU, "windows": ON_WINDOWS, "cuda": ON_CUDA, "python": MemoryError()}
OTHERS = [RuntimeError("std::bad_alloc"), OSError(12, "no memory")]
# {stage: what fails there: (object, name of its function, calls that work before)}
STAGES = {
    "model": (initial_model, "init_model", 0),
    "backward": (torch.Tensor, "backward", 5),
    "update": (AdamW, "step", 2),
    "evaluation": (job, "evaluate", 0),
    "samples": (Sampler, "sample", 0),
}


@pytest.mark.parametrize("error", [*FAILURES.values(), *OTHERS], ids=repr)
def test_failed_allocations_are_known_by_their_errors(error):
    assert is_out_of_memory(error)
    # As torch.compile wraps what happens within it.
    try:
        raise RuntimeError("backend='inductor' raised") from error
    except RuntimeError as wrapper:
        assert is_out_of_memory(wrapper)


def test_another_program_that_has_the_memory_of_the_gpu_is_named():
    said = "CUDA out of memory. GPU 0 has a total capacity of 23.68 GiB. Process 4321 has 18.00 GiB memory in use. Of the allocated"
    raised = pytest.raises(UserError, match="left on cpu, Process 4321 has 18.00 GiB memory in use: advice")
    with raised, out_of_memory_as_user_error(CPU, lambda: "advice"):
        raise torch.OutOfMemoryError(said)


@pytest.mark.parametrize("error", [RuntimeError("mismatch"), OSError(28, "no space"), ValueError("out of memory")])
def test_other_errors_keep_their_traceback(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as caught, out_of_memory_as_user_error(CPU, str):
        raise error
    assert caught.value is error


def failing_from(call, error, times):
    """`call`, which raises `error` after so many times."""
    numbers = itertools.count()

    def counted(*args, **options):
        if next(numbers) >= times:
            raise error
        return call(*args, **options)

    return counted


# Each stage with another kind of error.
@pytest.mark.parametrize(("stage", "kind"), list(zip(STAGES, itertools.cycle(FAILURES), strict=False)))
def test_pretraining_ends_with_a_line_wherever_memory_runs_out(stage, kind, data, tmp_path, monkeypatch, capsys):
    owner, name, times = STAGES[stage]
    monkeypatch.setattr(owner, name, failing_from(getattr(owner, name), FAILURES[kind], times))
    # Samples take longer than all of the run.
    prompts = {"sample_prompts": "the"} if stage == "samples" else {}
    asked = flags(data_path=data, out_dir=tmp_path / "out", val_fraction=0.2, save_interval=1000, **prompts)
    said = complaint(capsys, train_pretrain.main, asked)
    assert said.startswith("error: no memory is left")
    if stage == "model":
        assert "try a smaller --batch_size, --max_seq_len or model" in said
        return
    # The last evaluation and the last samples come behind a save.
    at_end = stage in ("evaluation", "samples")
    saved = "is intact, and --from_resume 1 continues from there" if at_end else "no checkpoint was saved yet"
    assert "try half the --batch_size" in said and saved in said


# Run with 700 MB of addresses beyond what the imports take.
LIMITED = """
import resource, sys
from pathlib import Path
from trainer import train_pretrain
from trainer.machine.command_line import run_cli
status = Path("/proc/self/status").read_text()
limit = int(status.split("VmSize:")[1].split()[0]) * 1024 + 700 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
run_cli(lambda: train_pretrain.main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
@pytest.mark.slow
def test_pretraining_in_too_little_memory_tells_what_helps_and_that_helps(tmp_path):
    """Reference: the run that the line suggests, under the same limit."""
    options = {
        "data_path": write_corpus(tmp_path / "data.jsonl", 4000), "out_dir": tmp_path, "hidden_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 4, "max_seq_len": 64, "max_updates": 2,
        "batch_size": 512, "accumulation_steps": 1,
    }  # fmt: skip
    # Halve the micro-batch until it fits.
    for _ in range(6):
        run = run_program(LIMITED, *flags(**options))
        if run.returncode == 0:
            break
        said = run.stderr.splitlines()[-1]
        assert run.returncode == 2 and "Traceback" not in run.stderr
        assert said.startswith("error: no memory is left on cpu: ") and "no checkpoint was saved yet" in said
        options |= {"batch_size": options["batch_size"] // 2, "accumulation_steps": 2 * options["accumulation_steps"]}
    assert run.returncode == 0 and options["batch_size"] < 512


@pytest.mark.parametrize("width, layers", [(1_000_000, 1), (8192, 1000)])
def test_what_can_never_fit_is_told_before_it_is_made(width, layers, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "total_memory", lambda device: 16 * GB)
    monkeypatch.setattr(initial_model, "init_model", failing_from(None, AssertionError("the model is made"), 0))
    size = {"hidden_size": width, "num_hidden_layers": layers}
    said = complaint(capsys, train_pretrain.main, flags(data_path=data, out_dir=tmp_path / "out", **size))
    assert "and this machine has 16 GB" in said and "choose a smaller model" in said
