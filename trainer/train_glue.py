"""Fine-tune an encoder on the GLUE tasks, or on a task of your own, and show a table of results.

    python trainer/train_glue.py --task rte --data_dir glue_data                  # train_electra.py's discriminator
    python trainer/train_glue.py --task all --data_dir glue_data --num_seeds 5    # all tasks found, with deviations
    python trainer/train_glue.py --task cola --data_dir glue_data --from_scratch  # for comparison: no pretraining
    torchrun --nproc_per_node 2 trainer/train_glue.py --task mnli --data_dir glue_data

All flags count updates; those of the published run.py are accepted too. `--help` lists the flags. Read on in
encoders/glue/job.py (a task with one seed).

{out_dir}/{task}/seed_{seed}/ has a run's model, predictions and eval_results.json; {out_dir}/{task}/eval_results.json those of
all its seeds; {out_dir}/eval_results.json and .md those of all tasks.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):
    # Run by path: nothing in trainer/ may shadow a dependency.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if __name__ == "__main__":
    from common.start import guard_imports

    guard_imports()
    from encoders.glue.settings import GlueSettings

    # Answers --help and wrong flags before torch is imported, which takes seconds. `main` reads the flags again.
    GlueSettings.parse()

from encoders.glue.command import main
from trainer.machine.command_line import run_cli

# a name that other people's code imports
__all__ = ["main"]

if __name__ == "__main__":
    run_cli(main)
