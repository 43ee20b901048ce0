"""What a plan leads to: the settings of the run, and the lines that tell a person of it."""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from common.command_clock import seconds_since_start
from common.settings import default_of
from trainer.budget import laws
from trainer.budget.command import explicit_command
from trainer.budget.costs import RunCosts
from trainer.budget.data import FEWEST_DOCUMENTS
from trainer.budget.kept_plan import PLANNED
from trainer.budget.plan import Plan
from trainer.budget.table import beyond_measurement, plan_table, quantity
from trainer.pretrain.settings import PretrainSettings

# A text_scale so near to 1 is that of the text which was measured.
LIKE_THE_MEASURED_TEXT = 0.05
# Log lines of a run, and the fewest seconds between two
LOG_LINES = 200
SECONDS_OF_LOG_LINE = 3.0
# What a plan says where the user says nothing. The law was fitted to such runs.
MEASURED_AS_PLANNED = frozenset(
    {
        "accumulation_steps",
        "batch_size",
        "decay_share",
        "embed_lr",
        "generation",
        "grad_clip",
        "init_scheme",
        "learning_rate",
        "long_documents",
        "lr_schedule",
        "max_seq_len",
        "muon_lr",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "pack",
        "warmup_iters",
        "weight_decay",
    }
)
# Of a budget: a plan that uses less of it leaves something over.
USED = 0.9
# Of a run; where so few would be further apart than the seconds below, there are more.
SAVES = 10
MOST_SECONDS_BETWEEN_SAVES = 600.0


def chosen_settings(plan: Plan, costs: RunCosts, given: Collection[str]) -> dict[str, Any]:
    """What the plan says of the settings that the user has left open. given: names of the others."""
    config = plan.config
    steps = plan.cut.accumulation_steps
    micro_batches = plan.updates * steps
    updates_between_saves = min(plan.updates / SAVES, MOST_SECONDS_BETWEEN_SAVES / plan.update_seconds)
    chosen: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "init_scheme": "zero_out",
        "optimizer": costs.optimizer,
        "learning_rate": laws.SIDE_RATE,
        "weight_decay": laws.WEIGHT_DECAY,
        "lr_schedule": "wsd",
        "decay_share": laws.DECAY_SHARE,
        "warmup_iters": min(laws.WARMUP_UPDATES, plan.updates // 10) * steps,
        "batch_size": plan.cut.batch_size,
        "accumulation_steps": steps,
        "max_seq_len": costs.settings.max_seq_len,
        "max_updates": plan.updates,
        "val_fraction": costs.data.val_fraction,
        "log_interval": max(
            1, micro_batches // LOG_LINES, math.ceil(SECONDS_OF_LOG_LINE / plan.update_seconds * steps)
        ),
    }
    # Only what the planner has changed: a default need not be named.
    if costs.settings.dtype != default_of(PretrainSettings, "dtype"):
        chosen["dtype"] = costs.settings.dtype
    if costs.machine.device.type != "cuda":
        # A run on CUDA saves by minutes, see trainer/due.py.
        chosen["save_interval"] = max(1, int(updates_between_saves * steps))
    if costs.data.evaluated:
        evaluations = costs.evaluations(config, plan.cut, plan.seconds)
        chosen["eval_interval"] = math.ceil(micro_batches / (evaluations + 1)) if evaluations else 0
    if costs.seconds is not None:
        # Without a clock the run decides, which compiles where that pays.
        chosen["use_compile"] = "1" if costs.compiled else "0"
    if costs.optimizer == "muon":
        chosen["muon_lr"] = laws.MUON_RATE
        # Who names a rate means it for all that AdamW trains.
        if "learning_rate" not in given:
            chosen["embed_lr"] = laws.EMBED_RATE
        different = plan.tokens / plan.passes
        decay = laws.muon_weight_decay(plan.passes, plan.updates, plan.parameters / different)
        chosen["weight_decay"] = float(f"{decay:.2g}")
    else:
        chosen["learning_rate"] = float(f"{laws.adamw_rate(plan.parameters, plan.tokens):.2g}")
    assert set(chosen) <= set(PLANNED), "a resume reads no other settings from the plan that was kept"
    return {name: value for name, value in chosen.items() if name not in given}


def plan_lines(
    plan: Plan,
    others: Mapping[str, Plan | None],
    costs: RunCosts,
    chosen: PretrainSettings,
    given: Collection[str],
    decided: Collection[str],
) -> list[str]:
    """The plan for a person, and the command that repeats it.

    others: {"half of it": the plan for that}. chosen: the settings with the plan. given: names of those that the user has said;
    decided: of those that the plan has said.
    """
    rates = f"{chosen.learning_rate:g} (AdamW)"
    if chosen.optimizer == "muon":
        of_embeddings = chosen.embed_lr or chosen.learning_rate
        rates = (
            f"{chosen.muon_lr:g} (Muon, matrices of the blocks), {of_embeddings:g} (AdamW, embeddings), "
            f"{chosen.learning_rate:g} (AdamW, the rest)"
        )
    left = plan.other_seconds + plan.seconds
    total_seconds = seconds_since_start() + left
    table = plan_table(
        plan,
        others,
        rates,
        error=loss_error(plan, costs, chosen, given),
        bytes_per_token=costs.data.bytes_per_token,
        total_seconds=total_seconds,
        # Nothing ends a run on time whose budget is no time.
        until=time.time() + left if costs.seconds is not None else None,
        T=costs.data.T,
    )
    return [
        f"plan for {budget_text(chosen)}:",
        *table,
        *notes(plan, costs, given, total_seconds),
        "the same by flags:",
        f"  {explicit_command(chosen, {*given, *decided}, costs.machine.ranks.micro_batches_at_once)}",
    ]


def budget_text(settings: PretrainSettings) -> str:
    """The budget as 10m, 20 M tokens or 1e+15 FLOP."""
    if settings.budget is not None:
        return settings.budget
    if settings.budget_tokens is not None:
        return f"{quantity(settings.budget_tokens)} tokens"
    return f"{settings.budget_flops:g} FLOP"


def notes(plan: Plan, costs: RunCosts, given: Collection[str], total_seconds: float) -> list[str]:
    """What the table does not say. given: names of the settings that the user has said; total_seconds: of the whole command."""
    found = []
    most_passes = laws.most_passes(costs.settings.from_weight)
    if leaves_budget_over(plan, costs, total_seconds):
        found.append(
            f"the text is small for this budget: the run ends after {most_passes} passes over it, since a model that reads it more "
            "often learns it by heart; more text would use the rest"
        )
    if costs.settings.from_weight == "none":
        found += sources_read_too_often(costs.data.parts, plan.tokens)
    if costs.data.evaluated or {"val_path", "val_fraction"} & set(given):
        return found
    found.append(
        f"without validation: of fewer than {FEWEST_DOCUMENTS} documents, or of copies of one, none is held out; name a file of its "
        "own with --val_path, or a share with --val_fraction"
    )
    return found


def sources_read_too_often(parts: Sequence[laws.Part], tokens: float) -> list[str]:
    """A line for each source of a mixture that is read more often than helps, with what to do."""
    lines = []
    for part in parts:
        others = [other for other in parts if other is not part]
        passes = part.passes(tokens)
        if not others or not laws.is_repeated_too_often(passes):
            continue
        text_of_others = max(laws.different_tokens(others), 1.0)
        passes_of_others = sum(other.share for other in others) * tokens / text_of_others
        share = laws.MOST_PASSES * part.unique / tokens
        advice = (
            f"give it at most {share:.1%} of all shares (now {part.share:.1%}; path:share of --data_path, or the --mixture file), or add "
            "more text of its kind"
        )
        if laws.is_repeated_too_often((1 - share) * tokens / text_of_others):
            # What it would read less, the others would have to read too often.
            advice = "give a smaller budget, or add more text"
        lines.append(
            f"warning: {part.name} is read {passes:.0f} times, and the other text {passes_of_others:.2g} times: a model learns by heart what "
            f"it reads so often; {advice}"
        )
    return lines


def leaves_budget_over(plan: Plan, costs: RunCosts, total_seconds: float) -> bool:
    """Whether the text is read as often as helps before the budget is spent."""
    if costs.seconds is not None:
        return total_seconds < USED * costs.seconds
    flops = costs.settings.budget_flops
    return flops is not None and plan.flops < USED * flops


def loss_error(plan: Plan, costs: RunCosts, chosen: PretrainSettings, given: Collection[str]) -> float | None:
    """The relative range of the expected loss; None: nothing is known of it. given: names of the settings that the user has said."""
    if chosen.from_weight != "none" or chosen.use_moe:
        return None
    is_such_text = abs(costs.data.text_scale - 1) < LIKE_THE_MEASURED_TEXT
    is_such_vocabulary = costs.data.vocab_size == laws.MEASURED_VOCABULARY
    # Of models with more than two layers and a single head in each there is one run.
    is_such_shape = plan.config.num_hidden_layers == 2 or plan.config.num_attention_heads > 1
    is_as_planned = chosen.optimizer == "muon" and not MEASURED_AS_PLANNED & set(given)
    was_measured = is_such_text and is_such_vocabulary and is_such_shape and is_as_planned
    if was_measured and not beyond_measurement(plan):
        return laws.LOSS_ERROR
    is_small = min(plan.parameters, plan.tokens) < laws.SMALL
    return laws.LOSS_ERROR_OF_SMALL if is_small else laws.LOSS_ERROR_ELSEWHERE
