"""What is sent to GLUE's leaderboard: a ZIP of one file for each test file, made by one seed of each task or by all."""

import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import atomic_file, remove
from common.wording import counted
from dataset.glue.glue_tasks import TASKS
from trainer.glue.ensemble import FOLDER
from trainer.glue.predictions import PREDICTIONS
from trainer.glue.results import chosen_seed, of_seeds
from trainer.reporting.reporter import Say

ZIP_NAME = "submission.zip"
# Of every file in the ZIP, so that the same predictions give the same ZIP.
DATE = (1980, 1, 1, 0, 0, 0)


def files_of(out: Path, task: str, of_task: Mapping[str, Any], choice: str) -> list[Path]:
    """The predictions of a task that are chosen."""
    seeds = of_seeds(of_task)
    source = f"seed_{chosen_seed(seeds, choice)}"
    if choice == "ensemble" and len(seeds) > 1:
        # What lies there without figures among the results was made by other seeds or of other files.
        if "ensemble" not in of_task:
            return []
        source = FOLDER
    names = [name for name, _ in TASKS[task].test]
    paths = [out / task / source / PREDICTIONS / f"{name}.tsv" for name in names]
    return [path for path in paths if path.is_file()]


def write_submission(out: Path, found: Mapping[str, Any], choice: str, is_evaluated: bool, say: Say) -> None:
    """{out}/submission.zip, of the benchmark's tasks whose results are `found`; a line says which files are not in there.
    is_evaluated: False where no seed is known to be better than another, so that the first one's files are chosen."""
    if not is_evaluated and choice == "median":
        # Without figures the "best" seed is the first one.
        choice = "best"
    wanted = [name for task in TASKS.values() for name, _ in task.test]
    paths = []
    for task, of_task in found.items():
        if task in TASKS:
            paths += files_of(out, task, of_task, choice)
    target = out / ZIP_NAME
    if not paths:
        # One that an earlier command has left is not what these results are.
        remove(target)
        return
    with atomic_file(target) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(paths, key=lambda path: wanted.index(path.stem)):
            with path.open("rb") as source, archive.open(zipfile.ZipInfo(path.name, DATE), "w") as member:
                shutil.copyfileobj(source, member)
    missing = sorted(set(wanted) - {path.stem for path in paths}, key=wanted.index)
    which = f"the {choice if is_evaluated else 'first'} seed of each task"
    if choice == "ensemble":
        which = "ensembles of all seeds"
    lacks = f"; the leaderboard also wants {', '.join(missing)}" if missing else ""
    say(f"submission: {target}, {counted(len(paths), 'file')} of {which}{lacks}")
