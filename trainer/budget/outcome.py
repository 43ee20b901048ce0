"""What a plan leads to: the settings of the run, and the lines that tell a person of it."""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from common.processes import seconds_since_start
from common.settings import default_of
from common.wording import counted
from trainer.budget import laws
from trainer.budget.costs import RunCosts
from trainer.budget.data import FEWEST_DOCUMENTS
from trainer.budget.kept_plan import PLANNED, explicit_command
from trainer.budget.plan import Plan
from trainer.pretrain.settings import PretrainSettings

# A text_scale so near to 1 is that of the text which was measured.
LIKE_THE_MEASURED_TEXT = 0.05
# Log lines of a run, and the fewest seconds between two
LOG_LINES = 200
SECONDS_OF_LOG_LINE = 3.0
DAY_S = 24 * 3600
# Settings that the law of the loss was not measured with other values of: all that decide how a run learns, but for its size.
MEASURED_AS_PLANNED = {"generation", "grad_clip", "long_documents", "pack", *PLANNED} - {
    "hidden_size",
    "optimizer",
    "max_updates",
    "val_fraction",
    "eval_interval",
    "log_interval",
    "save_interval",
    "dtype",
    "use_compile",
}
# A plan that uses less of its budget leaves something over.
USED = 0.9
# Saves of a run; where so few would be further apart than the seconds below, there are more.
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
    budget = chosen.budget or f"{chosen.budget_flops or 0:g} FLOP"
    if chosen.budget_tokens is not None:
        budget = f"{quantity(chosen.budget_tokens)} tokens"
    return [
        f"plan for {budget}:",
        *table,
        *notes(plan, costs, given, total_seconds),
        "the same by flags:",
        f"  {explicit_command(chosen, {*given, *decided}, costs.machine.ranks.micro_batches_at_once)}",
    ]


def notes(plan: Plan, costs: RunCosts, given: Collection[str], total_seconds: float) -> list[str]:
    """What the table does not say. given: names of the settings that the user has said; total_seconds: of the whole command."""
    found = []
    used, budget = total_seconds, costs.seconds
    if budget is None:
        used, budget = plan.flops, costs.settings.budget_flops
    if budget is not None and used < USED * budget:
        found.append(
            f"the text is small for this budget: the run ends after {laws.most_passes(costs.settings.from_weight)} passes over it, "
            "since a model that reads it more often learns it by heart; more text would use the rest"
        )
    if costs.settings.from_weight == "none":
        found += sources_read_too_often(costs.data.parts, plan.tokens)
    if not costs.data.evaluated and not {"val_path", "val_fraction"} & set(given):
        found.append(
            f"without validation: of fewer than {FEWEST_DOCUMENTS} documents, or of copies of one, none is held out; name a file of "
            "its own with --val_path, or a share with --val_fraction"
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


def loss_error(plan: Plan, costs: RunCosts, chosen: PretrainSettings, given: Collection[str]) -> float | None:
    """The relative range of the expected loss; None: nothing is known of it. given: names of the settings that the user has said."""
    if chosen.from_weight != "none" or chosen.use_moe:
        return None
    is_such_text = abs(costs.data.text_scale - 1) < LIKE_THE_MEASURED_TEXT
    is_such_vocabulary = costs.data.vocab_size == laws.MEASURED_VOCABULARY
    # There is one run of a model with more than two layers and a single head in each.
    is_such_shape = plan.config.num_hidden_layers == 2 or plan.config.num_attention_heads > 1
    is_as_planned = chosen.optimizer == "muon" and not MEASURED_AS_PLANNED & set(given)
    was_measured = is_such_text and is_such_vocabulary and is_such_shape and is_as_planned
    if was_measured and not beyond_measurement(plan):
        return laws.LOSS_ERROR
    is_small = min(plan.parameters, plan.tokens) < laws.SMALL
    return laws.LOSS_ERROR_OF_SMALL if is_small else laws.LOSS_ERROR_ELSEWHERE


# ------------------------------------------------------------------------------------------------ the table


def quantity(value: float) -> str:
    """Three digits and K, M, G or T, as in 7.28 M."""
    # Rounded first: 999,936 is 1 M.
    rounded = float(f"{value:.3g}")
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if rounded >= size:
            return f"{rounded / size:.3g} {unit}"
    return f"{rounded:.3g}"


def clock(seconds: float) -> str:
    """As 1 h 05 min, 12 min 30 s or 45 s."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {left:02d} s"
    return f"{left} s"


def shape_text(plan: Plan) -> str:
    """As 1.57 M parameters, 4 layers of width 128."""
    config = plan.config
    layers = counted(config.num_hidden_layers, "layer")
    return f"{quantity(plan.parameters)} parameters, {layers} of width {config.hidden_size}"


def plan_table(
    plan: Plan,
    others: Mapping[str, Plan | None],
    rates: str,
    *,
    error: float | None,
    bytes_per_token: float,
    total_seconds: float,
    until: float | None,
    T: int,
) -> list[str]:
    """The lines of the table.

    others: {"half of it": its plan}, None: it cannot be planned. rates: the learning rates as text. error: relative
    range of the loss, None: nothing is known of it. total_seconds: of the whole command; until: when it ends, in seconds
    since 1970, None: no clock ends it.
    """
    passes = f"{plan.passes:.2g} of the text" if plan.passes < 1 else f"{plan.passes:.1f} passes over the text"
    loss = "not known for such a run"
    if error is not None and laws.is_repeated_too_often(plan.passes):
        loss = f"not known for {plan.passes:.0f} passes over one text: up to {laws.MOST_PASSES} were measured"
    elif error is not None:
        bits_per_byte = plan.loss / math.log(2) / bytes_per_token
        loss = f"{plan.loss:.3f} ({plan.loss * (1 - error):.2f} to {plan.loss * (1 + error):.2f}), {bits_per_byte:.3f} bits per byte"
    cut = plan.cut
    micro_batches = f"{cut.batch_size} x {counted(cut.accumulation_steps, 'micro-batch', 'micro-batches')}"
    if cut.at_once > 1:
        micro_batches += f" on each of {cut.at_once} ranks"
    rows = [
        ("model", shape_text(plan)),
        ("tokens", f"{quantity(plan.tokens)}, {passes}"),
        ("update", f"{counted(plan.rows, 'row')} of {T} = {quantity(plan.rows * T)} tokens ({micro_batches})"),
        ("updates", f"{plan.updates:,}, about {plan.update_seconds:.2g} s each"),
        ("rates", rates),
        ("expected validation loss", loss),
        ("memory", f"about {plan.memory / 1e9:.1f} GB"),
        ("time", f"{clock(total_seconds)} in all, {clock(plan.seconds)} of it training"),
    ]
    if until is not None:
        pattern = "%H:%M:%S" if total_seconds < DAY_S else "%Y-%m-%d %H:%M:%S"
        rows.append(("ends at", time.strftime(pattern, time.localtime(until))))
    for name, other in others.items():
        if other is not None:
            is_known = error is not None and not laws.is_repeated_too_often(other.passes)
            told = f": loss {other.loss:.3f}" if is_known else ""
            rows.append((f"{name} would give", f"{shape_text(other)}, {quantity(other.tokens)} tokens{told}"))
    if error is not None and beyond_measurement(plan) and not laws.is_repeated_too_often(plan.passes):
        rows.append(
            ("note", "such a size or length was not measured: the expected loss is a guess by the same formula")
        )
    width = max(len(name) for name, _ in rows)
    return [f"  {name:{width}}  {text}" for name, text in rows]


def beyond_measurement(plan: Plan) -> bool:
    """Whether the law of the loss was not measured for such a size, or not for so many tokens."""
    smallest, largest = laws.MEASURED_PARAMETERS
    fewest, most = laws.MEASURED_TOKENS
    return not (smallest <= plan.parameters <= largest and fewest <= plan.tokens <= most)
