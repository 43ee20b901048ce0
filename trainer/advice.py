"""Advice to the user of a run: settings without effect, the expected loss, what to do with the finished run. It is computed
from values; nothing here looks into a job or a trainer.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.settings import field_default
from common.start import script_path, shell_line
from common.wording import counted
from trainer.budget import laws
from trainer.machine.ranks import Ranks
from trainer.pretrain.settings import PretrainSettings

# tokens: shorter runs learn little with any settings
MIN_TOKENS_FOR_NOTES = 1e5
# factor by which a setting may be off before a note
FAR_OFF = 4.0

# Excess of the loss before the decay over that of a run that ends there, as a fraction of the latter: 0.02 in eight runs of
# three minutes, about 0.1 in one of two hours.
EXCESS_BEFORE_DECAY = 0.06
# tokens before there is an expected loss
MIN_TOKENS_FOR_FORECAST = 3e5

OUT_OF_MEMORY_ADVICE = (
    "try half the --batch_size and twice the --accumulation_steps, which leaves the updates as they are (with --rows_per_update "
    "only halve --batch_size; also double flags that count micro-batches), --gradient_checkpointing 1, or a smaller "
    "--max_seq_len or model"
)


def expected_training_loss(
    law: Callable[[float], float], unique_tokens: float, full_rate: float, tokens: float, rate: float
) -> float | None:
    """Expected training loss after this many tokens, at this learning rate; None: unknown.

    law: loss of a run that ends after this many tokens. unique_tokens: of the data. full_rate: learning rate before the decay.
    """
    if tokens < MIN_TOKENS_FOR_FORECAST or laws.is_repeated_too_often(tokens / unique_tokens):
        return None
    return law(tokens) * (1 + EXCESS_BEFORE_DECAY * min(rate / full_rate, 1.0))


def warnings_of(settings: Any, reasons: Mapping[str, str]) -> list[str]:
    """A line for each non-default setting without effect. reasons: {name: why it has none; "" if it has one}."""
    lines = []
    for name, why in reasons.items():
        value = getattr(settings, name)
        if why and value != field_default(type(settings), name):
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


def pretraining_notices(
    settings: PretrainSettings,
    ranks: Ranks,
    *,
    parameters: int,
    tokens: float,
    update_tokens: float,
    micro_batches: int,
    has_validation: bool,
) -> list[str]:
    """Warnings and notes about settings that a user may want to change.

    settings: as given by the user. tokens, update_tokens: trained by the run and by an update.
    micro_batches: of a rank in the whole run.
    """
    from_file = settings.from_weight != "none"
    # A plan has chosen some of the settings, not the user.
    is_planned = settings.has_budget
    has_no_decay = not is_planned and settings.lr_schedule != "wsd"
    reasons = {
        "init_scheme": "the weights come from a file" if from_file else "",
        "eval_interval": "" if has_validation else "no validation data",
        "allow_val_overlap": "" if settings.val_path else "there is no --val_path",
        "decay_share": f"--lr_schedule is {settings.lr_schedule}" if has_no_decay else "",
        "epochs": "--max_updates says when the run ends" if settings.max_updates and not is_planned else "",
        "accumulation_steps": "--rows_per_update is given" if settings.rows_per_update else "",
    }
    lines = warnings_of(settings, reasons) + common_warnings(settings, ranks)
    if settings.warmup_iters >= micro_batches:
        length = counted(micro_batches, "micro-batch", "micro-batches")
        lines.append(f"warning: --warmup_iters {settings.warmup_iters}: the run has {length}, so its rate only rises")
    if tokens < MIN_TOKENS_FOR_NOTES or from_file or settings.use_moe:
        return lines

    # an update size and learning rates that are far from what suits the run
    good = laws.batch_tokens(tokens)
    if not 1 / FAR_OFF <= update_tokens / good <= FAR_OFF:
        lines.append(
            f"note: runs of {tokens:,.0f} tokens learn best with updates of about {good:,.0f} tokens; yours have "
            f"{update_tokens:,.0f} (--batch_size, --accumulation_steps). --budget 10m chooses all settings for ten minutes"
        )
    # A custom optimiser has no law.
    suitable: dict[str, float] = {}
    if settings.optimizer == "adamw":
        suitable = {"learning_rate": laws.adamw_rate(parameters, tokens)}
    elif settings.optimizer == "muon":
        suitable = {"learning_rate": laws.SIDE_RATE, "muon_lr": laws.MUON_RATE}
        if settings.embed_lr:
            suitable["embed_lr"] = laws.EMBED_RATE
    for name, rate in suitable.items():
        if not 1 / FAR_OFF <= getattr(settings, name) / rate <= FAR_OFF:
            lines.append(f"note: --{name} {getattr(settings, name):g}: runs of this size do best with about {rate:.2g}")
    return lines


def explain_expected_loss(parameters: float, tokens: float) -> str:
    """Explanation of `expected` in the log lines, printed before them. tokens: of the run."""
    error = laws.LOSS_ERROR_OF_SMALL if min(parameters, tokens) < laws.SMALL else laws.LOSS_ERROR_ELSEWHERE
    return (
        "`expected` in the lines below: the training loss that runs of this size reach by then if they go well, by a formula that "
        f"may be {error:.0%} off (docs/budget.md). If the loss stays far above it, or rises, try other learning rates and look at the "
        "data (encoding, order, a tokenizer for another language)"
    )


# (purpose, command)
Command = tuple[str, str]


def next_command(purpose: str, script: str, *words: str | Path) -> Command:
    """The command as typed in the current folder. script: its path in the repository."""
    return purpose, shell_line(["python", script_path(script), *map(str, words)])
