"""The command that repeats a plan by explicit flags."""

import dataclasses
import shlex
from collections.abc import Collection

from trainer.budget.settings import BUDGETS
from trainer.pretrain.settings import PretrainSettings

# A command with these would plan again.
PLANNING = (*BUDGETS, "dry_run", "from_resume")
# They say how processes share a run, which changes no update. Another machine may have none to share it.
OF_PROCESSES = ("ddp", "local_rank", "dist_timeout", "cpu_processes")

# They count micro-batches of one rank.
IN_MICRO_BATCHES = ("accumulation_steps", "warmup_iters", "eval_interval", "log_interval", "save_interval")


def explicit_command(settings: PretrainSettings, said: Collection[str], at_once: int) -> str:
    """What a user types to train the plan again in one process.

    said: names of the settings that he has said himself, or that the plan says. at_once: micro-batches that the ranks
    compute side by side.
    """
    words = ["python", f"trainer/{settings.prog}"]
    for field in dataclasses.fields(settings):
        name = field.name
        value = getattr(settings, name)
        if name in PLANNING or name in OF_PROCESSES or value is None or name not in said:
            continue
        if name in IN_MICRO_BATCHES:
            value *= at_once
        words.append(f"--{name}")
        items = value if isinstance(value, list) else [value]
        words += [text_of(item) for item in items]
    return shlex.join(words)


def text_of(value: object) -> str:
    """A value as a flag takes it."""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
