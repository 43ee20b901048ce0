"""Advice to the user of any trainer: settings without effect, and what helps if memory runs out."""

from collections.abc import Mapping
from typing import Any

from common.settings import field_default
from trainer.machine.ranks import Ranks

OUT_OF_MEMORY_ADVICE = (
    "try half the --batch_size and twice the --accumulation_steps, which leaves the updates as they are (with --rows_per_update "
    "only halve --batch_size; also double flags that count micro-batches), --gradient_checkpointing 1, or a smaller "
    "--max_seq_len or model"
)


def warnings_of(settings: Any, reasons: Mapping[str, str]) -> list[str]:
    """A line for each setting of the user without effect. reasons: {name: why it has none; "" if it has one}."""
    lines = []
    for name, why in reasons.items():
        value = getattr(settings, name)
        if why and name in settings.user_set and value != field_default(type(settings), name):
            lines.append(f"warning: --{name} {value} has no effect: {why}")
    return lines


def common_warnings(settings: Any, ranks: Ranks) -> list[str]:
    """Warnings about settings that all trainers share."""
    device_is_ignored = ranks.world_size > 1 and ":" in (settings.device or "")
    reasons = {
        "shard": "there is one process" if ranks.world_size == 1 else "",
        "device": "each rank takes the device of its local rank" if device_is_ignored else "",
        "wandb_project": "--tracker is none" if settings.tracker == "none" else "",
    }
    # train_glue.py has no Muon.
    if hasattr(settings, "optimizer") and settings.optimizer != "muon":
        reasons |= dict.fromkeys(("muon_lr", "embed_lr"), f"--optimizer is {settings.optimizer}")
    return warnings_of(settings, reasons)
