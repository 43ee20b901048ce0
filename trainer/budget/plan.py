"""Output of a plan: the settings of the run, the lines for the user, and what a resume takes from the plan of its run.

A plan is settings with a budget, those of `out/pretrain_384.settings.yaml`. A resume needs them before it knows the model's width.
"""

import dataclasses
import glob
import math
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.flags import as_text
from common.processes import seconds_since_start
from common.settings import flags_of, read_plain
from common.start import script_path, shell_line
from common.wording import announce, counted
from dataset.corpus import MIN_DOCUMENTS
from model.config import ModelConfig
from trainer.batching import Batching
from trainer.budget import laws
from trainer.budget.costs import RunCosts
from trainer.forecast import Expectation
from trainer.machine.rank import Ranks
from trainer.pretrain.settings import (
    BUDGETS,
    DEFAULT_TOKENIZER,
    MODEL_FLAGS,
    ModelSettings,
    PretrainSettings,
    TrainingSettings,
)
from trainer.saving.checkpoint import Checkpoints, file_of_resumed_run

# Log lines of a run, and the minimum seconds between two
LOG_LINES = 200
SECONDS_OF_LOG_LINE = 3.0
# A plan that uses less of its budget has too little text for it.
USED_SHARE = 0.9
# Saves of a run; more if they would be further apart than the seconds below.
SAVES = 10
MAX_SECONDS_BETWEEN_SAVES = 600.0
MODEL_AND_TRAINING = {*flags_of(ModelSettings), *flags_of(TrainingSettings)}
# Settings that a resume takes from the first start, unless given again
PLANNED = MODEL_AND_TRAINING - {"from_resume", "from_weight", "tokenizer_path"}
PLANNED |= {"max_seq_len", "val_fraction", "eval_interval", "log_interval", "save_interval", "dtype", "use_compile"}
PLANNED |= {"verify_every"}
# Not repeated by the command of a plan: some would plan again, and how processes share a run depends on the machine.
NOT_REPEATED = (*BUDGETS, "dry_run", "from_resume", "ddp", "dist_timeout", "cpu_processes", "rows_per_update")


@dataclass(frozen=True)
class BudgetPlan:
    """A planned run."""

    config: ModelConfig
    parameters: int
    batching: Batching
    updates: int
    tokens: float
    passes: float
    # seconds of all updates, and of everything else: compiling, evaluations, files
    seconds: float
    other_seconds: float
    flops: float
    memory: float
    # expected validation loss, in nats per token
    loss: float

    @property
    def update_seconds(self) -> float:
        return self.seconds / self.updates


def chosen_settings(plan: BudgetPlan, costs: RunCosts) -> dict[str, Any]:
    """{name: planned value} of the settings that the user does not give. Counts of micro-batches are those of one process."""
    config, settings, batching = plan.config, costs.settings, plan.batching
    steps = batching.rows // batching.batch_size
    micro_batches = plan.updates * steps
    chosen: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "init_scheme": costs.init_scheme(config),
        "optimizer": settings.optimizer,
        "learning_rate": laws.SIDE_RATE,
        "weight_decay": laws.WEIGHT_DECAY,
        "lr_schedule": "wsd",
        "warmup_iters": min(laws.WARMUP_UPDATES, plan.updates // 10) * steps,
        "batch_size": batching.batch_size,
        "accumulation_steps": steps,
        "max_seq_len": settings.max_seq_len,
        "max_updates": plan.updates,
        "sampled_softmax": costs.head_ids,
        "val_fraction": costs.text.corpus.val_fraction,
        "log_interval": max(
            1, micro_batches // LOG_LINES, math.ceil(SECONDS_OF_LOG_LINE / plan.update_seconds * steps)
        ),
    }
    if settings.tokenizer_path != DEFAULT_TOKENIZER:
        chosen["tokenizer_path"] = settings.tokenizer_path
    if "lr_schedule" not in costs.fixed or settings.lr_schedule == "wsd":
        chosen["decay_share"] = laws.DECAY_SHARE
    if settings.verify_every:
        chosen["verify_every"] = settings.verify_every
    if costs.machine.device != "cuda" and "save_minutes" not in costs.fixed:
        # A run on CUDA saves by minutes, see SaveTimer.
        updates_between_saves = min(plan.updates / SAVES, MAX_SECONDS_BETWEEN_SAVES / plan.update_seconds)
        chosen["save_interval"] = max(1, int(updates_between_saves * steps))
    if costs.text.evaluated:
        evaluations = costs.evaluations(config, batching, plan.seconds)
        chosen["eval_interval"] = math.ceil(micro_batches / (evaluations + 1)) if evaluations else 0
    if costs.seconds is not None:
        # Without a clock, the run itself decides whether compiling pays.
        chosen["use_compile"] = "1" if costs.compiled else "0"
    if settings.optimizer == "muon":
        chosen["muon_lr"] = laws.MUON_RATE
        # A rate given by the user applies to all that AdamW trains.
        if "learning_rate" not in costs.fixed:
            chosen["embed_lr"] = laws.EMBED_RATE
        decay = laws.muon_weight_decay(plan.passes, plan.updates, plan.parameters / costs.text.unique)
        chosen["weight_decay"] = float(f"{decay:.2g}")
    else:
        chosen["learning_rate"] = float(f"{laws.adamw_rate(plan.parameters, plan.tokens):.2g}")
    chosen = {name: value for name, value in chosen.items() if name not in costs.fixed}
    if batching.ranks.batches_at_once > 1:
        # Any number of ranks trains these rows, and counts as one process does.
        chosen |= {"rows_per_update": batching.rows, "accumulation_steps": steps}
    return chosen


def quantity(value: float) -> str:
    """Three digits and K, M, G or T, as in 7.28 M."""
    # Rounded first: 999,936 is 1 M.
    rounded = float(f"{value:.3g}")
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if rounded >= size:
            return f"{rounded / size:.3g} {unit}"
    return f"{rounded:.3g}"


def duration_text(seconds: float) -> str:
    """As 1:05:00."""
    return str(timedelta(seconds=round(seconds)))


def shape_text(plan: BudgetPlan) -> str:
    """As 1.57 M parameters, 4 layers of width 128."""
    layers = counted(plan.config.num_hidden_layers, "layer")
    return f"{quantity(plan.parameters)} parameters, {layers} of width {plan.config.hidden_size}"


def plan_lines(plan: BudgetPlan, costs: RunCosts, chosen: PretrainSettings, decided: Collection[str]) -> list[str]:
    """The plan for the user, and the command that repeats it. chosen: the settings with the plan; decided: names of those that it
    sets."""
    T, batching = costs.text.rows.T, plan.batching
    budget = chosen.budget or f"{chosen.budget_flops or 0:g} FLOP"
    if chosen.budget_tokens is not None:
        budget = f"{quantity(chosen.budget_tokens)} tokens"
    passes_text = f"{plan.passes:.2g} of the text" if plan.passes < 1 else f"{plan.passes:.1f} passes over the text"
    micro_batches = f"{batching.batch_size} x {counted(batching.micro_batches, 'micro-batch', 'micro-batches')}"
    if (at_once := batching.ranks.batches_at_once) > 1:
        micro_batches += f" on each of {at_once} ranks"
    rates = f"{chosen.learning_rate:g} ({'AdamW' if chosen.optimizer == 'adamw' else chosen.optimizer})"
    if chosen.optimizer == "muon":
        embed_lr = chosen.embed_lr or chosen.learning_rate
        rates = (
            f"{chosen.muon_lr:g} (Muon, matrices of the blocks), {embed_lr:g} (AdamW, embeddings), "
            f"{chosen.learning_rate:g} (AdamW, the rest)"
        )
    error = loss_error(plan, costs, chosen)
    loss = "not known for such a run"
    if laws.is_repeated_too_often(plan.passes) and chosen.from_weight == "none" and not chosen.use_moe:
        loss = f"not known for more than {laws.MAX_PASSES} passes: a model memorises what it reads so often"
    if error is not None:
        bits_per_byte = plan.loss / math.log(2) / costs.text.corpus.bytes_per_target()
        loss = f"{Expectation(plan.tokens, plan.loss, error)}, {bits_per_byte:.3f} bits per byte"
    left = plan.other_seconds + plan.seconds
    total_seconds = seconds_since_start() + left
    rows = {
        "model": shape_text(plan),
        "tokens": f"{quantity(plan.tokens)}, {passes_text}",
        "update": f"{counted(batching.rows, 'row')} of {T} = {quantity(batching.rows * T)} tokens ({micro_batches})",
        "updates": f"{plan.updates:,}, about {plan.update_seconds:.2g} s each",
        "rates": rates,
        "expected validation loss": loss,
        "memory": f"about {plan.memory / 1e9:.1f} GB",
        "time": f"{duration_text(total_seconds)} in all, {duration_text(plan.seconds)} of it training",
    }
    if costs.seconds is None:
        rows["time"] += ", by estimate: only --budget times updates"
    else:
        if chosen.dry_run:
            is_timed = costs.speed_key(plan.config, costs.compiled) in costs.measured.numbers
            rows["time"] += f", by {'what was timed here' if is_timed else 'estimate: only the run itself times this'}"
        rows["ends at"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + left))
    width = max(map(len, rows))
    lines = [f"plan for {budget}:", *(f"  {name:{width}}  {text}" for name, text in rows.items())]

    used, limit = total_seconds, costs.seconds
    if limit is None:
        used, limit = plan.flops, chosen.budget_flops
    if limit is not None and used < USED_SHARE * limit:
        lines.append(
            f"the text is small for this budget: the run ends after {costs.max_passes} passes over it, "
            'since a model that reads it more often memorises it; more text would use the rest (docs/budget.md, "Little text")'
        )
    for part in costs.text.parts:
        passes = plan.tokens * part.share / max(part.unique, 1.0)
        if part.share < 1 and chosen.from_weight == "none" and laws.is_repeated_too_often(passes):
            lines.append(
                f"warning: {part.name} is read {passes:.0f} times, and a model memorises what it reads so "
                f"often: give it a share of at most {laws.MAX_PASSES * part.unique / plan.tokens:.1%} (now {part.share:.1%}), or add text"
            )
    if not costs.text.evaluated and not {"val_path", "val_fraction"} & costs.fixed:
        lines.append(
            f"no validation: nothing is held out of fewer than {MIN_DOCUMENTS} short documents, of copies of one, or if it would be "
            "over a tenth of the text; give --val_path or --val_fraction"
        )
    command = explicit_command(chosen, {*costs.fixed, *decided})
    return [*lines, "the same run by flags:", f"  {command}"]


def loss_error(plan: BudgetPlan, costs: RunCosts, chosen: PretrainSettings) -> float | None:
    """Relative error of the expected loss; None: no forecast."""
    if not laws.has_law(chosen, trains_answers=costs.text.corpus.target_filter is not None):
        return None
    return laws.loss_error(plan.parameters, plan.tokens, plan.tokens / plan.passes, costs.text.difficulty)


def explicit_command(settings: PretrainSettings, names: Collection[str]) -> str:
    """The command that trains the plan again in one process. names: of the settings that the user or the plan gives."""
    words = ["python", script_path(f"trainer/{settings.prog}")]
    for field in dataclasses.fields(settings):
        name = field.name
        value = getattr(settings, name)
        if name in NOT_REPEATED or value is None or name not in names:
            continue
        items = value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(as_text, items)]
    return shell_line(words)


def find_plan(settings: PretrainSettings, of_default_model: bool = False) -> tuple[Path, PretrainSettings] | None:
    """(file, settings) of the plan that a resume continues; None: there is none.

    The newest of the planned runs with this --save_weight, with a checkpoint and the model that the flags name. of_default_model:
    of the width of the settings, though no flag names it. Errors: UserError where all have other budgets.
    """
    prefix = Path(settings.out_dir) / settings.save_weight
    named = {*settings.user_set, "hidden_size", "use_moe"} if of_default_model else settings.user_set
    plans = []
    for folder in prefix.parent.glob(f"{glob.escape(prefix.name)}_*_resume"):
        stem = folder.with_name(folder.name.removesuffix("_resume"))
        if not re.fullmatch(r"_\d+(_moe)?", stem.name.removeprefix(prefix.name), re.ASCII):
            continue
        # Version 1.0 kept plans in a file of their own.
        for path in (file_of_resumed_run(stem, f"{stem.name}.{kind}.yaml") for kind in ("settings", "plan")):
            entries = read_plain(path, "--from_resume:") if path else None
            if path is None or not isinstance(entries, dict) or entries.keys().isdisjoint(BUDGETS):
                continue
            before = type(settings).parse(["--config", str(path)])
            if all(getattr(before, name) == getattr(settings, name) for name in named.intersection(MODEL_FLAGS)):
                plans.append((path, before))
    plans.sort(key=lambda plan: plan[0].stat().st_mtime, reverse=True)
    for path, before in plans:
        if before.planned_for == settings.budget_flag:
            return path, before
    if plans:
        path, before = plans[0]
        raise UserError(
            f"{path} is the plan of a run that was started with {before.planned_for}: give the same to continue it; start without "
            "--from_resume; or continue an unplanned run with its --hidden_size and --max_updates"
        )
    return None


def settings_to_resume(settings: PretrainSettings, ranks: Ranks) -> dict[str, Any] | None:
    """{name: value} of the settings that a resume takes from the plan of its run; None: there is none. Errors: see `find_plan`."""
    plan = find_plan(settings)
    if plan is None:
        return None
    path, before = plan
    announce(f"using the plan of the first start: {path}")
    planned = {name: getattr(before, name) for name in PLANNED - settings.user_set}
    if ranks.batches_at_once > 1 and not before.rows_per_update:
        # That of one process
        planned["rows_per_update"] = before.batch_size * before.accumulation_steps
    if "tokenizer_path" not in settings.user_set:
        # That beside the weights of the planned width
        planned["tokenizer_path"] = None
    return planned


def forgotten_budget(settings: PretrainSettings) -> dict[str, Any]:
    """{flag: value} of the budget that a run was planned for, for a resume by the flags of its plan; {}: none.

    Errors: UserError if the run would end elsewhere, or where a new run of the default width would start beside it.
    """
    # None: a folder of weights sets the width
    if settings.hidden_size is None:
        return {}
    own = settings.stem(settings.hidden_size, bool(settings.use_moe))
    is_of_this_width = "hidden_size" in settings.user_set or bool(Checkpoints(f"{own}_resume").paths())
    # The flags that a plan prints say where the run ends, and need no clock.
    if not (is_of_this_width and settings.length_flags):
        find_plan(settings, is_of_this_width)
    path = file_of_resumed_run(own, f"{own.name}.settings.yaml") if settings.max_updates else None
    entries = read_plain(path, "--from_resume:") if path else None
    return {name: entries[name] for name in BUDGETS if name in entries} if isinstance(entries, dict) else {}
