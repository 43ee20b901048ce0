"""Devices, precision, seeds, errors. References: torch's own state, the environment as torchrun sets it."""

import contextlib
import os
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from common.errors import UserError
from common.processes import ignore_stop_signals, text_of_file
from tests.helpers import before_update, complaint, run_program, train
from tests.trainer.machine.simulated_cuda import simulated_cuda, simulated_mps
from trainer.machine import compiling, devices
from trainer.machine.command_line import StopSignals, error_line
from trainer.machine.compiling import compile_blocks
from trainer.machine.devices import deterministic, pick_device, pick_dtype, seed_everything
from trainer.machine.ranks import Ranks, init_distributed_mode, rendezvous_store

CPU = torch.device("cpu")
SECOND_OF_TWO = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_default_device_is_the_best_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device().type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device().type == "cuda" and pick_device("cuda:1").index == 1
    with pytest.raises(UserError, match="use --device cuda:0 or cuda:1 or mps or cpu"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch, "ones", mock.Mock(side_effect=RuntimeError("CUDA error: no kernel image is available")))
    with pytest.raises(UserError, match="CUDA 12.6"):
        pick_dtype("bfloat16", pick_device())


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_bfloat16_only_where_the_cpu_has_it(monkeypatch, native, dtype):
    monkeypatch.setattr(devices, "cpu_has_bfloat16", lambda: native)
    chosen, notices = pick_dtype("bfloat16", CPU)
    assert chosen is dtype and bool(notices) is not native
    assert [pick_dtype(name, CPU) for name in ("float16", "float32")] == [(torch.float16, []), (torch.float32, [])]


@pytest.mark.parametrize(
    ("cpu_name", "features", "has_it"),
    [
        ("Intel Xeon", "avx512_bf16 avx512_fp16 amx_bf16 amx_tile", True),
        # A virtual machine that hides AMX; Cooper Lake; Zen 5; an ARM core; AVX2 alone
        ("Intel Xeon", "avx512_bf16 avx512_fp16", False),
        ("Intel Xeon", "avx512_bf16", True),
        ("AMD EPYC", "avx512_bf16 avx512_fp16", True),
        ("Neoverse V2", "bf16 sve_bf16", True),
        ("Intel Core", "avx2", False),
    ],
)
def test_bfloat16_counts_only_where_its_products_are_faster(monkeypatch, cpu_name, features, has_it):
    capabilities = {"cpu_name": cpu_name, **dict.fromkeys(features.split(), True)}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert devices.cpu_has_bfloat16() is has_it
    # PyTorch 2.10 is asked by its own names.
    names = {"_is_avx512_bf16_supported": lambda: False, "_is_amx_tile_supported": lambda: has_it}
    monkeypatch.setattr(torch, "cpu", SimpleNamespace(**names))
    assert devices.cpu_has_bfloat16() is has_it


def test_under_nohup_a_terminal_that_closes_does_not_stop_the_run():
    """nohup starts a command with SIGHUP ignored. SIGINT, which a script's shell ignores for all in its background, stops the run."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    try:
        with StopSignals() as signals:
            signals.arm()
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.signum == 0
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.signum == signal.SIGINT
        assert all(signal.getsignal(number) is signal.SIG_IGN for number in before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_second_sigterm_counts_as_the_first_one(monkeypatch):
    """The scheduler sends one and the launcher another; a handler that runs late sees them far apart. Ctrl-C ends at once."""
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    now = [100.0]
    monkeypatch.setattr("trainer.machine.command_line.time.monotonic", lambda: now[0])
    with StopSignals() as signals:
        signals.arm()
        # What a launcher repeats comes at once.
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            now[0] += 60
        assert left == [] and signals.signum == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
        assert left == [128 + signal.SIGINT]
    with StopSignals() as signals:
        signals.arm()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            now[0] += 60
        assert left[1:] == [128 + signal.SIGINT]
    # Once all is saved, the first one does.
    with StopSignals() as signals:
        signals.arm()
        os.kill(os.getpid(), signal.SIGTERM)
        signals.disarm()
        assert left[2:] == [128 + signal.SIGTERM]


def test_a_compiler_that_fails_is_found_out_before_the_first_micro_batch(monkeypatch):
    """As clang without OpenMP does: the compiled function raises when it is called."""
    output = "C++ compile error\n\nCommand:\nclang++ a.cpp\n\nOutput:\na.cpp:1: fatal error: 'omp.h' not found"
    monkeypatch.setattr(torch, "compile", lambda *_, **__: mock.Mock(side_effect=RuntimeError(output)))
    compiling.failure_to_compile.cache_clear()
    try:
        # A model that would be compiled would be called, which None cannot be.
        said = [line for _ in range(2) for line in compile_blocks(None, "1", CPU, (2, 24))]
    finally:
        compiling.failure_to_compile.cache_clear()
        torch.set_float32_matmul_precision("highest")
    line = "torch.compile does not work here (a.cpp:1: fatal error: 'omp.h' not found): training without torch.compile"
    assert len(said) == 2 and all(text.startswith(line) for text in said)


@pytest.mark.parametrize("is_old", [False, True])
def test_instruction_sets_are_tested_one_by_one_only_where_the_best_one_fails(monkeypatch, is_old):
    """Such as by a compiler that is older than the processor."""
    from torch._inductor import config

    tried = []

    def compiled(numbers):
        tried.append(config.cpp.vec_isa_ok)
        if is_old and tried[-1]:
            raise RuntimeError("unrecognized command-line option '-mavx512vnni'")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: compiled)
    with config.patch({"cpp.vec_isa_ok": None}):
        assert compiling.failure_to_compile.__wrapped__("cpu") is None
        assert tried == ([True, None] if is_old else [True]) and config.cpp.vec_isa_ok is tried[-1]


HUGE_BYTES = """
import os, re, sys, torch
from pathlib import Path
from trainer.machine import compiling

def huge_bytes():
    return 1024 * int(re.search("AnonHugePages: *([0-9]+)", Path("/proc/self/smaps_rollup").read_text())[1])

compiling.OVERCOMMIT = Path(sys.argv[1])
compiling.keep_freed_memory()
torch.ones(32 << 20)
compiling.keep_freed_memory()
print(huge_bytes())
its_end, our_end = os.pipe()
if not os.fork():
    os.close(our_end)
    os.read(its_end, 1)
    os._exit(0)
numbers = torch.ones(32 << 20)
print(huge_bytes())
"""


# With "always" they come without our doing.
ONLY_IF_ASKED = "[madvise]" in text_of_file(Path("/sys/kernel/mm/transparent_hugepage/enabled"))


@pytest.mark.skipif(not (ONLY_IF_ASKED and compiling.may_reserve_addresses()), reason="needs huge pages on request")
@pytest.mark.parametrize("overcommit", ["0", "2"])
def test_tensors_of_a_cpu_run_lie_in_huge_pages_also_after_a_fork(overcommit, tmp_path):
    (tmp_path / "overcommit").write_text(f"{overcommit}\n")
    before, after = map(int, run_program(HUGE_BYTES, tmp_path / "overcommit").stdout.split())
    assert before < 64e6
    assert (after > 64e6) == (overcommit == "0")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads of Linux alone inherit it")
def test_numbers_that_slow_a_cpu_down_are_zero_in_all_threads():
    program = "with own_switches(): torch.set_num_threads(2); print((torch.full((1 << 22,), 2e-38) * 0.1).any())"
    assert run_program(f"from trainer.machine.devices import *\n{program}").stdout == "tensor(False)\n"


def test_windows_says_stop_by_another_signal(monkeypatch):
    """Ctrl-Break, or a console window that is closed; loader processes leave it to the main one. SIGUSR2 plays it here."""
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR2, raising=False)
    monkeypatch.delattr(signal, "SIGHUP")
    monkeypatch.delattr(signal, "SIGUSR1")
    before = signal.getsignal(signal.SIGUSR2)
    with StopSignals() as signals:
        signals.arm()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.signum == signal.SIGUSR2
    assert signal.getsignal(signal.SIGUSR2) == before
    set_to = {}
    monkeypatch.setattr(signal, "signal", set_to.__setitem__)
    ignore_stop_signals()
    assert set_to == dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGUSR2), signal.SIG_IGN)


@pytest.mark.parametrize(
    "changes, machine, said",
    [
        ({"LOCAL_RANK": None}, contextlib.nullcontext, r"RANK=1, LOCAL_RANK=\(not set\), WORLD_SIZE=2"),
        ({"RANK": "x"}, contextlib.nullcontext, "RANK=x, "),
        ({}, simulated_cuda, "more processes than this machine has GPUs"),
        ({}, simulated_mps, "data parallel does not work on mps"),
    ],
)
def test_a_launch_that_does_not_fit_is_one_line(changes, machine, said, monkeypatch):
    for name, value in {**SECOND_OF_TWO, **changes}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with machine(), pytest.raises(UserError, match=said) as error:
        init_distributed_mode()
    assert "\n" not in str(error.value)


def test_ranks_with_and_without_a_gpu_do_not_wait_for_each_other(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    torch.distributed.PrefixStore("attempt_0", store).set("rank 1 has joined", "gloo")
    with pytest.raises(UserError, match="rank 0 uses nccl, others gloo: all ranks need GPUs"):
        rendezvous_store(Ranks(world_size=2), timedelta(seconds=1), "nccl")


def test_the_loss_of_another_rank_is_one_line_where_nccl_says_it():
    """As Gloo says it: tests/faults/test_ranks.py."""
    error = torch.distributed.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error\nLast error:\n"
        "socketProgress: Connection closed by remote peer node1<4711>"
    )
    line, code = error_line(error)
    assert code == 1 and "Connection closed by remote peer node1<4711>)" in line and "--from_resume 1" in line
    # Other errors of torch keep their traceback.
    assert error_line(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")) is None
    wrong_here = "NCCL error in: NCCLUtils.cpp:94, invalid usage\nLast error:\nDuplicate GPU detected"
    assert error_line(torch.distributed.DistBackendError(wrong_here)) is None


def test_a_panic_of_a_library_in_rust_is_one_line(capsys):
    panic = type("PanicException", (BaseException,), {})("index out of bounds")
    said = complaint(capsys, mock.Mock(side_effect=panic), [])
    assert said.startswith("error: a library has failed (PanicException: index out of bounds): ")


def test_each_rank_and_each_seed_draws_numbers_of_its_own():
    drawn = []
    for seed, rank in ((5, 0), (5, 1), (7, 0), (5, 0)):
        seed_everything(seed, rank=rank)
        drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == 3 and drawn[0] == drawn[3]


def test_an_operation_without_a_deterministic_form_ends_the_run_with_its_name():
    """Reference: torch.Tensor.put_, which PyTorch lists among those that raise."""
    with pytest.raises(RuntimeError) as refused, deterministic():
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
    assert not torch.are_deterministic_algorithms_enabled()
    line, code = error_line(refused.value)
    assert line.startswith("--deterministic 1: put_ has no deterministic form") and code == 2


def test_a_run_on_a_gpu_computes_deterministically_unless_told_not_to(data, tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []
    for on_gpu, wanted in ((True, 1), (True, 0), (False, 1)):
        look = before_update(1, lambda: seen.append(torch.are_deterministic_algorithms_enabled()))
        with simulated_cuda() if on_gpu else contextlib.nullcontext(), look:
            device = None if on_gpu else "cpu"
            train(data_path=data, out_dir=tmp_path, max_updates=1, deterministic=wanted, device=device)
    # On a CPU every run gives the same bits anyway.
    assert seen == [True, False, False]
