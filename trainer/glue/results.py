"""Results of fine-tuning: statistics over seeds, which seed is chosen, and the tables and files of them."""

import contextlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from common.files import atomic_file, read_object
from common.locks import file_lock
from dataset.glue.glue_tasks import TASKS
from trainer.reporting.records import LARGEST
from trainer.reporting.reporter import Say, finite

Figures = Mapping[str, float | None]

# In GLUE's tables: (name of the column, task). The average leaves out WNLI, as its papers do.
COLUMNS = (
    ("CoLA", "cola"),
    ("SST-2", "sst2"),
    ("MRPC", "mrpc"),
    ("STS-B", "stsb"),
    ("QQP", "qqp"),
    ("MNLI-m/mm", "mnli"),
    ("QNLI", "qnli"),
    ("RTE", "rte"),
    ("WNLI", "wnli"),
)
NOT_AVERAGED = "wnli"
# Of a metric over the seeds.
STATISTICS = {"mean", "median", "deviation"}
# Of a file of results: that of a hundred seeds has less than 1 MB.
MOST_RESULT_BYTES = 1 << 24
# What it guards takes some seconds.
TABLES_LOCK = ".eval_results.lock"
LONGEST_WAIT_S = 60.0
# Digits: a seed is below 2**32.
LONGEST_SEED = 10
# The leaderboard shows F1 before accuracy.
FIRST_SHOWN = {"mrpc": "f1", "qqp": "f1"}


def is_known_figure(value: float | None) -> TypeGuard[float]:
    return value is not None and not math.isnan(value)


def summary(results: Sequence[Figures]) -> dict[str, dict[str, float | None]]:
    """{metric: mean, median and deviation (of a sample; None of one run)} over the {metric: value} of several runs."""
    found: dict[str, dict[str, float | None]] = {}
    for name in results[0]:
        values = [result[name] for result in results]
        known = [value for value in values if is_known_figure(value)]
        # What is not a number is null in a file.
        if len(known) < len(values):
            found[name] = {"mean": math.nan, "median": math.nan, "deviation": math.nan}
            continue
        found[name] = {
            "mean": statistics.fmean(known),
            "median": statistics.median(known),
            "deviation": statistics.stdev(known) if len(known) > 1 else None,
        }
    return found


def in_order(results: Mapping[str, Figures]) -> list[str]:
    """The seeds from the worst to the best by the first metric. results: {seed: {metric: value}}. Where it is not a number,
    a seed is worse than all; of seeds alike the later one comes first, so that the first one is the best."""
    first = next(iter(next(iter(results.values()))), "")

    def place(seed: str) -> tuple[float, int]:
        value = results[seed].get(first)
        return (value if is_known_figure(value) else -math.inf), -int(seed)

    return sorted(results, key=place)


def chosen_seed(results: Mapping[str, Figures], choice: str) -> str:
    """The best seed, the median one (of an even number the worse of the two in the middle), or the first one."""
    if choice == "first":
        return min(results, key=int)
    order = in_order(results)
    return order[-1] if choice == "best" else order[(len(order) - 1) // 2]


def of_seeds(of_task: Mapping[str, Any]) -> dict[str, Figures]:
    """{seed: {metric: value}} of a task's results."""
    return {seed: run["results"] for seed, run in of_task["seeds"].items()}


# ------------------------------------------------------------------------------------------------- tables


def table(found: Mapping[str, Any]) -> list[str]:
    """Lines of a markdown table. found: {task: {"metrics": summary, "seeds": {seed: values}, "ensemble": values}}; figures
    times 100."""
    lines = [
        "| task | metric | mean | median | deviation | best | ensemble | runs |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, of_task in found.items():
        if not of_task["metrics"]:
            continue
        seeds = of_seeds(of_task)
        best = seeds[chosen_seed(seeds, "best")]
        for metric, values in of_task["metrics"].items():
            cells = [figure(values[what]) for what in ("mean", "median", "deviation")]
            cells += [figure(best.get(metric)), figure(of_task.get("ensemble", {}).get(metric))]
            lines.append(f"| {name} | {metric} | {' | '.join(cells)} | {len(seeds)} |")
    return lines


def figure(value: float | None) -> str:
    """A figure times 100, or a dash."""
    return f"{100 * value:.2f}" if is_known_figure(value) else "-"


def glue_table(found: Mapping[str, Any]) -> list[str]:
    """Lines of a markdown table as GLUE's papers print them: a column for each task that is there, a row for the mean, the
    median, the best seed and the ensemble; figures times 100. None for less than two tasks of the benchmark."""
    columns = [(title, name) for title, name in COLUMNS if found.get(name, {}).get("metrics")]
    if len(columns) < 2:
        return []
    titles = [title for title, _ in columns]
    lines = [f"| | {' | '.join(titles)} | average |", "|---|" + "---:|" * (len(columns) + 1)]
    for row in ("mean", "median", "best", "ensemble"):
        figures = {name: row_of(found[name], row) for _, name in columns}
        if all(figures.values()):
            cells = [cell_of(name, values) for name, values in figures.items()]
            lines.append(f"| {row} | {' | '.join(cells)} | {figure(average(figures))} |")
    lines += ["", f"average: of the tasks that are there{', without WNLI' if NOT_AVERAGED in found else ''}"]
    return lines


def row_of(of_task: Mapping[str, Any], row: str) -> Figures:
    """{metric: value} of a row of `glue_table`; nothing where a task has no such row."""
    if row in ("mean", "median"):
        return {metric: values[row] for metric, values in of_task["metrics"].items()}
    if row == "best":
        seeds = of_seeds(of_task)
        return seeds[chosen_seed(seeds, "best")]
    found: Figures = of_task.get("ensemble", {})
    return found


def cell_of(task: str, values: Figures) -> str:
    """The figures of a task, in the leaderboard's order."""
    names = sorted(values, key=lambda name: name != FIRST_SHOWN.get(task))
    cells = []
    for name in names:
        value = values[name]
        cells.append(f"{100 * value:.1f}" if is_known_figure(value) else "-")
    return "/".join(cells)


def average(figures: Mapping[str, Figures]) -> float:
    """The mean over tasks of the mean of each task's figures; NaN where one is not a number."""
    means = []
    for name, values in figures.items():
        if name != NOT_AVERAGED:
            known = [math.nan if value is None else value for value in values.values()]
            means.append(statistics.fmean(known))
    return statistics.fmean(means) if means else math.nan


def results_of(out: Path) -> dict[str, Any]:
    """{task: what its eval_results.json holds} of all tasks in a folder: the benchmark's first, then others by name."""
    own = sorted(path.parent.name for path in out.glob("*/eval_results.json"))
    found = {}
    for name in dict.fromkeys((*TASKS, *own)):
        of_task = read_json(out / name / "eval_results.json", "metrics", "seeds")
        if of_task and are_results(of_task):
            found[name] = of_task
    return found


def are_results(of_task: Mapping[str, Any]) -> bool:
    """Whether a file holds what `write_for_task` writes: it may have been put there by anybody."""
    runs = of_task["seeds"].items()
    if not runs or not are_figures(of_task.get("ensemble", {})):
        return False
    for seed, run in runs:
        if not is_seed(seed) or not isinstance(run, dict) or not are_figures(run.get("results")):
            return False
    return all(are_figures(values) and values.keys() >= STATISTICS for values in of_task["metrics"].values())


def is_seed(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= LONGEST_SEED


def are_figures(found: object) -> bool:
    """Whether this is {metric: value}."""
    if not isinstance(found, dict):
        return False
    # JSON's integers know no bound, and a bool is an int in Python.
    return all(value is None or (type(value) in (int, float) and abs(value) <= LARGEST) for value in found.values())


@contextlib.contextmanager
def written_alone(out: Path) -> Iterator[None]:
    """Keep other commands from writing the tables of a folder; one that is writing them is waited for.

    Each of them reads what all tasks have left: without it an older table might be written last.
    """
    lock = file_lock(out / TABLES_LOCK)
    # A file system without locks, or a machine that was lost: the table of this command is written all the same.
    with contextlib.suppress(OSError, NotImplementedError):
        lock.acquire(timeout=LONGEST_WAIT_S)
    try:
        yield
    finally:
        lock.release()


def show_table(out: Path, say: Say) -> dict[str, Any]:
    """Write {out}/eval_results.json and {out}/eval_results.md from all tasks that are in there, and print their tables.
    Returns what `results_of` found."""
    found = results_of(out)
    write_json(out / "eval_results.json", found)
    lines = table(found)
    if in_glue := glue_table(found):
        lines += ["", *in_glue]
    with atomic_file(out / "eval_results.md") as file:
        file.write(("\n".join(lines) + "\n").encode())
    for line in ("", *lines, "", f"written: {out / 'eval_results.json'}, {out / 'eval_results.md'}"):
        say(line)
    return found


# -------------------------------------------------------------------------------------------------- files


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all; null for what is not finite."""
    with atomic_file(path) as file:
        file.write(json.dumps(finite(content), indent=2).encode() + b"\n")


def read_json(path: Path, *parts: str) -> dict[str, Any] | None:
    """The dict that write_json wrote, with a dict under each of `parts`; None where it is absent, damaged or foreign."""
    try:
        found: dict[str, Any] = read_object(path, MOST_RESULT_BYTES)
    except ValueError:
        return None
    return found if all(isinstance(found.get(part), dict) for part in parts) else None


def line_of(results: Mapping[str, float | None]) -> str:
    """Metrics in a line, times 100."""
    parts = []
    for name, value in results.items():
        parts.append(f"{name} {figure(value)}")
    return ", ".join(parts)
