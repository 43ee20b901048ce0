"""The plan of a run on the disk: a resume must know it before it knows how wide the model is."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.notices import announce
from common.settings_files import write_settings
from trainer.budget.settings import BUDGETS
from trainer.launch import make_folder
from trainer.machine.ranks import Ranks
from trainer.pretrain.settings import MODEL_FLAGS, PretrainSettings
from trainer.saving.places import check_writable

# The settings that a plan may choose.
PLANNED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "init_scheme",
    "optimizer",
    "learning_rate",
    "muon_lr",
    "embed_lr",
    "weight_decay",
    "lr_schedule",
    "decay_share",
    "warmup_iters",
    "max_seq_len",
    "batch_size",
    "accumulation_steps",
    "max_updates",
    "val_fraction",
    "eval_interval",
    "log_interval",
    "save_interval",
    "use_compile",
)


def plan_path(settings: PretrainSettings) -> Path:
    """Where the plan of a run is."""
    return Path(settings.out_dir) / f"{settings.save_weight}.plan.yaml"


def check_out_dir(settings: PretrainSettings) -> None:
    """Errors: UserError where the files of a run cannot be written, as far as that is known before its width is."""
    path = plan_path(settings)
    make_folder(path.parent)
    check_writable(Path(settings.out_dir) / settings.save_weight)


def keep_plan(settings: PretrainSettings, ranks: Ranks) -> None:
    """Write the settings that a plan has led to, unless this run goes on with an earlier start's.

    With them, how many processes share a micro-batch: a resume has as many, and so the same sums.
    """
    if settings.from_resume and kept_settings(settings) is not None:
        return
    path = plan_path(settings)
    make_folder(path.parent)
    write_settings(dataclasses.replace(settings, cpu_processes=str(ranks.sharing)), path)


def kept_settings(settings: PretrainSettings) -> PretrainSettings | None:
    """The settings that the first start of a run has kept; None: there is no plan. Errors: UserError for another file."""
    path = plan_path(settings)
    if not path.is_file():
        return None
    before = type(settings).read(path)
    if not before.max_updates or not before.has_budget:
        raise UserError(f"{path} is not the plan of a run: remove it, or start without --from_resume")
    return before


def refuse_forgotten_budget(settings: PretrainSettings, given: Collection[str]) -> None:
    """For a resume without a budget. Errors: UserError where its folder has the plan of a run of another width.

    Without this a run of the default width would begin, beside the one that was meant.
    """
    before = kept_settings(settings)
    if before is None or "hidden_size" in given or before.hidden_size == settings.hidden_size:
        return
    asked = next(f"--{name} {getattr(before, name)}" for name in BUDGETS if getattr(before, name) is not None)
    raise UserError(
        f"{plan_path(settings)} is the plan of a run that began with {asked}: add it to go on with that run, or --hidden_size "
        "for another one"
    )


def earlier_plan(settings: PretrainSettings, given: Collection[str]) -> dict[str, Any] | None:
    """What the first start of a run has chosen; None: there is no plan. Errors: UserError where it had another budget."""
    path = plan_path(settings)
    before = kept_settings(settings)
    if before is None:
        return None
    for name in BUDGETS:
        asked = getattr(settings, name)
        planned = getattr(before, name)
        if planned != asked:
            raise UserError(
                f"--{name} is {asked}, and {path} says that this run was planned with {planned}: give the same one, or "
                "start without --from_resume"
            )
    # A later plan in the same folder, for another size, has taken the place of the first one.
    for name in set(given) & set(MODEL_FLAGS):
        if getattr(settings, name) != getattr(before, name):
            raise UserError(
                f"--{name} is {getattr(settings, name)}, and {path} is the plan of a run with {getattr(before, name)}: drop the "
                "flag, or take an --out_dir of its own for each size"
            )
    announce(f"the plan of the first start holds: {path}")
    return {name: getattr(before, name) for name in PLANNED if name not in given}
