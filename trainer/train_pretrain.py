"""Pretrain a MiniMind on a jsonl corpus.

    python trainer/train_pretrain.py --epochs 1                      # one device: CUDA, MPS or CPU, whichever is there
    python trainer/train_pretrain.py --device cpu --hidden_size 256  # a small one on a CPU
    torchrun --nproc_per_node 2 trainer/train_pretrain.py            # data parallel: NCCL on GPUs, Gloo on CPUs

Without `dataset/pretrain_hq.jsonl` and without `--data_path` it trains on the documentation inside the installed
Python. `--help` lists the flags; docs/design.md explains the words (step, update, row, document).

Read on in trainer/loop.py (the loop), trainer/pretrain/job.py (what is trained) and trainer/engine.py (one update).
"""

import signal
import sys
from collections.abc import Collection, Sequence
from functools import partial
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

from common.processes import count_from_here
from trainer.budget.kept_plan import check_out_dir, keep_plan, refuse_forgotten_budget
from trainer.budget.planner import advice_on_planning, plan_run
from trainer.job import Surroundings
from trainer.launch import launch
from trainer.loop import Trainer, train_epoch
from trainer.machine.command_line import run_cli
from trainer.machine.out_of_memory import told_in_a_line
from trainer.machine.processes import divide
from trainer.machine.ranks import init_distributed_mode, on_main
from trainer.optim.schedules import get_lr
from trainer.pretrain.job import PretrainJob, init_model
from trainer.pretrain.micro_batch import micro_batch_of
from trainer.pretrain.settings import AUTO_ROWS, PretrainSettings, given_settings, parse_args

# What other people's code imports from here
__all__ = ["get_lr", "init_distributed_mode", "init_model", "main", "train_epoch"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer with the given flags (default: the command line's). Returns the exit code."""
    # Another program that calls this function may have computed something before, and then cannot be copied.
    is_own_command = argv is None
    if not is_own_command:
        count_from_here()
    argv = sys.argv[1:] if argv is None else argv
    settings = parse_args(argv)
    given = given_settings(argv)
    if settings.batch_size == AUTO_ROWS:
        # It is left open, as if nothing had been said of it.
        given -= {"batch_size"}
    division = divide(settings, partial(micro_batch_of, settings, given), by_itself=is_own_command)
    work = partial(train, given=given)
    return launch(work, "trainer/train_pretrain.py", settings, argv, settings.ddp, division)


def train(settings: PretrainSettings, surroundings: Surroundings, given: Collection[str] = ()) -> int:
    """Set everything up, train, and show what came out. given: the settings that the user has said."""
    if settings.has_budget:
        if not settings.dry_run:
            # A plan takes a while: a folder that cannot be written is told before.
            on_main(surroundings.ranks, partial(check_out_dir, settings))
        with told_in_a_line(surroundings.device, advice_on_planning):
            planned = plan_run(settings, given, surroundings)
        if planned is None:
            return 0
        settings = planned
    elif settings.from_resume:
        on_main(surroundings.ranks, partial(refuse_forgotten_budget, settings, given))
    job = PretrainJob(settings, surroundings)
    if settings.has_budget:
        # Not before the job has claimed the files: another run may be writing them, which needs its own plan.
        on_main(surroundings.ranks, partial(keep_plan, settings, surroundings.ranks))
    return Trainer(job, surroundings).run()


if __name__ == "__main__":
    run_cli(main)
