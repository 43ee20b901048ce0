"""How a command on a CPU divides itself, and waits in shared memory. References: choices by hand for simulated machines."""

import mmap
import os
import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from common.errors import UserError
from tests.faults.harness import rank_environments
from tests.helpers import flags
from trainer.command import shareable_batch
from trainer.machine import cpu_ranks
from trainer.machine.cpu_ranks import ShareableBatch, processes_of, suitable_number
from trainer.machine.ranks import SharedMemory
from trainer.pretrain.settings import PretrainSettings

GB = 1 << 30
M26 = 26_000_000


def test_choice_on_simulated_machines():
    for threads, rows, positions, memory_gb, chosen in (
        # Two cores: one row cannot be divided, eight can.
        (2, 1, 512, 24, 1),
        (2, 8, 512, 24, 2),
        # Each process keeps 1,024 positions: 8 x 512 make 4 of them, 8 x 128 none.
        (4, 8, 512, 24, 4),
        (2, 8, 128, 24, 1),
        # No core is left idle: three threads and 32 rows have no divisor in common, six have 2.
        (3, 32, 512, 24, 1),
        (6, 32, 512, 24, 2),
        # Many cores: eight processes at most, of several threads.
        (128, 32, 512, 512, 8),
        # Half of the memory holds the processes' weights, moments and code: 2 x (0.6 + 0.4) GB + 0.3 GB shared.
        (2, 32, 512, 4, 1),
        (2, 32, 512, 6, 2),
    ):
        assert suitable_number(threads, ShareableBatch(rows, positions, M26), memory_gb * GB) == chosen


def test_a_loss_of_a_whole_micro_batch_is_not_divided():
    """minimind3's mixture of experts; that of minimind2 is defined for each document."""
    assert suitable_number(2, ShareableBatch(32, 512, M26, obstacle="because"), None) == 1
    minimind3 = {"generation": "minimind3", "num_attention_heads": 4}
    for model, is_divided in (({**minimind3, "use_moe": 1}, False), ({"use_moe": 1}, True), (minimind3, True)):
        assert (not shareable_batch(PretrainSettings.parse(flags(**model))).obstacle) == is_divided


def cpu(asked="auto", device="cpu"):
    return SimpleNamespace(cpu_processes=asked, device=device)


def wide():
    return ShareableBatch(32, 512, M26)


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(cpu_ranks, "available_threads", lambda: 2)
    monkeypatch.setattr(cpu_ranks, "total_memory", lambda device: 24 * GB)
    monkeypatch.delenv("RANK", raising=False)


def test_the_flag_wins_and_the_line_says_what_was_chosen(two_threads):
    assert processes_of(cpu(), wide)[0] == 2
    assert processes_of(cpu("1"), wide) == (1, [])
    processes, (line,) = processes_of(cpu("4"), wide)
    assert processes == 4
    assert line.startswith("4 processes of 1 thread share each micro-batch:")


def test_it_stays_one_process_under_a_launcher_and_elsewhere(two_threads, monkeypatch):
    monkeypatch.setattr(cpu_ranks.sys, "platform", "darwin")
    assert processes_of(cpu(), wide)[0] == 1
    _, (warning,) = processes_of(cpu("2"), wide)
    assert "--cpu_processes 2 has no effect" in warning
    monkeypatch.undo()
    for name, value in rank_environments(1)[0].items():
        monkeypatch.setenv(name, value)
    assert processes_of(cpu("2"), wide)[0] == 1


def test_what_cannot_be_shared_is_one_line(two_threads):
    with pytest.raises(UserError, match="--cpu_processes 3: --batch_size 32 cannot be divided"):
        processes_of(cpu("3"), wide)
    # A plan will choose rows that three processes can share.
    assert processes_of(cpu("3"), lambda: ShareableBatch(16, 512, M26, rows_are_open=True))[0] == 3
    with pytest.raises(UserError, match="--cpu_processes 2: because; drop the flag"):
        processes_of(cpu("2"), lambda: ShareableBatch(32, 512, M26, obstacle="because"))
    for wrong in ("0", "65", "some", "-1"):
        with pytest.raises(SystemExit):
            PretrainSettings.parse(["--cpu_processes", wrong])


def test_nobody_goes_on_before_all_have_come(tmp_path):
    """In each round every rank writes a number and reads those of all behind the first wait; the second one lets it write again."""
    world_size, rounds = 3, 300
    written = [0] * world_size
    wrong = []

    def run(rank):
        memory = SharedMemory(os.open(tmp_path / "memory", os.O_RDWR | os.O_CREAT), world_size)
        data = memory.take(64)
        for number in range(1, rounds + 1):
            written[rank] = number
            data[rank] = number % 256
            memory.wait(rank)
            if written != [number] * world_size or data[:world_size].tolist() != [number % 256] * world_size:
                wrong.append((rank, number, list(written)))
            memory.wait(rank)
        memory.give_back(rank)
        left.append(os.path.getsize(tmp_path / "memory"))
        memory.wait(rank)
        data = memory.take(64)
        data[rank] = 1

    left = []
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and written == [rounds] * world_size
    assert left == [mmap.ALLOCATIONGRANULARITY] * world_size


def test_ctrl_c_in_a_copy_leaves_no_traceback(monkeypatch):
    monkeypatch.setattr(cpu_ranks, "die_with_parent", lambda parent: None)
    with pytest.raises(SystemExit) as ended:
        cpu_ranks.run_copy(mock.Mock(side_effect=KeyboardInterrupt), os.getppid())
    assert ended.value.code == 130


def test_memory_that_cannot_be_had_is_one_line(tmp_path, monkeypatch):
    # a flag that no system knows
    monkeypatch.setattr(cpu_ranks, "MFD_CLOEXEC", 1 << 20)
    with pytest.raises(UserError, match="Invalid argument.*--cpu_processes 1 needs none"):
        cpu_ranks.run_forked(2, lambda join: 0)
    memory = SharedMemory(os.open(tmp_path / "memory", os.O_RDWR | os.O_CREAT), 2)
    with pytest.raises(UserError, match="--cpu_processes 1 needs none"):
        memory.take(1 << 60)
