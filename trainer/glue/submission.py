"""What is sent to GLUE's leaderboard: a ZIP of one file for each test file, made by one seed of each task or by all."""

import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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


class Chosen(NamedTuple):
    """Predictions of a task, and in a word whose they are."""

    paths: list[Path]
    whose: str


def chosen_files(out: Path, task: str, of_task: Mapping[str, Any], choice: str) -> Chosen:
    """The predictions of a task that are chosen."""
    seeds = of_seeds(of_task)
    is_ensemble = choice == "ensemble" and len(seeds) > 1
    # What lies there without figures among the results was made by other seeds or of other files.
    if is_ensemble and "ensemble" not in of_task:
        return Chosen([], choice)
    whose = choice
    if choice != "ensemble" and not of_task["metrics"]:
        # It was not evaluated, so no seed is known to be better than another.
        whose = "first"
    source = FOLDER if is_ensemble else f"seed_{chosen_seed(seeds, whose)}"
    names = [name for name, _ in TASKS[task].test]
    paths = [out / task / source / PREDICTIONS / f"{name}.tsv" for name in names]
    return Chosen([path for path in paths if path.is_file()], whose)


def write_submission(out: Path, found: Mapping[str, Any], choice: str, say: Say) -> None:
    """{out}/submission.zip, of the benchmark's tasks whose results are `found`; a line says which files are not in there."""
    wanted = [name for task in TASKS.values() for name, _ in task.test]
    paths: list[Path] = []
    # {"best", "median", "first" or "ensemble": the tasks of which that is sent}
    tasks_of: dict[str, list[str]] = {}
    for task, of_task in found.items():
        if task not in TASKS:
            continue
        chosen = chosen_files(out, task, of_task, choice)
        if chosen.paths:
            paths += chosen.paths
            tasks_of.setdefault(chosen.whose, []).append(task)
    target = out / ZIP_NAME
    if not paths:
        # One that an earlier command has left is not what these results are. Beside tasks of one's own it is none of ours.
        if any(task in TASKS for task in found):
            remove(target)
        return
    with atomic_file(target) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(paths, key=lambda path: wanted.index(path.stem)):
            with path.open("rb") as source, archive.open(zipfile.ZipInfo(path.name, DATE), "w") as member:
                shutil.copyfileobj(source, member)
    missing = sorted(set(wanted) - {path.stem for path in paths}, key=wanted.index)
    lacks = f"; the leaderboard also wants {', '.join(missing)}" if missing else ""
    say(f"submission: {target}, {counted(len(paths), 'file')} of {whose_files(tasks_of)}{lacks}")


def whose_files(tasks_of: Mapping[str, list[str]]) -> str:
    """Which seeds made the files, as part of a line. tasks_of: {"best", "median", "first" or "ensemble": tasks}."""
    if "ensemble" in tasks_of:
        return "ensembles of all seeds"
    if len(tasks_of) == 1:
        (whose,) = tasks_of
        return f"the {whose} seed of each task"
    return " and ".join(f"the {whose} seed of {', '.join(tasks)}" for whose, tasks in tasks_of.items())
