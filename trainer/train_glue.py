"""Fine-tune an encoder on the GLUE tasks and show its table.

    python trainer/train_glue.py --task rte --data_dir glue_data                  # of train_electra.py's discriminator
    python trainer/train_glue.py --task all --data_dir glue_data --num_seeds 5    # all that are there, with deviations
    python trainer/train_glue.py --task cola --data_dir glue_data --from_scratch  # what is it without pretraining?
    torchrun --nproc_per_node 2 trainer/train_glue.py --task mnli --data_dir glue_data

All flags count updates; those of the published run.py are taken too. Results go to {out_dir}/{task}/seed_{seed}/, their
summary to {out_dir}/eval_results.json. `--help` lists the flags. Read on in trainer/glue/command.py (what is around the runs)
and trainer/glue/job.py (a task with one seed).
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    # Run by path, trainer/ would come first on the path, and could shadow a dependency.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if __name__ == "__main__":
    from common.start import begin

    begin()
    # --help and wrong flags are answered before torch is imported, which takes seconds.
    from trainer.glue.settings import parse_args

    SETTINGS = parse_args()

from trainer.glue.command import seeds, set_up, show_table, write_for_task
from trainer.glue.job import one_run
from trainer.glue.settings import GlueSettings, parse_args
from trainer.job import Surroundings
from trainer.launch import launch
from trainer.machine.command_line import run_cli
from trainer.machine.ranks import on_main


def main(argv: Sequence[str]) -> int:
    """The command as a function, for notebooks and other programs: fine-tune with these flags. Returns the exit code."""
    return launch(train, "trainer/train_glue.py", parse_args(argv), argv)


def train(settings: GlueSettings, surroundings: Surroundings) -> int:
    """Fine-tune on every task with every seed, and show the table. Returns the exit code."""
    command, tasks = set_up(settings, surroundings)
    for data in tasks:
        runs = {}
        for seed in seeds(settings):
            exit_code, runs[seed] = one_run(command, data, seed)
            if exit_code:
                return exit_code
        on_main(surroundings.ranks, partial(write_for_task, command, data, runs))
    on_main(surroundings.ranks, lambda: show_table(command))
    return 0


if __name__ == "__main__":
    run_cli(partial(launch, train, "trainer/train_glue.py", SETTINGS, sys.argv[1:]))
