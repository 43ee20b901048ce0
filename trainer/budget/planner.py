"""From a budget to the settings of a run: what --budget, --budget_tokens and --budget_flops do.

    plan_run             the settings that the run is started with
      look_at_machine    in which precision it multiplies faster, and how fast
      look_at_data       how much text there is, and how hard it is (costs.py)
      RunCosts           what each size takes, estimated and measured (costs.py)
      choose             the best of all plans (plan.py), of a size that was measured here
      chosen_settings    the plan as settings (outcome.py)

All ranks plan together, since all of them measure at once, as they will train at once. Rank 0 decides and prints.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from functools import partial

import torch

from common.errors import UserError, user_errors
from common.processes import seconds_since_start
from common.wording import announce
from model.config import MiniMindConfig
from model.hf_format import read_config
from trainer.budget.costs import Machine, RunCosts, look_at_data
from trainer.budget.outcome import PLANNED, chosen_settings, kept_plan, plan_lines, quantity, shape_text
from trainer.budget.plan import Plan, best_plan, cuts, plan_for, sizes
from trainer.budget.settings import said_ends
from trainer.job import Surroundings
from trainer.machine.compiling import COMPILE_SECONDS
from trainer.machine.devices import pick_dtype
from trainer.machine.measure import product_rate
from trainer.machine.ranks import on_main, until_all_are_ready
from trainer.pretrain.data import DOCUMENTS, TextKind
from trainer.pretrain.first_model import check_length, settings_of_folder
from trainer.pretrain.memory import free_memory, refuse_too_large
from trainer.pretrain.settings import MODEL_FLAGS, PretrainSettings

# Part of the free memory that a plan may take
MEMORY_SHARE = 0.8
# Further sizes are measured as long as that takes no more than this part of the time. The second is that of a size
# that need not be compiled.
MEASURING_PART = 0.05
PLAIN_MEASUREMENT_S = {"cpu": 10.0, "cuda": 3.0, "mps": 3.0}
# How many times as fast as those of bfloat16 the products of float32 must be to be worth it: they are on Intel Xeons whose virtual
# machine hides AMX. A guess: 1.8 times in products were 1.5 times in a run, since everything between them moves twice the bytes.
WORTH_FLOAT32 = 1.25
# Two sizes of an update that differ by less than this factor teach about as much from as many tokens.
NEAR = 1.7


def plan_run(
    settings: PretrainSettings,
    given: Collection[str],
    surroundings: Surroundings,
    kind: TextKind = DOCUMENTS,
) -> PretrainSettings | None:
    """The settings with everything chosen that the user has left open; None: --dry_run has shown the plan.

    given: names of the settings that the user has said, by flags or by --config. kind: what is read.
    Errors: UserError, DataError.
    """
    ranks, device = surroundings.ranks, surroundings.device
    refuse_contradictions(settings, {*given, *settings.fixed_in_plans})
    kept = on_main(ranks, lambda: kept_plan(settings, given)) if settings.from_resume else None
    if kept is not None:
        path, before = kept
        planned = {name: getattr(before, name) for name in PLANNED if name not in given}
        with until_all_are_ready(ranks), user_errors():
            # On each rank, whose machine may have paths of its own
            resumed = dataclasses.replace(settings, **planned)
        on_main(ranks, lambda: announce(f"the plan of the first start holds: {path}"))
        return None if settings.dry_run else resumed
    given = {*given, *settings.fixed_in_plans}
    on_main(ranks, lambda: announce("planning: this machine is measured and the text is counted"))
    with user_errors():
        config = None
        folder = settings.weight_folder()
        if folder is not None:
            config = read_config(folder)
            settings = settings_of_folder(settings, folder, config)
        settings, machine = look_at_machine(settings, given, surroundings)
        data = look_at_data(settings, given, ranks, kind)
        if settings.from_weight != "none":
            # The shape of a model that is gone on from is not free.
            given |= {*MODEL_FLAGS, "init_scheme", "optimizer"}
        costs = RunCosts(settings, data, machine, given)
        said = {name: getattr(settings, name) for name in MODEL_FLAGS if name in given}
        shape = {name: value for name, value in said.items() if value is not None}
        candidates = sizes({"vocab_size": data.vocab_size, **shape}) if config is None else [config]
        # Rows that no model can take are no fault of the budget, and neither is a model that the user has made too large.
        check_length(data.T, candidates[0])
        on_main(ranks, lambda: refuse_too_large(candidates[0], device, ranks))
        plan = choose(candidates, costs)
    if data.most is not None and plan.tokens > data.most:
        times = math.ceil(plan.tokens / data.most)
        raise UserError(
            f"--data_path: the plan takes {quantity(plan.tokens)} tokens, and with these shares the sources have "
            f"{quantity(data.most)}: allow {times} times as many passes (x{times} behind each share, repeat: {times} in a "
            "--mixture file, where there is one now), or give a smaller budget"
        )
    # Ranks that evaluated or saved at different updates would wait for each other for ever.
    chosen_by_main = on_main(ranks, lambda: chosen_settings(plan, costs))
    chosen = dataclasses.replace(settings, **chosen_by_main)
    if ranks.is_main:
        for line in plan_lines(plan, costs, chosen, set(chosen_by_main)):
            announce(line)
    return None if settings.dry_run else chosen


def refuse_contradictions(settings: PretrainSettings, given: Collection[str]) -> None:
    """Errors: UserError for a flag that a budget cannot keep to."""
    for name in said_ends(settings, given):
        raise UserError(
            f"--{name} and a budget both say when the run ends: drop one of them (what a --config file says counts too)"
        )
    if settings.budget and "lr_schedule" in given and settings.lr_schedule != "wsd":
        raise UserError(
            f"--lr_schedule {settings.lr_schedule}: only wsd can be ended by a clock; drop the flag, or plan by "
            "--budget_tokens"
        )
    if settings.from_weight != "none" and "learning_rate" not in given:
        raise UserError(
            "--from_weight with a budget: add --learning_rate, since the rates of a plan are those of fresh weights (2e-5 is "
            "usual for public weights)"
        )


def look_at_machine(
    settings: PretrainSettings, given: Collection[str], surroundings: Surroundings
) -> tuple[PretrainSettings, Machine]:
    """Time matrix products. The settings get float32 where the user has said nothing, and this CPU is slower at bfloat16. A collective."""
    ranks, device = surroundings.ranks, surroundings.device
    dtype, _ = pick_dtype(settings.dtype, device)
    types = [dtype]
    # With a budget of time alone: a number of tokens or FLOP shall give the same run at each start, whatever a clock says.
    if settings.budget and "dtype" not in given and device.type == "cpu" and dtype is torch.bfloat16:
        types.append(torch.float32)
    own_rates = [product_rate(device, kind, sizes=[2048] if device.type == "cpu" else None) for kind in types]
    # All ranks must plan with the same numbers, and compute in one precision.
    rate, *in_float32 = on_main(ranks, lambda: own_rates)
    if in_float32 and in_float32[0] >= WORTH_FLOAT32 * rate:
        gain = in_float32[0] / rate
        line = f"this CPU multiplies float32 {gain:.2g} times as fast as bfloat16, so the plan takes --dtype float32"
        on_main(ranks, partial(announce, f"planning: {line}"))
        settings = dataclasses.replace(settings, dtype="float32")
        dtype, rate = torch.float32, in_float32[0]
    # Another program may take the memory of one of several GPUs.
    free = free_memory(device, ranks)
    memory = None if free is None else MEMORY_SHARE * free
    return settings, Machine(device, dtype, ranks, rate * ranks.world_size, memory)


def choose(candidates: Sequence[MiniMindConfig], costs: RunCosts) -> Plan:
    """The best plan. With a budget of time it is of a size that was measured here, as long as there is time for that.

    A collective. Errors: UserError where nothing can be trained.
    """
    ranks = costs.machine.ranks
    measurements = 0
    if costs.seconds is not None:
        of_one = COMPILE_SECONDS if costs.compiled else PLAIN_MEASUREMENT_S[costs.machine.device.type]
        measurements = 1 + int(MEASURING_PART * costs.seconds / (of_one + costs.timed_seconds()))
    while True:
        # The same on all ranks, by what rank 0 knows of the speeds so far
        plan = on_main(ranks, partial(best_of_now, candidates, costs))
        size = (plan.config.hidden_size, plan.config.num_hidden_layers)
        if not measurements or size in costs.corrections:
            return plan
        # Compiling takes a while, in which nothing else is printed.
        how = ", compiled" if costs.compiled else ""
        on_main(ranks, partial(announce, f"planning: {shape_text(plan)}{how}, is timed"))
        costs.measure(plan.config, plan.cut, plan.updates)
        measurements -= 1


def best_of_now(candidates: Sequence[MiniMindConfig], costs: RunCosts) -> Plan:
    """The best plan of all sizes for what is left of the budget. Errors: UserError.

    What was compiled for a measurement, a block of its width, serves its own micro-batches only. So a plan of a width that was
    measured, with as many layers or others, keeps them where they are not far off.
    """
    if costs.seconds is not None:
        costs.seconds_left = costs.seconds - seconds_since_start()
    plan = best_plan(candidates, costs)
    cut = costs.measured_cuts.get(plan.config.hidden_size)
    if (
        cut is not None
        and cut in cuts(plan.config, costs)
        and max(plan.cut.rows, cut.rows) <= NEAR * min(plan.cut.rows, cut.rows)
    ):
        return plan_for(plan.config, costs, cut) or plan
    return plan
