"""The plan of a run that has a budget: which model, trained how, for how many updates.

A plan is found by trying all sizes of a list. For each one it is worked out how many tokens the budget buys, with the
batch that suits so many tokens, and what loss is then to be expected. Little text is read only so often, and by models that are no
larger than was measured for it; then the run ends before its budget does. Of each width those count whose number of layers
suits their tokens; of all these, the one with the lowest expected loss wins. Whatever the user has said by a flag is not tried, but kept.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from model.config import MiniMindConfig, parameter_count
from trainer.budget import laws
from trainer.machine.ranks import ONE_RANK, Ranks

# Rows of an update that are tried; even ones, so that two processes can share them.
ROWS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# Micro-batches of an update that are tried where the user has said how many rows one has
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Rows that one rank computes at once. More of them make the products of a CPU no faster, and take memory. A GPU has then as
# much to do as it takes the host to launch the next operations; fewer are taken where they do not fit.
MOST_ROWS_OF_MICRO_BATCH = {"cpu": 16, "mps": 16, "cuda": 256}
# A run of fewer updates learns nothing that is worth a plan.
FEWEST_UPDATES = 20
# The number of tokens decides the batch, and the batch decides a little how many tokens the time buys. Of 2,048 plans that were
# tried 1,922 settled within two rounds, 124 within three and one within four. One swung between two neighbouring batches for
# ever, and either of them will do.
ROUNDS = 4


class NothingFits(ValueError):
    """No model can be trained: what there is too little of, "budget", "memory" or "text"."""


@dataclass(frozen=True)
class Demands:
    """What the planner must keep to. None: free.

    seconds: that are left. tokens, flops: instead of seconds. tokens_of_pass, parts: see Data. T: positions of
    a row; fill: share of them that hold a token.
    """

    tokens_of_pass: float
    parts: tuple[laws.Part, ...]
    T: int
    fill: float
    device_type: str
    ranks: Ranks = ONE_RANK
    seconds: float | None = None
    tokens: float | None = None
    flops: float | None = None
    batch_size: int | None = None
    accumulation_steps: int | None = None
    memory: float | None = None
    text_scale: float = 1.0
    muon: bool = True
    most_passes: float = laws.MOST_PASSES

    @property
    def different(self) -> float:
        """Tokens of different text."""
        return laws.different_tokens(self.parts)

    @property
    def most_tokens(self) -> float:
        """What a run may train without reading the text more often than helps."""
        return self.most_passes * self.different

    def allows(self, memory: float) -> bool:
        """Whether a plan may take so many bytes."""
        return self.memory is None or memory <= self.memory

    def tokens_of_update(self, rows: int) -> float:
        """What an update of so many rows trains in the mean: the last one of each pass over the text has fewer."""
        rows_of_pass = self.tokens_of_pass / (self.T * self.fill)
        # Both factors were rounded, and a whole number must stay one.
        updates_of_pass = max(1, math.ceil(rows_of_pass / rows - 1e-6))
        return self.tokens_of_pass / updates_of_pass


class Cut(NamedTuple):
    """How an update is cut into micro-batches. batch_size: rows of a micro-batch, whichever ranks share it."""

    batch_size: int
    accumulation_steps: int
    at_once: int

    @property
    def rows(self) -> int:
        """Rows of the update."""
        return self.batch_size * self.accumulation_steps * self.at_once


class Costs(Protocol):
    """What a run of a model takes: costs.py measures it, and a test may simulate it."""

    def update_seconds(self, config: MiniMindConfig, rows: int) -> float: ...

    def other_seconds(self, config: MiniMindConfig, cut: Cut, training_seconds: float) -> float: ...

    def memory(self, config: MiniMindConfig, batch_size: int) -> float: ...

    def token_flops(self, config: MiniMindConfig) -> float: ...


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

    @property
    def rows(self) -> int:
        """Rows of an update."""
        return self.cut.rows


def best_plan(sizes: Sequence[MiniMindConfig], demands: Demands, costs: Costs) -> Plan:
    """The plan with the lowest expected loss, of those that are as deep as their tokens want.

    Errors: NothingFits, which says what is too little.
    """
    plans = []
    is_too_large = False
    for config in sizes:
        plan = plan_for(config, demands, costs)
        if plan is None:
            continue
        if not demands.allows(plan.memory):
            plan = with_smaller_micro_batches(plan, demands, costs)
        if plan is None:
            is_too_large = True
        else:
            plans.append(plan)
    if not plans:
        # A number of tokens is kept to, however often the text is read for it.
        most = math.inf if demands.tokens is not None else demands.most_tokens
        fewest = FEWEST_UPDATES * demands.tokens_of_update(min(cut.rows for cut in cuts(demands)))
        raise NothingFits("memory" if is_too_large else "text" if most < fewest else "budget")
    # The law of the loss knows nothing of models that are larger for their text than was measured: they may learn little text by
    # heart. Where all are larger, since the user has said a width, it is the smallest one.
    suitable = deep_as_their_tokens_want(plans)
    suitable = no_larger(suitable, laws.PARAMETERS_OF_A_TOKEN * demands.different) or smallest(suitable)
    if demands.tokens is not None:
        # Models that so many tokens train well. Nothing else limits a budget of tokens: by loss alone the largest model would win,
        # and would train for weeks. A width that the user has said may leave only models with fewer layers, or none.
        most = demands.tokens / laws.TOKENS_OF_A_PARAMETER
        suitable = no_larger(suitable, most) or deep_as_their_tokens_want(no_larger(plans, most)) or smallest(plans)
    return min(suitable, key=lambda plan: plan.loss)


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


def no_larger(plans: Sequence[Plan], parameters: float) -> list[Plan]:
    return [plan for plan in plans if plan.parameters <= parameters]


def smallest(plans: Sequence[Plan]) -> list[Plan]:
    return [min(plans, key=lambda plan: plan.parameters)]


def plan_for(config: MiniMindConfig, demands: Demands, costs: Costs, cut: Cut | None = None) -> Plan | None:
    """The plan for one size; None where the budget buys too few updates. cut: None: the one that suits best."""
    tokens_of_row = demands.T * demands.fill
    choices = cuts(demands) if cut is None else [cut]
    cut = choices[0]
    for _ in range(ROUNDS):
        tokens = affordable_tokens(config, cut, demands, costs)
        cut = closest_cut(laws.batch_tokens(max(tokens, 1)) / tokens_of_row, choices)
    tokens = affordable_tokens(config, cut, demands, costs)
    updates = int(tokens / demands.tokens_of_update(cut.rows))
    if updates < FEWEST_UPDATES:
        return None
    tokens = updates * demands.tokens_of_update(cut.rows)
    parameters = parameter_count(config)
    scale = demands.text_scale * laws.row_scale(demands.T)
    seconds = updates * costs.update_seconds(config, cut.rows)
    return Plan(
        config=config,
        parameters=parameters,
        cut=cut,
        updates=updates,
        tokens=tokens,
        passes=tokens / demands.different,
        seconds=seconds,
        other_seconds=costs.other_seconds(config, cut, seconds),
        flops=tokens * costs.token_flops(config),
        memory=costs.memory(config, cut.batch_size),
        loss=laws.expected_loss(
            parameters,
            laws.Depth(config.num_hidden_layers, config.num_attention_heads),
            tokens,
            demands.parts,
            scale,
            demands.muon,
        ),
    )


def with_smaller_micro_batches(plan: Plan, demands: Demands, costs: Costs) -> Plan | None:
    """The plan in micro-batches that fit the memory, as large ones as do; None: not even single rows fit, or the user has said
    how large they are. The updates stay as they are, unless the user has said how many micro-batches they have."""
    if demands.batch_size is not None:
        return None
    if demands.accumulation_steps is not None:
        smaller = [cut for cut in cuts(demands) if cut.batch_size < plan.cut.batch_size]
    else:
        of_rank = plan.cut.batch_size // demands.ranks.sharing
        all_rows = of_rank * plan.cut.accumulation_steps
        divisors = [rows for rows in range(1, of_rank) if all_rows % rows == 0]
        smaller = [Cut(rows * demands.ranks.sharing, all_rows // rows, plan.cut.at_once) for rows in divisors]
    for cut in sorted(smaller, key=lambda cut: cut.batch_size, reverse=True):
        if demands.allows(costs.memory(plan.config, cut.batch_size)):
            # Planned again: --eval_interval counts micro-batches.
            return plan_for(plan.config, demands, costs, cut)
    return None


def cuts(demands: Demands) -> list[Cut]:
    """The updates to choose from, as far as the user has left them open."""
    sharing, at_once = demands.ranks.sharing, demands.ranks.micro_batches_at_once
    if demands.batch_size is not None:
        steps = STEPS if demands.accumulation_steps is None else (demands.accumulation_steps,)
        return [Cut(demands.batch_size, n, at_once) for n in steps]
    if demands.accumulation_steps is not None:
        most = MOST_ROWS_OF_MICRO_BATCH[demands.device_type]
        return [Cut(rows * sharing, demands.accumulation_steps, at_once) for rows in (1, *ROWS) if rows <= most]
    return free_cuts(demands.ranks, demands.device_type)


def free_cuts(ranks: Ranks, device_type: str) -> list[Cut]:
    """The updates to choose from where the user has said nothing of them."""
    most = MOST_ROWS_OF_MICRO_BATCH[device_type]
    found = []
    # rows of the whole update where the ranks can share such a number, and else of each rank.
    of_ranks = [rows // ranks.world_size for rows in ROWS if rows % ranks.world_size == 0] or [1, *ROWS]
    for rows in of_ranks:
        micro_rows = max(divisor for divisor in range(1, min(rows, most) + 1) if rows % divisor == 0)
        found.append(Cut(micro_rows * ranks.sharing, rows // micro_rows, ranks.micro_batches_at_once))
    return found


def affordable_tokens(config: MiniMindConfig, cut: Cut, demands: Demands, costs: Costs) -> float:
    """What the budget buys with such updates, as far as it helps to read the text again."""
    if demands.tokens is not None:
        # Somebody has counted them.
        return demands.tokens
    most = demands.most_tokens
    if demands.flops is not None:
        return min(demands.flops / costs.token_flops(config), most)
    seconds = demands.seconds
    assert seconds is not None
    without_updates = costs.other_seconds(config, cut, 0.0)
    if seconds <= without_updates:
        return 0.0
    # What is no training grows with the updates, in which the evaluations come: it is taken to grow in proportion.
    growth = (costs.other_seconds(config, cut, seconds) - without_updates) / seconds
    updates = (seconds - without_updates) / (1 + growth) / costs.update_seconds(config, cut.rows)
    return min(updates * demands.tokens_of_update(cut.rows), most)


def closest_cut(rows: float, choices: Sequence[Cut]) -> Cut:
    """The one whose update is nearest to so many rows, by ratio."""
    return min(choices, key=lambda cut: abs(math.log(cut.rows / max(rows, 1e-9))))


def sizes(fields: Mapping[str, Any]) -> list[MiniMindConfig]:
    """The models to try: widths, each with the numbers of layers that some number of tokens wants.

    fields: of their configs, what is not free; the vocabulary is among them. Errors: ValueError where no model has such fields.
    """
    found = []
    for width in [fields["hidden_size"]] if "hidden_size" in fields else laws.WIDTHS:
        heads = fields.get("num_attention_heads", laws.heads_for(width))
        # From what the shortest runs want to what the longest ones do, in steps of a tenth or more
        (fewest, _), (_, most) = laws.layers_for(width, 0), laws.layers_for(width, math.inf)
        numbers_of_layers = [fewest]
        while numbers_of_layers[-1] < most:
            last = numbers_of_layers[-1]
            numbers_of_layers.append(min(max(last + 1, round(1.1 * last)), most))
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
