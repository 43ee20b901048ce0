"""A plan as a person reads it."""

import math
import time
from collections.abc import Mapping

from common.wording import counted
from trainer.budget import laws
from trainer.budget.plan import Plan

DAY_S = 24 * 3600


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


def loss_text(plan: Plan, error: float | None, bytes_per_token: float) -> str:
    """The expected loss with its range, in nats per token and in bits per byte. error: see plan_table."""
    if error is None:
        return "not known for such a run"
    if laws.is_repeated_too_often(plan.passes):
        return f"not known for {plan.passes:.0f} passes over one text: up to {laws.MOST_PASSES} were measured"
    low = plan.loss * (1 - error)
    high = plan.loss * (1 + error)
    return f"{plan.loss:.3f} ({low:.2f} to {high:.2f}), {bits_per_byte(plan.loss, bytes_per_token):.3f} bits per byte"


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Of a loss in nats per token."""
    return loss / math.log(2) / bytes_per_token


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
        ("expected validation loss", loss_text(plan, error, bytes_per_token)),
        ("memory", f"about {plan.memory / 1e9:.1f} GB"),
        ("time", f"{clock(total_seconds)} in all, {clock(plan.seconds)} of it training"),
    ]
    if until is not None:
        pattern = "%H:%M:%S" if total_seconds < DAY_S else "%Y-%m-%d %H:%M:%S"
        rows.append(("ends at", time.strftime(pattern, time.localtime(until))))
    for name, other in others.items():
        if other is not None:
            is_known = error is not None and not laws.is_repeated_too_often(other.passes)
            loss = f": loss {other.loss:.3f}" if is_known else ""
            rows.append((f"{name} would give", f"{shape_text(other)}, {quantity(other.tokens)} tokens{loss}"))
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
