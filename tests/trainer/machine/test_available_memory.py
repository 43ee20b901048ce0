"""How much memory, and how many processors, can still be had. Reference: the files of Linux as its documentation describes them, made by hand here, and psutil
for the machine itself, on any system."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from common import processes
from common.processes import usable_cores
from trainer.machine import cpu_ranks
from trainer.machine.measure import available_memory, peak_memory, total_memory

CPU = torch.device("cpu")
GB = 1 << 30


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A system with 16 GiB, 8 of them to be had, and no groups. It has no sysconf and no /proc/meminfo, as Windows."""
    monkeypatch.delattr("os.sysconf", raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GB, available=8 * GB))
    monkeypatch.setattr(processes, "SYSTEM_ROOT", tmp_path)
    return tmp_path


def write(root, path, text):
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def group(root, path, limit, used, cache=0, version=2):
    """A group of version 1 or 2 at this path below the top."""
    top, *names = {
        1: ("memory", "limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
        2: (".", "max", "current", "inactive_file"),
    }[version]
    for name, text in zip((*names[:2], "stat"), (limit, used, f"anon 5\n{names[2]} {cache}"), strict=True):
        write(root, f"sys/fs/cgroup/{top}/{path}/memory.{name}", f"{text}\n")


@pytest.mark.parametrize(("version", "line"), [(1, "5:cpu:/\n4:memory:"), (2, "0::")])
def test_a_group_leaves_its_limit_less_what_is_used_and_not_cache(root, version, line):
    write(root, "proc/self/cgroup", f"{line}/job/step\n")
    group(root, "job/step", {1: 2**63 - 4096, 2: "max"}[version], 2 * GB, version=version)
    assert available_memory(CPU) == 8 * GB
    # The limit of a group around it holds too.
    for limit, cache, left in ((4 * GB, GB // 2, GB + GB // 2), (2 * GB, 0, 0)):
        group(root, "job", limit, 3 * GB, cache, version)
        assert available_memory(CPU) == left
    # In a container the top folder is its own group.
    group(root, ".", 3 * GB, GB, version=version)
    for path in ("/docker/abc", "/../../host"):
        write(root, "proc/self/cgroup", f"{line}{path}\n")
        assert available_memory(CPU) == 2 * GB
    group(root, ".", 1000, 0, version=version)
    assert total_memory(CPU) == 1000


def test_without_groups_it_is_what_the_system_tells(root, monkeypatch):
    assert (total_memory(CPU), available_memory(CPU)) == (16 * GB, 8 * GB)
    assert available_memory(torch.device("mps")) is None
    monkeypatch.setattr(psutil, "virtual_memory", (root / "proc/meminfo").read_text)
    assert total_memory(CPU) is available_memory(CPU) is None
    monkeypatch.setattr("platform.system", lambda: "Windows")
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=GB, peak_wset=3 * GB))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    assert peak_memory(CPU) == 3 * GB


@pytest.mark.parametrize("quota, cores", [("250000 100000", 3), ("max 100000", 128), ("x y", 128), ("50000 100000", 1)])
def test_cores_of_a_container(root, monkeypatch, quota, cores):
    """`docker run --cpus 2.5` on a large machine; of all groups around the process the tightest limit holds."""
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: set(range(128)), raising=False)
    write(root, "proc/self/cgroup", "0::/job/step\n")
    write(root, "sys/fs/cgroup/job/cpu.max", f"{quota}\n")
    write(root, "sys/fs/cgroup/job/step/cpu.max", "10000000 100000\n")
    assert usable_cores() == min(cores, 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert cpu_ranks.available_threads() == min(cores, 64)
    write(root, "proc/self/cgroup", "0::/\n2:cpu,cpuacct:/job\n")
    for name, value in zip(("quota", "period"), quota.replace("max", "-1").split(), strict=True):
        write(root, f"sys/fs/cgroup/cpu/job/cpu.cfs_{name}_us", value)
    assert usable_cores() == cores
