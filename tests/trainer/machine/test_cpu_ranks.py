"""How a command on a CPU divides itself. References: choices by hand for simulated machines."""

import os
import signal

import pytest

from common.errors import UserError
from tests.faults.harness import rank_environments
from tests.helpers import flags
from trainer.command import cpu_processes
from trainer.machine import cpu_ranks
from trainer.machine.cpu_ranks import ForwardedSignals, processes_of, run_ranks, suitable_number
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
        # Half of the memory holds the processes' weights, moments and code: 2 x (0.6 + 0.4) GB.
        (2, 32, 512, 3, 1),
        (2, 32, 512, 4, 2),
    ):
        assert suitable_number(threads, rows, positions, M26, memory_gb * GB) == chosen


def processes(asked="auto", device="cpu", rows=32, **options):
    return processes_of(asked, device, rows, 512, M26, **options)


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(cpu_ranks, "available_threads", lambda: 2)
    monkeypatch.setattr(cpu_ranks, "total_memory", lambda device: 24 * GB)
    monkeypatch.delenv("RANK", raising=False)


def test_the_flag_wins_and_the_line_says_what_was_chosen(two_threads):
    assert processes()[0] == 2
    assert processes("1") == (1, [])
    n, (line,) = processes("4")
    assert n == 4
    assert line.startswith("4 processes of 1 thread share each micro-batch:")


def test_it_stays_one_process_under_a_launcher_and_elsewhere(two_threads, monkeypatch):
    monkeypatch.setattr(cpu_ranks.sys, "platform", "darwin")
    assert processes() == (1, [])
    n, (warning,) = processes("2")
    assert n == 1 and "--cpu_processes 2 has no effect" in warning
    monkeypatch.undo()
    for name, value in rank_environments(1)[0].items():
        monkeypatch.setenv(name, value)
    assert processes("2")[0] == 1


def test_a_loss_of_a_whole_micro_batch_and_a_call_are_not_divided(two_threads):
    """minimind3's mixture of experts; that of minimind2 is defined for each document."""
    minimind3 = {"generation": "minimind3", "num_attention_heads": 4}
    for model, expected in (({**minimind3, "use_moe": 1}, 1), ({"use_moe": 1}, 2), (minimind3, 2)):
        settings = PretrainSettings.parse(flags(**model, batch_size=32, max_seq_len=512))
        assert cpu_processes(settings, is_call=False)[0] == expected
        assert cpu_processes(settings, is_call=True) == (1, [])
    n, (warning,) = processes("2", obstacle="because")
    assert n == 1 and warning == "warning: --cpu_processes 2 has no effect: because"


def test_rows_that_cannot_be_shared_are_one_line(two_threads):
    with pytest.raises(UserError, match="--cpu_processes 3: --batch_size 32 cannot be divided"):
        processes("3")
    # A plan will choose rows that three processes can share.
    assert processes("3", rows=16, rows_are_open=True)[0] == 3
    for wrong in ("0", "65", "some", "-1"):
        with pytest.raises(SystemExit):
            PretrainSettings.parse(["--cpu_processes", wrong])


def test_processes_that_cannot_be_started_are_one_line(monkeypatch):
    def fork():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(UserError, match="Resource temporarily unavailable.*--cpu_processes 1 needs none"):
        run_ranks(2, lambda: 0)


def test_ranks_and_their_command_may_end_at_any_moment(monkeypatch):
    gone = os.fork() or os._exit(0)
    os.waitpid(gone, 0)
    ForwardedSignals([gone])._stop(signal.SIGTERM, None)
    # A rank whose command has died, and that a process other than the first one has adopted
    monkeypatch.setattr(os, "getppid", lambda: gone)
    assert run_ranks(2, lambda: os._exit(0)) == 1
