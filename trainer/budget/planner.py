"""From a budget to the settings of a run: what --budget, --budget_tokens and --budget_flops do.

    plan_run            the settings that the run is started with
      with_faster_dtype in which precision a CPU multiplies faster
      product_rate      what the machine multiplies
      with_row_length   how long rows are, which decides how the text is cut
      look_at_data      how much text there is, and how hard it is (data.py)
      RunCosts          what each size takes, estimated and measured (costs.py)
      Planner.choose    the best of all plans (plan.py), of a size that was measured here
      chosen_settings   the plan as settings (outcome.py)

All ranks plan together, since all of them measure at once, as they will train at once. Rank 0 decides and prints.
"""

import dataclasses
import math
from collections.abc import Collection
from functools import partial

from common.errors import UserError, user_errors
from common.processes import seconds_since_start
from common.wording import announce, counted
from model.config import MiniMindConfig
from model.hf_format import read_config
from trainer.budget import laws
from trainer.budget.costs import COMPILE_S, COMPILING_PART, Machine, RunCosts, share_of_product_rate
from trainer.budget.data import Data, look_at_data
from trainer.budget.outcome import chosen_settings, kept_plan, plan_lines, quantity, shape_text
from trainer.budget.plan import (
    FEWEST_UPDATES,
    Demands,
    NothingFits,
    Plan,
    best_plan,
    fewest_different_tokens,
    fewest_rows,
    plan_for,
    sizes,
)
from trainer.budget.settings import said_ends, seconds_of
from trainer.job import Surroundings
from trainer.machine.devices import pick_dtype, worthwhile_gain_of_float32
from trainer.machine.measure import product_rate
from trainer.machine.ranks import on_main
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
# Two sizes of an update that differ by less than this factor teach about as much from as many tokens.
NEAR = 1.7
# Width of a short run's model, to know about how much is computed before the size is chosen
TYPICAL_WIDTH = 128
# Where the measurement of a plan finds no memory, though the plan has looked at what was free.
ADVICE_ON_MEMORY = (
    "a program beside this one may have taken it since the plan was made; try the same again, or limit the plan by "
    "--hidden_size or --batch_size"
)


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
        path, resumed = kept
        on_main(ranks, lambda: announce(f"the plan of the first start holds: {path}"))
        return None if settings.dry_run else resumed
    given = {*given, *settings.fixed_in_plans}
    on_main(ranks, lambda: announce("planning: this machine is measured and the text is counted"))
    with user_errors():
        config = None
        folder = settings.weight_folder()
        if settings.from_weight != "none" and folder is not None:
            config = read_config(folder)
            settings = settings_of_folder(settings, folder, config)
        settings = with_faster_dtype(settings, given, surroundings)
        dtype, _ = pick_dtype(settings.dtype, device)
        own_rate = product_rate(device, dtype, sizes=[2048] if device.type == "cpu" else None)
        # All ranks must plan with the same number.
        rate = on_main(ranks, lambda: own_rate)
        machine = Machine(device, dtype, ranks, rate * ranks.world_size)
        settings = with_row_length(settings, given, machine)
        data = look_at_data(settings, given, ranks, kind)
        planner = Planner(settings, given, data, machine, config)
        plan = planner.choose()
    # Ranks that evaluated or saved at different updates would wait for each other for ever.
    chosen_by_main = on_main(ranks, lambda: chosen_settings(plan, planner.costs, planner.given))
    chosen = dataclasses.replace(settings, **chosen_by_main)

    def tell() -> None:
        others = {"half of it": planner.with_budget(0.5), "twice as much": planner.with_budget(2.0)}
        for line in plan_lines(plan, others, planner.costs, chosen, planner.given, set(chosen_by_main)):
            announce(line)

    on_main(ranks, tell)
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
    if "optimizer" in given and settings.optimizer not in laws.OPTIMIZERS:
        raise UserError(
            f"--optimizer {settings.optimizer}: the rates of a plan are known for {' and '.join(laws.OPTIMIZERS)} alone: take one of "
            "them, or train without a budget"
        )
    if settings.from_weight != "none" and "learning_rate" not in given:
        raise UserError(
            "--from_weight with a budget: add --learning_rate, since the rates of a plan are those of fresh weights (2e-5 is "
            "usual for public weights)"
        )


def with_faster_dtype(
    settings: PretrainSettings, given: Collection[str], surroundings: Surroundings
) -> PretrainSettings:
    """The settings with float32 where the user has said nothing, and this CPU is slower at bfloat16. A collective.

    With a budget of time alone: a number of tokens or FLOP shall give the same run at each start, whatever a clock says.
    """
    if settings.budget is None or "dtype" in given:
        return settings
    dtype, _ = pick_dtype(settings.dtype, surroundings.device)
    own = worthwhile_gain_of_float32(surroundings.device, dtype)

    def decide() -> bool:
        if own is not None:
            announce(
                f"planning: this CPU multiplies float32 {own:.2g} times as fast as bfloat16, so the plan takes --dtype float32"
            )
        return own is not None

    # All ranks must compute in one precision.
    return dataclasses.replace(settings, dtype="float32") if on_main(surroundings.ranks, decide) else settings


def with_row_length(settings: PretrainSettings, given: Collection[str], machine: Machine) -> PretrainSettings:
    """The settings with short rows where the user has said nothing of them, and the run is a short one."""
    is_free = settings.pack and settings.long_documents == "split" and settings.from_weight == "none"
    if not is_free or "max_seq_len" in given:
        return settings
    tokens = settings.budget_tokens
    if tokens is None:
        flops = settings.budget_flops
        if flops is None:
            assert settings.budget is not None
            share = share_of_product_rate(machine.device.type, TYPICAL_WIDTH)
            flops = seconds_of(settings.budget) * machine.product_rate * share
        tokens = laws.tokens_of(flops)
    if tokens > laws.SHORT_RUN_TOKENS:
        return settings
    return dataclasses.replace(settings, max_seq_len=laws.SHORT_ROW)


class Planner:
    """Chooses the plan of a run.

    given: see plan_run. config: of the folder that --from_weight names.
    """

    def __init__(
        self,
        settings: PretrainSettings,
        given: Collection[str],
        data: Data,
        machine: Machine,
        config: MiniMindConfig | None = None,
    ) -> None:
        """A collective: all ranks must call it."""
        self.settings = settings
        # The shape of a model that is gone on from is not free.
        starts_afresh = settings.from_weight == "none"
        self.given = set(given) if starts_afresh else {*given, *MODEL_FLAGS, "init_scheme", "optimizer"}
        self.data = data
        self.machine = machine
        optimizer = settings.optimizer if "optimizer" in self.given else "muon"
        self.costs = RunCosts(settings, data, machine, optimizer, self.given)
        fixed: dict[str, object] = {"vocab_size": data.vocab_size}
        for name in MODEL_FLAGS:
            if name in self.given and getattr(settings, name) is not None:
                fixed[name] = getattr(settings, name)
        self.sizes = sizes(fixed) if config is None else [config]
        # Another program may take the memory of one of several GPUs.
        self.free_memory = free_memory(machine.device, machine.ranks)

    def _demands(self, factor: float = 1.0) -> Demands:
        """What a plan must keep to, with `factor` times the budget."""
        settings = self.settings
        return Demands(
            tokens_of_pass=self.data.tokens_of_pass,
            parts=self.data.parts,
            T=self.data.T,
            fill=self.data.fill,
            device_type=self.machine.device.type,
            world_size=self.machine.ranks.world_size,
            sharing=self.machine.ranks.sharing,
            seconds=None if self.costs.seconds is None else self.costs.seconds * factor - seconds_since_start(),
            tokens=None if settings.budget_tokens is None else settings.budget_tokens * factor,
            flops=None if settings.budget_flops is None else settings.budget_flops * factor,
            batch_size=settings.batch_size if "batch_size" in self.given else None,
            accumulation_steps=settings.accumulation_steps if "accumulation_steps" in self.given else None,
            memory=None if self.free_memory is None else MEMORY_SHARE * self.free_memory,
            text_scale=self.data.text_scale,
            muon=self.costs.optimizer == "muon",
            most_passes=laws.most_passes(settings.from_weight),
        )

    def choose(self) -> Plan:
        """The best plan. With a time budget it is of a size that was measured here, as long as there is time for that.

        A collective: all ranks must call it. Errors: UserError where nothing can be trained.
        """
        ranks = self.machine.ranks
        # Rows that no model can take are no fault of the budget, and neither is a model that the user has made too large.
        smallest = self.sizes[0]
        check_length(self.data.T, smallest)
        on_main(ranks, lambda: refuse_too_large(smallest, self.machine.device, ranks))
        measurements = 0
        if self.costs.seconds is not None:
            of_one = COMPILE_S if self.costs.compiled else PLAIN_MEASUREMENT_S[self.machine.device.type]
            of_one += self.costs.timed_seconds()
            measurements = 1 + int(MEASURING_PART * self.costs.seconds / of_one)
        plan = self._best()
        while measurements and not self.costs.is_measured(plan.config):
            # Compiling takes a while, in which nothing else is printed.
            how = ", compiled" if self.costs.compiled else ""
            on_main(ranks, partial(announce, f"planning: {shape_text(plan)}{how}, is timed"))
            if self.costs.measure(plan):
                measurements -= 1
                plan = self._best(plan)
                continue
            line = f"planning: compiling takes more than {COMPILING_PART:.0%} of the budget: the run trains plain code"
            on_main(ranks, partial(announce, line))
            plan = self._best()
        if self.data.most is not None and plan.tokens > self.data.most:
            times = math.ceil(plan.tokens / self.data.most)
            raise UserError(
                f"--data_path: the plan takes {quantity(plan.tokens)} tokens, and with these shares the sources have "
                f"{quantity(self.data.most)}: allow {times} times as many passes (x{times} behind each share, repeat: {times} in a "
                "--mixture file, where there is one now), or give a smaller budget"
            )
        return plan

    def _best(self, measured: Plan | None = None) -> Plan:
        """The best plan of all sizes, by what is known of their speed so far. The same on all ranks. Errors: UserError.

        measured: the one that was measured last. What was compiled for it, a block of its width, serves its own
        micro-batches only. So a plan of that width, with as many layers or others, keeps them where they are not far off.
        """

        def decide() -> Plan:
            demands = self._demands()
            try:
                plan = best_plan(self.sizes, demands, self.costs)
            except NothingFits as lack:
                raise UserError(self._why_nothing(str(lack), demands)) from None
            if measured is None or plan.config.hidden_size != measured.config.hidden_size:
                return plan
            if max(plan.rows, measured.rows) > NEAR * min(plan.rows, measured.rows):
                return plan
            with_same_cut = plan_for(plan.config, demands, self.costs, measured.cut)
            if with_same_cut is None or not demands.allows(with_same_cut.memory):
                return plan
            return with_same_cut

        return on_main(self.machine.ranks, decide)

    def _why_nothing(self, lack: str, demands: Demands) -> str:
        """The line where no model can be trained. lack: what there is too little of."""
        if lack == "text":
            return (
                f"the text is too small: it has {round(demands.different):,} tokens to train, and a plan needs about "
                f"{fewest_different_tokens(demands):,} ({FEWEST_UPDATES} updates of {counted(fewest_rows(demands), 'row')} of {demands.T} "
                f"in {demands.most_passes} passes): give more text by --data_path, or train it without a budget, by --epochs"
            )
        if lack == "memory":
            return "no model can be trained, since the memory is too small: drop flags that fix the size or the batch, or give smaller ones"
        line = f"no model can be trained with this budget, since the {lack} is too small"
        spent = seconds_since_start()
        if self.costs.seconds is not None and spent > self.costs.seconds / 2:
            # A text is tokenised once. On a machine that others use, each start takes as long again.
            return (
                f"{line}: {spent:.0f} s of it had passed before the plan. Give a larger budget, or run the command again: the "
                "text is tokenised now."
            )
        return f"{line}: raise it, or drop flags that fix the size, the batch or how often is evaluated"

    def with_budget(self, factor: float) -> Plan | None:
        """The plan for `factor` times the budget; None: there is none."""
        try:
            return best_plan(self.sizes, self._demands(factor), self.costs)
        except NothingFits:
            return None
