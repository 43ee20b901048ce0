"""The plan of a run that has a budget: which model, trained how, for how many updates.

A plan is found by trying all sizes of a list. For each one it is worked out how many tokens the budget buys, with the
batch that suits so many tokens, and what loss is then to be expected. The size with the lowest expected loss wins.
Whatever the user has said by a flag is not tried, but kept.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from model.config import MiniMindConfig, parameter_count
from trainer.budget import laws

# Rows of an update that are tried; even ones, so that two processes can share them.
ROWS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# Rows of a micro-batch. More of them make the products of a CPU no faster, and take memory.
MOST_ROWS_OF_MICRO_BATCH = {"cpu": 16, "mps": 16, "cuda": 64}
# A run of fewer updates learns nothing that is worth a plan.
FEWEST_UPDATES = 20
# The batch depends on the number of tokens, which depends on the batch. They settle at once.
ROUNDS = 4


class NothingFits(ValueError):
    """No model can be trained within the budget, or within memory."""


@dataclass(frozen=True)
class Demands:
    """What the planner must keep to. None: free.

    seconds: that are left. tokens, flops: instead of seconds. unique: tokens of different text. T: positions of
    a row; fill: share of them that hold a token. world_size, sharing: see Ranks.
    """

    unique: float
    T: int
    fill: float
    device_type: str
    world_size: int = 1
    sharing: int = 1
    seconds: float | None = None
    tokens: float | None = None
    flops: float | None = None
    width: int | None = None
    layers: int | None = None
    rows: int | None = None
    memory: float | None = None
    text_scale: float = 1.0


class Costs(Protocol):
    """What a run of a model takes."""

    def update_seconds(self, config: MiniMindConfig, rows: int) -> float:
        """Of an update of so many rows."""

    def other_seconds(self, config: MiniMindConfig, rows: int) -> float:
        """Of what is no training: compiling, evaluations, files."""

    def memory(self, config: MiniMindConfig, micro_rows: int) -> float:
        """Bytes at the peak, with so many rows of a micro-batch on each rank."""

    def token_flops(self, config: MiniMindConfig) -> float:
        """Floating-point operations for each token."""


@dataclass(frozen=True)
class Plan:
    """A run that is worked out.

    rows: of an update; micro_rows: of a rank's micro-batch. loss: expected in nats per token, on validation text.
    """

    config: MiniMindConfig
    parameters: int
    rows: int
    micro_rows: int
    world_size: int
    sharing: int
    updates: int
    tokens: float
    passes: float
    # Of the updates, and of everything else.
    seconds: float
    other_seconds: float
    flops: float
    memory: float
    loss: float

    @property
    def update_seconds(self) -> float:
        return self.seconds / self.updates

    @property
    def batch_size(self) -> int:
        """As the flag counts: of a micro-batch, whichever ranks share it."""
        return self.micro_rows * self.sharing

    @property
    def accumulation_steps(self) -> int:
        return self.rows // (self.micro_rows * self.world_size)


def best_plan(sizes: Sequence[MiniMindConfig], demands: Demands, costs: Costs) -> Plan:
    """The plan with the lowest expected loss. Errors: NothingFits, which says what is too little."""
    plans = []
    too_large = 0
    too_short = 0
    for config in sizes:
        plan = plan_for(config, demands, costs)
        if plan is None:
            too_short += 1
        elif demands.memory is not None and plan.memory > demands.memory:
            too_large += 1
        else:
            plans.append(plan)
    if not plans and too_large:
        raise NothingFits("memory")
    if not plans:
        raise NothingFits("time")
    return min(plans, key=lambda plan: plan.loss)


def plan_for(config: MiniMindConfig, demands: Demands, costs: Costs) -> Plan | None:
    """The plan for one size; None where the budget buys too few updates."""
    tokens_of_row = demands.T * demands.fill
    rows = demands.rows or ROWS[0] * demands.world_size
    tokens = 0.0
    for _ in range(ROUNDS):
        tokens = affordable_tokens(config, rows, demands, costs)
        if demands.rows is None:
            rows = closest_rows(laws.batch_tokens(max(tokens, 1)) / tokens_of_row, demands.world_size)
    tokens = affordable_tokens(config, rows, demands, costs)
    updates = int(tokens / (rows * tokens_of_row))
    if updates < FEWEST_UPDATES:
        return None
    tokens = updates * rows * tokens_of_row
    most = MOST_ROWS_OF_MICRO_BATCH[demands.device_type]
    micro_rows = micro_batch_rows(rows // demands.world_size, most)
    parameters = parameter_count(config)
    return Plan(
        config=config,
        parameters=parameters,
        rows=rows,
        micro_rows=micro_rows,
        world_size=demands.world_size,
        sharing=demands.sharing,
        updates=updates,
        tokens=tokens,
        passes=tokens / demands.unique,
        seconds=updates * costs.update_seconds(config, rows),
        other_seconds=costs.other_seconds(config, rows),
        flops=tokens * costs.token_flops(config),
        memory=costs.memory(config, micro_rows),
        loss=laws.expected_loss(parameters, tokens, demands.unique, demands.text_scale),
    )


def affordable_tokens(config: MiniMindConfig, rows: int, demands: Demands, costs: Costs) -> float:
    """What the budget buys with updates of so many rows."""
    tokens_of_update = rows * demands.T * demands.fill
    if demands.tokens is not None:
        return demands.tokens
    if demands.flops is not None:
        return demands.flops / costs.token_flops(config)
    assert demands.seconds is not None
    seconds = max(demands.seconds - costs.other_seconds(config, rows), 0.0)
    return seconds / costs.update_seconds(config, rows) * tokens_of_update


def closest_rows(rows: float, world_size: int = 1) -> int:
    """The one of ROWS that is nearest, by ratio, among those that the ranks can share."""
    choices = [choice for choice in ROWS if choice % world_size == 0] or [world_size]

    def distance(choice: int) -> float:
        return abs(math.log(choice / max(rows, 1e-9)))

    return min(choices, key=distance)


def micro_batch_rows(rows: int, most: int) -> int:
    """The largest divisor of `rows` up to `most`."""
    return max(divisor for divisor in range(1, min(rows, most) + 1) if rows % divisor == 0)


def sizes(fields: Mapping[str, object]) -> list[MiniMindConfig]:
    """The models to try. fields: of their configs, what is not free; the vocabulary is among them.

    Errors: ValueError where no model has such fields.
    """
    found = []
    for width in [fields["hidden_size"]] if "hidden_size" in fields else laws.WIDTHS:
        assert isinstance(width, int)
        heads = fields.get("num_attention_heads", laws.heads_for(width))
        assert isinstance(heads, int)
        own: dict[str, object] = {
            "hidden_size": width,
            "num_hidden_layers": laws.layers_for(width),
            "num_attention_heads": heads,
            "num_key_value_heads": laws.kv_heads_for(heads),
        }
        own.update(fields)
        try:
            found.append(MiniMindConfig(**own))
        except ValueError:
            # The fields do not go with this width, as heads that do not divide it.
            if "hidden_size" in fields:
                raise
    return found
