"""The command that repeats a plan by explicit flags."""

import dataclasses
import shlex
from collections.abc import Collection

from trainer.budget.kept_plan import PLANNED
from trainer.pretrain.settings import PretrainSettings

# They ask for a plan, and the flags are the plan.
LEFT_OUT = ("budget", "budget_tokens", "budget_flops", "dry_run", "from_resume")


def explicit_command(settings: PretrainSettings, given: Collection[str]) -> str:
    """What a user types to train the plan again. given: names of the settings that he has said himself."""
    words = ["python", "trainer/train_pretrain.py"]
    for field in dataclasses.fields(settings):
        name = field.name
        value = getattr(settings, name)
        if name in LEFT_OUT or value is None or (name not in given and name not in PLANNED):
            continue
        words.append(f"--{name}")
        items = value if isinstance(value, list) else [value]
        words += [text_of(item) for item in items]
    return shlex.join(words)


def text_of(value: object) -> str:
    """A value as a flag takes it."""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
