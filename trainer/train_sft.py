"""Supervised fine-tuning: train a MiniMind on conversations, so that it answers.

    python trainer/train_sft.py --data_path chats.jsonl               # from out/pretrain_512.pth, or else the newest pretrained
    python trainer/train_sft.py --data_path chats.jsonl --from_weight out/pretrain_256.pth
    torchrun --nproc_per_node 2 trainer/train_sft.py --data_path chats.jsonl             # data parallel

A line of the data is {"conversations": [{"role": ..., "content": ...}, ...]} or {"messages": [...]}. The loss covers
only what the assistant says. Without data it learns questions on Python's documentation. `--help` lists the flags;
docs/sft.md explains the data, the mask and the result.

Read on in trainer/command.py (job and Trainer), trainer/loop.py (the loop) and trainer/sft/job.py (what differs
from pretraining).
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    # Run by path: nothing in trainer/ may shadow a dependency.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if __name__ == "__main__":
    from common.start import guard_imports

    guard_imports()

import os

from common.wording import announce
from trainer.calls import CallableModule, Caller
from trainer.machine.command_line import call, run_cli
from trainer.sft.settings import SftSettings


def main(argv: Sequence[str] | None = None, caller: Caller | None = None, settings: SftSettings | None = None) -> int:
    """Train with these flags, and with defaults that follow the amount of text. Returns the exit code. See `run_command`."""
    settings = settings or SftSettings.parse(argv)
    # After --help and wrong flags, since they import torch, which takes seconds.
    from trainer.command import run_command
    from trainer.sft.job import SftJob, defaults_for_data_size

    settings, note = defaults_for_data_size(settings)
    # Only one of torchrun's processes prints them.
    if os.environ.get("RANK", "0") in ("0", "-1"):
        if "from_weight" not in settings.user_set:
            announce(f"weights: {settings.from_weight} (--from_weight names others)")
        if note:
            announce(note)
    return run_command(SftJob, settings, argv, caller)


# `from trainer import train_sft` is this function too: see `trainer.train`.
train = partial(call, SftSettings, main)
sys.modules[__name__].__class__ = CallableModule

if __name__ == "__main__":
    run_cli(main)
