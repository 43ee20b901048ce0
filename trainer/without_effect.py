"""Lines on settings that were given and cannot do what they are there for."""

from collections.abc import Iterable
from typing import Any

from common.settings import Settings, default_of
from trainer.machine.devices import pick_device
from trainer.machine.ranks import Ranks
from trainer.machine.settings import NONE

# (name of the setting, whether the line is due, why the setting has no effect)
Case = tuple[str, bool, str]


def warnings_of(settings: Any, cases: Iterable[Case]) -> list[str]:
    """A line for each case that is due."""
    lines = []
    for name, is_due, why in cases:
        if is_due:
            lines.append(f"warning: --{name} {getattr(settings, name)} has no effect: {why}")
    return lines


def is_changed(settings: Settings, name: str) -> bool:
    """Whether a setting is not its default."""
    return getattr(settings, name) != default_of(type(settings), name)


def common_warnings(settings: Any, ranks: Ranks) -> list[str]:
    """The lines on the settings that all trainers share."""
    # Fine-tuning has no Muon.
    without_muon = hasattr(settings, "muon_lr") and settings.optimizer != "muon"
    optimizer = f"--optimizer is {settings.optimizer}" if without_muon else ""
    on_one_of_several = ranks.world_size > 1 and ":" in (settings.device or "")
    has_no_project = settings.tracker in ("none", "tensorboard")
    of_one = settings.shard != NONE and ranks.world_size == 1
    on_cpu = settings.deterministic and pick_device(settings.device).type == "cpu"
    cases = [
        ("deterministic", on_cpu, "on a CPU every run gives the same bits anyway"),
        ("shard", of_one, "there is one process"),
        ("muon_lr", without_muon and is_changed(settings, "muon_lr"), optimizer),
        ("embed_lr", without_muon and is_changed(settings, "embed_lr"), optimizer),
        ("device", on_one_of_several, "each rank takes the device of its local rank"),
        ("wandb_project", has_no_project and is_changed(settings, "wandb_project"), f"--tracker is {settings.tracker}"),
    ]
    return warnings_of(settings, cases)
