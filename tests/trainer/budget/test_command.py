"""The command that repeats a plan. Reference: the settings that it gives."""

import shlex

from trainer.budget.command import explicit_command
from trainer.pretrain.settings import parse_args

SAID = [
    "--data_path",
    "a b.jsonl",
    "--hidden_size",
    "128",
    "--budget",
    "10m",
    "--max_updates",
    "50",
    "--eval_interval",
    "7",
]


def repeated(words, at_once=1):
    """(the flags of the command, the settings that they give)"""
    said = {word.removeprefix("--") for word in words if word.startswith("--")}
    command = shlex.split(explicit_command(parse_args(words), said, at_once))
    assert command[:2] == ["python", "trainer/train_pretrain.py"]
    return command[2:], parse_args(command[2:])


def test_what_was_said_is_repeated_but_for_the_budget():
    flags, again = repeated([*SAID, "--dry_run", "1"])
    assert "--budget" not in flags and "--dry_run" not in flags and "--num_hidden_layers" not in flags
    assert (again.data_path, again.hidden_size, again.max_updates, again.eval_interval) == (["a b.jsonl"], 128, 50, 7)


def test_flags_that_only_concern_processes_are_not_repeated():
    """The command is for one process, and counts its micro-batches."""
    of_processes = ["--ddp", "1", "--local_rank", "1", "--dist_timeout", "60", "--cpu_processes", "2"]
    flags, again = repeated([*SAID, *of_processes, "--device", "cpu", "--num_workers", "2"], at_once=3)
    assert not set(of_processes[::2]) & set(flags)
    assert (again.device, again.num_workers, again.eval_interval) == ("cpu", 2, 21)
