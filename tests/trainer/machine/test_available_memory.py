"""How much memory, and how many processors, can still be had. Reference: the files of Linux as its documentation describes them, made by hand here."""

import sys

import pytest
import torch

from common import processes
from common.processes import usable_cores
from trainer.machine import cpu_ranks
from trainer.machine.measure import available_memory, total_memory

CPU = torch.device("cpu")
GB = 1 << 30


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A system with 8 GiB to be had and no groups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable: {8 * GB // 1024} kB\n")
    monkeypatch.setattr(processes, "SYSTEM_ROOT", tmp_path)
    return tmp_path


def write(root, path, text):
    """Write a file below root."""
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def group_v2(root, path, limit, used, cache=0):
    """A group of version 2 at this path below the top."""
    folder = f"sys/fs/cgroup/{path}"
    write(root, f"{folder}/memory.max", f"{limit}\n")
    write(root, f"{folder}/memory.current", f"{used}\n")
    write(root, f"{folder}/memory.stat", f"anon 5\ninactive_file {cache}\n")


def test_a_group_of_version_2_leaves_its_limit_less_what_is_used_and_not_cache(root):
    write(root, "proc/self/cgroup", "0::/job/step\n")
    group_v2(root, "job/step", "max", 2 * GB)
    assert available_memory(CPU) == 8 * GB
    # The limit of a group around it holds too.
    group_v2(root, "job", 4 * GB, 3 * GB, GB // 2)
    assert available_memory(CPU) == GB + GB // 2
    group_v2(root, "job", 2 * GB, 3 * GB)
    assert available_memory(CPU) == 0


def test_in_a_container_the_top_folder_is_its_own_group(root):
    write(root, "proc/self/cgroup", "0::/docker/abc\n")
    group_v2(root, ".", 3 * GB, GB)
    assert available_memory(CPU) == 2 * GB
    write(root, "proc/self/cgroup", "0::/../../host\n")
    assert available_memory(CPU) == 2 * GB


def test_none_where_the_system_does_not_tell(root, monkeypatch):
    (root / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable: much\n")
    assert available_memory(CPU) is None
    assert available_memory(torch.device("mps")) is None
    monkeypatch.setattr(processes, "SYSTEM_ROOT", root / "nowhere")
    assert available_memory(CPU) is None


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
def test_the_limit_of_the_shell_counts(root, monkeypatch):
    import resource

    write(root, "proc/self/status", f"Name: x\nVmSize: {GB // 1024} kB\n")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (3 * GB, resource.RLIM_INFINITY))
    assert available_memory(CPU) == 2 * GB


def test_the_limit_of_a_container_is_all_that_the_machine_has(root):
    if total_memory(CPU) is None:
        pytest.skip("this system does not tell")
    group_v2(root, ".", 1000, 0)
    write(root, "proc/self/cgroup", "0::/\n")
    assert total_memory(CPU) == 1000


@pytest.mark.parametrize(
    ("quota", "cores"), [("250000 100000", 3), ("max 100000", 128), ("x y", 128), ("50000 100000", 1)]
)
def test_cores_of_a_container(root, monkeypatch, quota, cores):
    """`docker run --cpus 2.5` on a large machine; of all groups around the process the tightest limit holds."""
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: set(range(128)), raising=False)
    write(root, "proc/self/cgroup", "0::/job/step\n")
    write(root, "sys/fs/cgroup/job/cpu.max", f"{quota}\n")
    write(root, "sys/fs/cgroup/job/step/cpu.max", "10000000 100000\n")
    assert usable_cores() == min(cores, 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert cpu_ranks.available_threads() == min(cores, 64)
