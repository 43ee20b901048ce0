"""The plan of a run that has a budget: which model, trained how, for how many updates.

A plan is found by trying all sizes of a list. For each one it is worked out how many tokens the budget buys, with the
batch that suits so many tokens, and what loss is then to be expected. Little text is read only so often, and by models that are no
larger than was measured for it; then the run ends before its budget does. Of each width those count whose number of layers
suits their tokens; of all these, the one with the lowest expected loss wins. Whatever the user has said by a flag is not tried, but kept.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from common.processes import seconds_since_start
from common.wording import counted
from model.config import MiniMindConfig, parameter_count
from trainer.budget import laws
from trainer.budget.costs import Cut, RunCosts
from trainer.pretrain.memory import MOST_ROWS_OF_MICRO_BATCH

# Rows of an update that are tried; even ones, so that two processes can share them.
ROWS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# Micro-batches of an update that are tried where the user has said how many rows one has
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# A run of fewer updates learns nothing that is worth a plan.
FEWEST_UPDATES = 20
# The number of tokens decides the batch, and the batch decides a little how many tokens the time buys. Of 2,048 plans that were
# tried 1,922 settled within two rounds, 124 within three and one within four. One swung between two neighbouring batches for
# ever, and either of them will do.
ROUNDS = 4


@dataclass(frozen=True)
class Plan:
    """A run that is worked out."""

    config: MiniMindConfig
    parameters: int
    cut: Cut
    updates: int
    tokens: float
    passes: float
    # seconds of all updates, and of everything else: compiling, evaluations, files
    seconds: float
    other_seconds: float
    flops: float
    memory: float
    # expected on validation text, in nats per token
    loss: float

    @property
    def update_seconds(self) -> float:
        return self.seconds / self.updates


def best_plan(sizes: Sequence[MiniMindConfig], costs: RunCosts) -> Plan:
    """The plan with the lowest expected loss, of those that are as deep as their tokens want.

    Errors: UserError that says what is too little.
    """
    plans = [plan for config in sizes if (plan := plan_for(config, costs)) is not None]
    if not plans:
        raise UserError(what_is_too_little(sizes, costs))
    # The law of the loss knows nothing of models that are larger for their text than was measured: they may learn little text by
    # heart. Nor does anything else limit a budget of tokens: by loss alone the largest model would win, and would train for weeks.
    most = laws.PARAMETERS_OF_A_TOKEN * costs.data.different
    if costs.tokens is not None:
        most = min(most, costs.tokens / laws.TOKENS_OF_A_PARAMETER)
    small_enough = [plan for plan in plans if plan.parameters <= most]
    suitable = [plan for plan in deep_as_their_tokens_want(plans) if plan.parameters <= most]
    # A width that the user has said may leave only models with fewer layers, or none.
    suitable = suitable or deep_as_their_tokens_want(small_enough) or [min(plans, key=lambda plan: plan.parameters)]
    return min(suitable, key=lambda plan: plan.loss)


def what_is_too_little(sizes: Sequence[MiniMindConfig], costs: RunCosts) -> str:
    """The line where no model can be trained."""
    data = costs.data
    rows = min((cut.rows for config in sizes for cut in cuts(config, costs)), default=None)
    if rows is None:
        return "no model can be trained, since the memory is too small: drop flags that fix the size or the batch, or give smaller ones"
    # A number of tokens is kept to, however often the text is read for it.
    if costs.tokens is None and data.most_passes * data.different < FEWEST_UPDATES * data.tokens_of_update(rows):
        # As full rows: a text of one row tells nothing of how full the rows of more text would be.
        needed = math.ceil(FEWEST_UPDATES * rows * data.T / data.most_passes)
        return (
            f"the text is too small: it has {round(data.different):,} tokens to train, and a plan needs about {needed:,} "
            f"({FEWEST_UPDATES} updates of {counted(rows, 'row')} of {data.T} in {data.most_passes} passes): give more text by "
            "--data_path, or train it without a budget, by --epochs"
        )
    passed = ""
    if costs.seconds_left is not None:
        passed = f" ({seconds_since_start():.0f} s had passed before the plan; the text is tokenised now, so try the same again)"
    return (
        f"no model can be trained with this budget, since the budget is too small{passed}: raise it, or drop flags that fix the size, "
        "the batch or how often is evaluated"
    )


def deep_as_their_tokens_want(plans: Sequence[Plan]) -> list[Plan]:
    """The plans of each width whose numbers of layers go with their tokens. Where none does, those that come nearest.

    More layers leave time for fewer tokens, and fewer tokens want fewer layers: so all numbers of layers are planned.
    """

    def off(plan: Plan) -> float:
        return laws.layers_off(plan.config.num_hidden_layers, plan.config.hidden_size, plan.tokens)

    least_of_width: dict[int, float] = {}
    for plan in plans:
        width = plan.config.hidden_size
        least_of_width[width] = min(off(plan), least_of_width.get(width, math.inf))
    return [plan for plan in plans if off(plan) == least_of_width[plan.config.hidden_size]]


def plan_for(config: MiniMindConfig, costs: RunCosts, cut: Cut | None = None) -> Plan | None:
    """The plan for one size; None where the budget buys too few updates, or the memory has no room for a row. cut: None: the one
    that suits best."""
    data = costs.data
    choices = cuts(config, costs) if cut is None else [cut]
    if not choices:
        return None
    cut = choices[0]
    for _ in range(ROUNDS):
        tokens = affordable_tokens(config, cut, costs)
        wanted_rows = laws.batch_tokens(max(tokens, 1)) / (data.T * data.fill)
        # The nearest one by ratio
        cut = min(choices, key=lambda choice: abs(math.log(choice.rows / wanted_rows)))
    tokens = affordable_tokens(config, cut, costs)
    updates = int(tokens / data.tokens_of_update(cut.rows))
    if updates < FEWEST_UPDATES:
        return None
    tokens = updates * data.tokens_of_update(cut.rows)
    parameters = parameter_count(config)
    layers = config.num_hidden_layers
    seconds = updates * costs.update_seconds(config, cut.rows)
    return Plan(
        config=config,
        parameters=parameters,
        cut=cut,
        updates=updates,
        tokens=tokens,
        passes=tokens / data.different,
        seconds=seconds,
        other_seconds=costs.other_seconds(config, cut, seconds),
        flops=tokens * costs.token_flops(config),
        memory=costs.memory(config, cut.batch_size),
        loss=laws.expected_loss(
            parameters,
            layers,
            tokens,
            data.parts,
            data.text_scale,
            muon=costs.optimizer == "muon",
            induction_heads=config.num_attention_heads if costs.init_scheme(config) == "induction" else 0,
        ),
    )


def cuts(config: MiniMindConfig, costs: RunCosts) -> list[Cut]:
    """The updates to choose from, as far as the user has left them open, in the largest micro-batches that fit the memory."""
    ranks, steps = costs.machine.ranks, costs.accumulation_steps
    sharing, at_once = ranks.sharing, ranks.micro_batches_at_once
    most = MOST_ROWS_OF_MICRO_BATCH[costs.machine.device.type]
    if costs.batch_size is not None:
        found = [Cut(costs.batch_size, n, at_once) for n in (STEPS if steps is None else (steps,))]
    elif steps is not None:
        found = [Cut(rows * sharing, steps, at_once) for rows in (1, *ROWS) if rows <= most]
    else:
        # rows of the whole update where the ranks can share such a number, and else of each rank
        of_ranks = [rows // ranks.world_size for rows in ROWS if rows % ranks.world_size == 0] or [1, *ROWS]
        found = [
            Cut(micro_rows * sharing, rows // micro_rows, at_once)
            for rows in of_ranks
            for micro_rows in range(min(rows, most), 0, -1)
            if rows % micro_rows == 0
        ]
    largest: dict[int, Cut] = {}
    for cut in found:
        if costs.machine.memory is None or costs.memory(config, cut.batch_size) <= costs.machine.memory:
            largest.setdefault(cut.rows, cut)
    return list(largest.values())


def affordable_tokens(config: MiniMindConfig, cut: Cut, costs: RunCosts) -> float:
    """What the budget buys with such updates, as far as it helps to read the text again."""
    if costs.tokens is not None:
        # Somebody has counted them.
        return costs.tokens
    most = costs.data.most_passes * costs.data.different
    if costs.flops is not None:
        return min(costs.flops / costs.token_flops(config), most)
    seconds = costs.seconds_left
    assert seconds is not None
    without_updates = costs.other_seconds(config, cut, 0.0)
    if seconds <= without_updates:
        return 0.0
    # What is no training grows with the updates, in which the evaluations come: it is taken to grow in proportion.
    growth = (costs.other_seconds(config, cut, seconds) - without_updates) / seconds
    updates = (seconds - without_updates) / (1 + growth) / costs.update_seconds(config, cut.rows)
    return min(updates * costs.data.tokens_of_update(cut.rows), most)


def sizes(fields: Mapping[str, Any]) -> list[MiniMindConfig]:
    """The models to try: widths, each with the numbers of layers that some number of tokens wants.

    fields: of their configs, what is not free; the vocabulary is among them. Errors: ValueError where no model has such fields.
    """
    found = []
    for width in [fields["hidden_size"]] if "hidden_size" in fields else laws.WIDTHS:
        heads = fields.get("num_attention_heads", laws.heads_for(width))
        # From what the shortest runs want to what the longest ones do, in steps of a tenth or less
        (fewest, _), (_, most) = laws.layers_for(width, 0), laws.layers_for(width, math.inf)
        numbers_of_layers: Sequence[int] = range(fewest, most + 1, max(1, fewest // 10))
        for layers in [fields["num_hidden_layers"]] if "num_hidden_layers" in fields else numbers_of_layers:
            shape = {
                "hidden_size": width,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": laws.kv_heads_for(heads),
            }
            try:
                found.append(MiniMindConfig(**{**shape, **fields}))
            except ValueError:
                # The fields do not go with this width, as heads that do not divide it.
                if "hidden_size" in fields:
                    raise
    if not found:
        raise ValueError("no model of the widths that are planned has such heads: give --hidden_size too")
    return found
