"""Pretrain a MiniMind on a jsonl corpus.

    python trainer/train_pretrain.py --epochs 1                      # one device: CUDA, MPS or CPU, whichever is there
    python trainer/train_pretrain.py --device cpu --hidden_size 256  # a small one on a CPU
    torchrun --nproc_per_node 2 trainer/train_pretrain.py            # data parallel: NCCL on GPUs, Gloo on CPUs

Without `dataset/pretrain_hq.jsonl` and without `--data_path` it trains on the documentation inside the installed
Python. `--help` lists the flags; docs/design.md explains the words (step, update, row, document).

Read on in trainer/pretrain/command.py (job and Trainer), trainer/loop.py (the loop), trainer/pretrain/job.py (what is
trained) and trainer/engine.py (one update).
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Ctrl-C during the imports ends the process at once; `launch` sets handlers of its own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if __package__ in (None, ""):
    # Run by path, trainer/ would come first on the path, and could shadow a dependency.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if __name__ == "__main__":
    # --help and wrong flags are answered before torch is imported, which takes seconds.
    from trainer.pretrain.settings import parse_args

    parse_args()

from common.command_clock import count_from_here
from trainer.loop import train_epoch
from trainer.machine.command_line import run_cli
from trainer.machine.ranks import init_distributed_mode
from trainer.optim.schedules import get_lr
from trainer.pretrain.command import run_command
from trainer.pretrain.first_model import init_model
from trainer.pretrain.job import PretrainJob
from trainer.pretrain.settings import given_settings, parse_args

# What other people's code imports from here
__all__ = ["get_lr", "init_distributed_mode", "init_model", "main", "train_epoch"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer with the given flags (default: the command line's). Returns the exit code."""
    # Another program that calls this function may have computed something before, and then cannot be copied.
    is_own_command = argv is None
    if not is_own_command:
        count_from_here()
    argv = sys.argv[1:] if argv is None else argv
    return run_command(PretrainJob, parse_args(argv), given_settings(argv), argv, is_own_command)


if __name__ == "__main__":
    run_cli(main)
