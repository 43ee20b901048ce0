"""From a budget to the settings of a run: what --budget, --budget_tokens and --budget_flops do.

    plan_run            the settings that the run is started with
      look_at_machine   what the machine multiplies
      with_row_length   how long rows are, which decides how the text is cut
      look_at_data      how much text there is, and how hard it is (trainer/budget/data.py)
      Planner.choose    the best of all plans (trainer/budget/plan.py), of a size that was measured here
      chosen_settings   the plan as settings

All ranks plan together, since all of them measure at once, as they will train at once. Rank 0 decides and prints.
"""

import dataclasses
import math
import time
from collections.abc import Collection
from typing import Any

from common.errors import UserError, user_errors
from common.notices import announce
from common.processes import seconds_since_start
from model.config import MiniMindConfig
from model.hf_folder import read_config
from trainer.budget import laws
from trainer.budget.command import explicit_command
from trainer.budget.data import Data, look_at_data
from trainer.budget.kept_plan import earlier_plan, keep_plan
from trainer.budget.plan import Demands, NothingFits, Plan, best_plan, plan_for, sizes
from trainer.budget.settings import seconds_of
from trainer.budget.speed import (
    EVALUATION_SHARE,
    FILES_S,
    SAMPLE_S_OF_LAYER,
    Machine,
    estimated_seconds,
    measured_seconds,
    share_of_product_rate,
)
from trainer.budget.table import plan_table
from trainer.evaluation import read_prompts
from trainer.job import Surroundings
from trainer.machine.compiling import compiler_missing
from trainer.machine.devices import pick_dtype
from trainer.machine.measure import product_rate
from trainer.machine.ranks import on_main
from trainer.pretrain.flops import flops_per_token
from trainer.pretrain.job import check_length
from trainer.pretrain.memory_plan import MemoryPlan, MicroBatch
from trainer.pretrain.public_weights import settings_of_folder
from trainer.pretrain.settings import MODEL_FLAGS, PretrainSettings

# Of the memory that is free, what a plan may take.
MEMORY_SHARE = 0.8
# Seconds that compiling takes: the first time, and once the compiler has kept its results.
COMPILE_S = 35.0
WARM_COMPILE_S = 6.0
# A run is compiled where its time is so many times as long as compiling.
WORTH_COMPILING = 2.5
# Further sizes are measured as long as that takes no more than this part of the time.
MEASURING_PART = 0.05
# No machine is further away from the estimate than this.
MOST_CORRECTION = 4.0
# Evaluations before the last one may take this part of the time, and are no more than this.
EVALUATION_PART = 0.02
MOST_EVALUATIONS = 10
# A text_scale so near to 1 is that of the text which was measured.
LIKE_THE_MEASURED_TEXT = 0.05
LOG_LINES = 200
SAVES = 10
# Factor between two sizes of an update that teach about the same
NEAR = 1.7
# Of a short run's model, to know about how much is computed before the size is chosen.
TYPICAL_WIDTH = 128


def plan_run(settings: PretrainSettings, given: Collection[str], surroundings: Surroundings) -> PretrainSettings | None:
    """The settings with everything chosen that the user has left open; None: --dry_run has shown the plan.

    given: names of the settings that the user has said, by flags or by --config. Errors: UserError, DataError.
    """
    ranks = surroundings.ranks
    refuse_contradictions(settings, given)
    if settings.from_resume and not settings.dry_run:
        earlier = on_main(ranks, lambda: earlier_plan(settings, given))
        if earlier is not None:
            return dataclasses.replace(settings, **earlier)
    with user_errors():
        settings, config = model_of_weights(settings)
        machine = look_at_machine(settings, surroundings)
        settings = with_row_length(settings, given, machine)
        data = look_at_data(settings, given, ranks)
        planner = Planner(settings, given, data, machine, config)
        plan = planner.choose()
    # Ranks that evaluated or saved at different updates would wait for each other for ever.
    chosen_by_main = on_main(ranks, lambda: planner.chosen_settings(plan))
    chosen = dataclasses.replace(settings, **chosen_by_main)

    def tell() -> None:
        for line in planner.lines(plan, chosen):
            announce(line)
        if not settings.dry_run:
            keep_plan(chosen)

    on_main(ranks, tell)
    return None if settings.dry_run else chosen


def refuse_contradictions(settings: PretrainSettings, given: Collection[str]) -> None:
    """Errors: UserError for a flag that a budget cannot keep to."""
    for name in ("epochs", "max_updates"):
        if name in given:
            raise UserError(f"--{name} and a budget both say when the run ends: drop one of them")
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


def model_of_weights(settings: PretrainSettings) -> tuple[PretrainSettings, MiniMindConfig | None]:
    """(settings that fit the model which --from_weight names, its config where a folder tells it).

    Errors: UserError, ValueError.
    """
    folder = settings.weight_folder()
    if settings.from_weight == "none" or folder is None:
        return settings, None
    config = read_config(folder)
    return settings_of_folder(settings, folder, config), config


def look_at_machine(settings: PretrainSettings, surroundings: Surroundings) -> Machine:
    """Measure the rate of matrix products, on all ranks at once."""
    device = surroundings.device
    dtype, _ = pick_dtype(settings.dtype, device)
    ranks = surroundings.ranks
    rate = product_rate(device, dtype, sizes=[2048] if device.type == "cpu" else None)
    # All ranks must plan with the same number.
    rate = on_main(ranks, lambda: rate)
    return Machine(device, dtype, ranks, rate * ranks.world_size)


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


def are_alike(plan: Plan, other: Plan) -> bool:
    """Whether two plans have one width, and updates that teach about the same: their best size is a flat optimum."""
    same_width = plan.config.hidden_size == other.config.hidden_size
    return same_width and max(plan.rows, other.rows) <= NEAR * min(plan.rows, other.rows)


class Planner:
    """Chooses the plan of a run. It is the Costs of the plans, too.

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
        self.settings = settings
        self.starts_afresh = settings.from_weight == "none"
        # The shape of a model that is gone on from is not free.
        self.given = set(given) if self.starts_afresh else {*given, *MODEL_FLAGS, "init_scheme", "optimizer"}
        self.data = data
        self.machine = machine
        self.optimizer = settings.optimizer if "optimizer" in self.given else "muon"
        self.prompts = len(read_prompts(settings.sample_prompts))
        # Of the command, from its start on.
        self.seconds = seconds_of(settings.budget) if settings.budget else None
        # Rank 0 decides: the machines of several nodes may differ in having a compiler.
        self.compiled = on_main(machine.ranks, self._is_compiled)
        # {width: how long an update took, relative to the estimate}, of the sizes that were measured
        self.corrections: dict[int, float] = {}
        self.sizes = sizes(self._fixed_fields()) if config is None else [config]
        as_planned = dataclasses.replace(settings, optimizer=self.optimizer, use_compile="1" if self.compiled else "0")
        self.memory_plan = MemoryPlan(as_planned, machine.dtype, machine.device, machine.ranks)

    def _is_compiled(self) -> bool:
        """Whether the run will be compiled: decided here, so that the run does what was planned."""
        choice = self.settings.use_compile
        if choice != "auto":
            return choice == "1"
        if compiler_missing(self.machine.device) is not None:
            return False
        return self.seconds is None or self.seconds >= WORTH_COMPILING * COMPILE_S

    def _fixed_fields(self) -> dict[str, object]:
        """Of the model's config, what is not free."""
        fields: dict[str, object] = {"vocab_size": self.data.vocab_size}
        for name in MODEL_FLAGS:
            if name in self.given and getattr(self.settings, name) is not None:
                fields[name] = getattr(self.settings, name)
        return fields

    def _demands(self, factor: float = 1.0) -> Demands:
        """What a plan must keep to, with `factor` times the budget."""
        settings = self.settings
        free = self.memory_plan.available
        tokens = None if settings.budget_tokens is None else settings.budget_tokens * factor
        flops = None if settings.budget_flops is None else settings.budget_flops * factor
        seconds = None if self.seconds is None else self.seconds * factor - seconds_since_start()
        return Demands(
            unique=self.data.unique,
            T=self.data.T,
            fill=self.data.fill,
            device_type=self.machine.device.type,
            world_size=self.machine.ranks.world_size,
            sharing=self.machine.ranks.sharing,
            seconds=seconds,
            tokens=tokens,
            flops=flops,
            batch_size=settings.batch_size if "batch_size" in self.given else None,
            accumulation_steps=settings.accumulation_steps if "accumulation_steps" in self.given else None,
            memory=None if free is None else MEMORY_SHARE * free,
            text_scale=self.data.text_scale,
            muon=self.optimizer == "muon",
        )

    # ------------------------------------------------------------------------------------- what a run takes

    def update_seconds(self, config: MiniMindConfig, rows: int) -> float:
        estimate = estimated_seconds(
            config,
            self.machine,
            rows=rows,
            T=self.data.T,
            length=self.data.length,
            muon=self.optimizer == "muon",
            compiled=self.compiled,
        )
        return estimate * self._correction(config.hidden_size)

    def _correction(self, width: int) -> float:
        """Of the nearest width that was measured."""
        if not self.corrections:
            return 1.0
        nearest = min(self.corrections, key=lambda measured: abs(math.log(measured / width)))
        return self.corrections[nearest]

    def other_seconds(self, config: MiniMindConfig, rows: int) -> float:
        seconds = FILES_S
        if self.compiled:
            # To measure a size, it was compiled.
            seconds += WARM_COMPILE_S if config.hidden_size in self.corrections else COMPILE_S
        evaluation = self._evaluation_seconds(config, rows)
        return seconds + evaluation * (1 + self._evaluations(evaluation))

    def _evaluation_seconds(self, config: MiniMindConfig, rows: int) -> float:
        of_position = self.update_seconds(config, rows) / (rows * self.data.T)
        samples = SAMPLE_S_OF_LAYER * config.num_hidden_layers * self.prompts
        return EVALUATION_SHARE * of_position * self.data.evaluated + samples

    def _evaluations(self, seconds: float) -> int:
        """How many come before the last one, if each takes so long."""
        if not self.data.evaluated:
            return 0
        if self.seconds is None:
            return MOST_EVALUATIONS
        return min(int(EVALUATION_PART * self.seconds / seconds), MOST_EVALUATIONS)

    def memory(self, config: MiniMindConfig, batch_size: int) -> float:
        batch = MicroBatch(config, batch_size, self.data.T, self.settings.gradient_checkpointing)
        return self.memory_plan.needed(batch)

    def token_flops(self, config: MiniMindConfig) -> float:
        return flops_per_token(config, self.data.length)

    # --------------------------------------------------------------------------------------------- choosing

    def choose(self) -> Plan:
        """The best plan. With a time budget it is of a size that was measured here, as long as there is time for that.

        Errors: UserError where nothing can be trained.
        """
        measurements = 0
        if self.seconds is not None:
            measurements = 1
            if self.compiled:
                measurements += int(MEASURING_PART * self.seconds / COMPILE_S)
        plan = self._best()
        while measurements and plan.config.hidden_size not in self.corrections:
            self._measure(plan)
            measurements -= 1
            plan = self._best(plan)
        return plan

    def _best(self, measured: Plan | None = None) -> Plan:
        """Of all sizes, by what is known of their speed so far. The same on all ranks. Errors: UserError.

        measured: the one that was measured last. What was compiled for it serves its own micro-batches only, so the
        same size keeps them where they are not far off.
        """

        def decide() -> Plan:
            demands = self._demands()
            try:
                plan = best_plan(self.sizes, demands, self)
                if measured is None or not are_alike(plan, measured):
                    return plan
                return plan_for(plan.config, demands, self, measured.cut) or plan
            except NothingFits as lack:
                raise UserError(
                    f"no model can be trained with this budget, since the {lack} is too small: raise it, or drop flags "
                    "that fix the size or the batch"
                ) from None

        plan = on_main(self.machine.ranks, decide)
        # Now and not in the middle of a measurement.
        check_length(self.data.T, plan.config)
        return plan

    def _measure(self, plan: Plan) -> None:
        """Time some micro-batches of a plan, and correct the estimates by that."""
        config = plan.config
        micro_batch, update = measured_seconds(
            config,
            self.machine,
            rows=self.machine.ranks.rows_of(plan.cut.batch_size),
            T=self.data.T,
            optimizer=self.optimizer,
            compiled=self.compiled,
            gradient_checkpointing=self.settings.gradient_checkpointing,
        )
        measured = micro_batch * plan.cut.accumulation_steps + update
        # All ranks must plan with the same numbers.
        measured = on_main(self.machine.ranks, lambda: measured)
        self.corrections[config.hidden_size] = 1.0
        factor = measured / self.update_seconds(config, plan.rows)
        # Another program may have disturbed the measurement. The clock of the run mends the rest.
        self.corrections[config.hidden_size] = min(max(factor, 1 / MOST_CORRECTION), MOST_CORRECTION)

    # ------------------------------------------------------------------------------------------- the outcome

    def chosen_settings(self, plan: Plan) -> dict[str, Any]:
        """What the plan says of the settings that the user has left open."""
        config = plan.config
        steps = plan.cut.accumulation_steps
        micro_batches = plan.updates * steps
        evaluations = self._evaluations(self._evaluation_seconds(config, plan.rows))
        chosen: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "init_scheme": "zero_out",
            "optimizer": self.optimizer,
            "learning_rate": laws.SIDE_RATE,
            "weight_decay": laws.MUON_WEIGHT_DECAY,
            "lr_schedule": "wsd",
            "decay_share": laws.DECAY_SHARE,
            "warmup_iters": min(laws.WARMUP_UPDATES, plan.updates // 10) * steps,
            "batch_size": plan.cut.batch_size,
            "accumulation_steps": steps,
            "max_seq_len": self.settings.max_seq_len,
            "max_updates": plan.updates,
            "val_fraction": self.data.val_fraction,
            "log_interval": max(1, micro_batches // LOG_LINES),
            "save_interval": max(1, micro_batches // SAVES),
        }
        if self.data.evaluated:
            chosen["eval_interval"] = math.ceil(micro_batches / (evaluations + 1)) if evaluations else 0
        if self.seconds is not None:
            chosen["use_compile"] = "1" if self.compiled else "0"
        if self.optimizer == "muon":
            chosen["muon_lr"] = laws.MUON_RATE
        else:
            chosen["learning_rate"] = float(f"{laws.adamw_rate(plan.parameters, plan.tokens):.2g}")
        return {name: value for name, value in chosen.items() if name not in self.given}

    def lines(self, plan: Plan, chosen: PretrainSettings) -> list[str]:
        """The plan for a person, and the command that repeats it."""
        spent = seconds_since_start()
        total = spent + plan.other_seconds + plan.seconds
        rates = f"{chosen.learning_rate:g} (AdamW)"
        if chosen.optimizer == "muon":
            rates = f"{chosen.muon_lr:g} (Muon, matrices of the blocks), {chosen.learning_rate:g} (AdamW, the rest)"
        asked = chosen.budget or f"{chosen.budget_tokens or chosen.budget_flops:g}"
        table = plan_table(
            plan,
            {"half of it": self._with_budget(0.5), "twice as much": self._with_budget(2.0)},
            rates,
            error=self._error(),
            bytes_per_token=self.data.bytes_per_token,
            total_seconds=total,
            until=time.time() + plan.other_seconds + plan.seconds,
            T=self.data.T,
        )
        return [
            f"plan for {asked}:",
            *table,
            "the same by flags:",
            f"  {explicit_command(chosen, self.given, self.machine.ranks.micro_batches_at_once)}",
        ]

    def _error(self) -> float | None:
        """The relative range of the expected loss; None: nothing is known of it."""
        if not self.starts_afresh or self.settings.use_moe:
            return None
        is_as_measured = abs(self.data.text_scale - 1) < LIKE_THE_MEASURED_TEXT
        return laws.LOSS_ERROR if is_as_measured else laws.LOSS_ERROR_ELSEWHERE

    def _with_budget(self, factor: float) -> Plan | None:
        """The plan for `factor` times the budget; None: there is none."""
        try:
            return best_plan(self.sizes, self._demands(factor), self)
        except NothingFits:
            return None
