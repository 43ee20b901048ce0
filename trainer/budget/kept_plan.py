"""The plan of a run as settings: on the disk, where a resume finds it, and as a command that repeats it.

A resume must know the plan before it knows how wide the model is. It lies among the files of its run, as
`out/pretrain_384.plan.yaml` beside `out/pretrain_384.pth`. So a later run of the same name sets it aside together with its run, and
that of another width has one of its own. A plan without a checkpoint is of no use: such a run is begun anew.
"""

import dataclasses
import glob
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.settings import read_plain, write_settings
from common.wording import announce
from trainer.budget.settings import BUDGETS, said_ends
from trainer.launch import make_folder
from trainer.machine.ranks import Ranks
from trainer.pretrain.settings import MODEL_FLAGS, PretrainSettings
from trainer.saving.checkpoint import Checkpoints
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
    "dtype",
    "use_compile",
)
# Not repeated by the command of a plan. With the first ones it would plan again; the others say how processes share a run, which
# changes no update, and another machine may have none to share it.
NOT_REPEATED = (*BUDGETS, "dry_run", "from_resume", "ddp", "local_rank", "dist_timeout", "cpu_processes")
# They count micro-batches of one rank.
IN_MICRO_BATCHES = ("accumulation_steps", "warmup_iters", "eval_interval", "log_interval", "save_interval")


class KeptPlan(NamedTuple):
    """What the first start of a run has kept: its settings, and the file in which they are."""

    path: Path
    settings: PretrainSettings


def plan_path(stem: Path) -> Path:
    """Where the plan of a run is. stem: the path of the run's files without their endings."""
    return stem.with_name(f"{stem.name}.plan.yaml")


def check_out_dir(settings: PretrainSettings) -> None:
    """Errors: UserError where the files of a run cannot be written, as far as that is known before its width is."""
    stem = Path(settings.out_dir) / settings.save_weight
    make_folder(stem.parent)
    check_writable(stem)


def keep_plan(settings: PretrainSettings, ranks: Ranks, stem: Path) -> None:
    """Write the settings that a plan has led to, unless this run goes on with an earlier start's. stem: see `plan_path`.

    With them, how many processes share a micro-batch: a resume has as many, and so the same sums. It comes when an earlier run
    of the same name was set aside.
    """
    if not settings.has_budget:
        return
    path = plan_path(stem)
    goes_on = bool(Checkpoints(f"{stem}_resume").paths())
    if not (goes_on and path.is_file()):
        write_settings(dataclasses.replace(settings, cpu_processes=str(ranks.sharing)), path)


def plan_of_run(folder: Path, settings: PretrainSettings) -> KeptPlan | None:
    """The plan of a run, if it has one and a checkpoint. folder: of its checkpoints. Errors: UserError for another file in the
    place of a plan.

    A run whose folder was renamed back has its files among its checkpoints until the resume begins. What stands beside them then
    is that of the later run.
    """
    if not Checkpoints(folder).paths():
        return None
    name = folder.name.removesuffix("_resume")
    beside = plan_path(folder.with_name(name))
    among = folder / beside.name
    is_renamed_back = among.is_file() or (folder / f"{name}.settings.yaml").is_file()
    path = among if is_renamed_back else beside
    if not path.is_file():
        return None
    # A damaged file is told as what it is; the parser would speak of --config.
    read_plain(path, "the plan of a run:")
    before = type(settings).read(path)
    if not before.max_updates or not before.has_budget:
        raise UserError(f"{path} is not the plan of a run: remove it, or start without --from_resume")
    return KeptPlan(path, before)


def kept_plans(settings: PretrainSettings, given: Collection[str]) -> list[KeptPlan]:
    """The plans of the runs with this --save_weight that a resume may go on with. Errors: as those of plan_of_run.

    given: the settings that the user has said. With its width, runs of other widths are not meant.
    """
    prefix = Path(settings.out_dir) / settings.save_weight
    name = re.compile(rf"{re.escape(prefix.name)}_(\d+)(_moe)?_resume", re.ASCII)
    found = []
    for folder in sorted(prefix.parent.glob(f"{glob.escape(prefix.name)}_*_resume")):
        parts = name.fullmatch(folder.name)
        if parts is None:
            continue
        is_meant = "hidden_size" not in given or int(parts[1]) == settings.hidden_size
        is_meant = is_meant and ("use_moe" not in given or bool(parts[2]) == bool(settings.use_moe))
        plan = plan_of_run(folder, settings) if is_meant else None
        if plan is not None:
            found.append(plan)
    return found


def kept_plan(settings: PretrainSettings, given: Collection[str]) -> KeptPlan | None:
    """The plan of the run that a resume goes on with, or one with another budget; None: there is none.

    Errors: UserError where the flags do not say which of several runs is meant.
    """
    plans = kept_plans(settings, given)
    same = [plan for plan in plans if budgets_of(plan.settings) == budgets_of(settings)]
    if len(same) > 1:
        names = ", ".join(plan.path.name.removesuffix(".plan.yaml") for plan in same)
        raise UserError(
            f"--out_dir {settings.out_dir} has several runs that were planned with this budget, {names}: add the --hidden_size "
            "(and --use_moe) of the one to go on with"
        )
    return next(iter(same or plans), None)


def budgets_of(settings: PretrainSettings) -> dict[str, Any]:
    """What the flags say of how much a run may cost."""
    return {name: getattr(settings, name) for name in BUDGETS}


def earlier_plan(settings: PretrainSettings, given: Collection[str]) -> dict[str, Any] | None:
    """What the first start of a run has chosen; None: there is no plan. Errors: UserError where it had another budget."""
    plan = kept_plan(settings, given)
    if plan is None:
        return None
    path, before = plan
    for name, planned in budgets_of(before).items():
        if planned != getattr(settings, name):
            raise UserError(
                f"--{name} is {getattr(settings, name)}, and {path} says that this run was planned with {planned}: give the same "
                "one, or start without --from_resume"
            )
    for name in set(given) & set(MODEL_FLAGS):
        if getattr(settings, name) != getattr(before, name):
            raise UserError(
                f"--{name} is {getattr(settings, name)}, and {path} is the plan of a run with {getattr(before, name)}: drop the "
                "flag, or start without --from_resume"
            )
    if settings.val_path and before.val_fraction and "val_fraction" not in given:
        raise UserError(
            f"--val_path: this run was planned with --val_fraction {before.val_fraction:g}, and what is held out is not trained: "
            "drop the flag, or start without --from_resume"
        )
    announce(f"the plan of the first start holds: {path}")
    return {name: getattr(before, name) for name in PLANNED if name not in given}


def refuse_forgotten_budget(settings: PretrainSettings, given: Collection[str]) -> None:
    """For a resume without a budget. Errors: UserError where it would go on with a planned run, or where its folder has one of
    another width, and none of this one.

    Without this the planned run would end elsewhere, or one of the default width would begin beside the one that was meant.
    """
    # The width of a folder of weights is that folder's, here and there.
    if settings.hidden_size is None:
        return
    own = settings.stem(settings.hidden_size, bool(settings.use_moe))
    if Checkpoints(f"{own}_resume").paths():
        plan = plan_of_run(Path(f"{own}_resume"), settings)
        # The flags that a plan prints say where the run ends, and need no clock.
        if said_ends(settings, given):
            return
        other = "--max_updates to train so many updates without its clock"
    else:
        plan = next(iter(kept_plans(settings, given)), None) if "hidden_size" not in given else None
        other = "--hidden_size for another one"
    if plan is None:
        return
    (budget,) = [f"--{name} {text_of(value)}" for name, value in budgets_of(plan.settings).items() if value is not None]
    raise UserError(
        f"{plan.path} is the plan of a run that began with {budget}: add it to go on with that run, or {other}"
    )


def explicit_command(settings: PretrainSettings, said: Collection[str], at_once: int) -> str:
    """What a user types to train the plan again in one process.

    said: names of the settings that the user or the plan says. at_once: micro-batches that the ranks compute side by side.
    """
    words = ["python", f"trainer/{settings.prog}"]
    for field in dataclasses.fields(settings):
        name = field.name
        value = getattr(settings, name)
        if name in NOT_REPEATED or value is None or name not in said:
            continue
        if name in IN_MICRO_BATCHES:
            value *= at_once
        items = value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(text_of, items)]
    return shlex.join(words)


def text_of(value: object) -> str:
    """A value as a flag takes it."""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
