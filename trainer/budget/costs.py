"""What a planned run takes, for each size of a model: seconds, memory, floating-point operations.

Seconds are estimated from the machine's rate of matrix products, and corrected by what was measured of some sizes.
"""

import math
import time
from collections.abc import Collection
from typing import NamedTuple

from model.config import MiniMindConfig
from trainer.budget.data import Data
from trainer.budget.plan import Cut, Plan
from trainer.budget.reserves import evaluation_share, sample_seconds, seconds_at_end
from trainer.budget.settings import seconds_of
from trainer.budget.speed import Machine, estimated_seconds, measured_seconds
from trainer.machine.collectives import on_main
from trainer.machine.compiling import COMPILED_DEVICES, what_the_compiler_lacks
from trainer.pretrain.footprint import flops_per_token, training_bytes
from trainer.pretrain.settings import PretrainSettings
from trainer.sampling import read_prompts

# Seconds that compiling takes: the first time, and once the compiler has kept its results.
COMPILE_S = 35.0
WARM_COMPILE_S = 6.0
# A run is compiled where its time is at least so many times that of compiling, which may take longer beside other programs.
WORTH_COMPILING = 3.5
# Part of a time budget that compiling for measurements may take. Other programs may slow it down without bounds.
COMPILING_PART = 0.25
# No machine is further away from the estimate than this. Small updates of a GPU wait for its launches, of which the estimate knows
# nothing.
MOST_CORRECTION = {"cpu": 4.0, "cuda": 100.0, "mps": 100.0}
# Evaluations before the last one may take this part of the run, and are no more than this.
EVALUATION_PART = 0.02
MOST_EVALUATIONS = 10
# Updates that a measurement times, and what part of a run's updates they may be. The middle one counts: a run meets all of
# them, and not one outlier.
TIMED = 5
MEASURED_PART_OF_UPDATES = 0.05
# Where such updates are over at once, a measurement goes on for so much of the time: just after an installation, updates took
# 0.56 s while they were measured and 0.33 s in the run.
TIMED_PART = 0.01
MOST_TIMED_S = 10.0


class Size(NamedTuple):
    """Of a model, what decides how fast it trains."""

    width: int
    layers: int

    @classmethod
    def of(cls, config: MiniMindConfig) -> "Size":
        return cls(config.hidden_size, config.num_hidden_layers)


class RunCosts:
    """The Costs of a run with these settings, on this data and machine.

    optimizer: of the run. seconds: of a time budget, None: it is one of tokens or FLOPs. compiled: whether the run will be.
    eval_interval: that the user has said; None: it is free.
    """

    def __init__(
        self, settings: PretrainSettings, data: Data, machine: Machine, optimizer: str, given: Collection[str] = ()
    ) -> None:
        """A collective: all ranks must call it. given: names of the settings that the user has said."""
        self.settings = settings
        self.data = data
        self.machine = machine
        self.optimizer = optimizer
        self.seconds = seconds_of(settings.budget) if settings.budget else None
        self.eval_interval = settings.eval_interval if "eval_interval" in given else None
        self.prompts = len(read_prompts(settings.sample_prompts))
        # Rank 0 decides: the machines of several nodes may differ in having a compiler.
        self.compiled = on_main(machine.ranks, self._is_compiled)
        self.compile_seconds = math.inf if self.seconds is None else COMPILING_PART * self.seconds
        # {size: how long an update took, relative to the estimate}, of those that were measured
        self.corrections: dict[Size, float] = {}
        # (width, rows of a micro-batch) of those that were measured: all blocks of a width are alike, so what was compiled for one
        # number of layers serves the others.
        self.compiled_for: set[tuple[int, int]] = set()

    def _is_compiled(self) -> bool:
        """Whether the run will be compiled: decided here, so that the run does what was planned."""
        choice = self.settings.use_compile
        device = self.machine.device
        if choice == "0":
            return False
        if choice == "auto":
            is_short = self.seconds is not None and self.seconds < WORTH_COMPILING * COMPILE_S
            if is_short or device.type not in COMPILED_DEVICES:
                return False
        # A run that is told to compile on a machine that cannot trains the plain code.
        return what_the_compiler_lacks(device) is None

    def update_seconds(self, config: MiniMindConfig, rows: int) -> float:
        """Of an update of so many rows."""
        estimate = estimated_seconds(
            config,
            self.machine,
            rows=rows,
            T=self.data.T,
            length=self.data.length,
            muon=self.optimizer == "muon",
            compiled=self.compiled,
        )
        return estimate * self._correction(config)

    def _correction(self, config: MiniMindConfig) -> float:
        """Of the nearest size that was measured. What an update takes per operation goes by the width more than by the depth."""
        if not self.corrections:
            return 1.0
        size = Size.of(config)

        def distance(measured: Size) -> tuple[float, float]:
            return abs(math.log(measured.width / size.width)), abs(math.log(measured.layers / size.layers))

        return self.corrections[min(self.corrections, key=distance)]

    def other_seconds(self, config: MiniMindConfig, cut: Cut, training_seconds: float) -> float:
        """Of what is no training: compiling, evaluations, files. training_seconds: what all updates take."""
        seconds = seconds_at_end(self.settings.report)
        if self.compiled:
            is_known = (config.hidden_size, cut.batch_size) in self.compiled_for
            seconds += WARM_COMPILE_S if is_known else COMPILE_S
        evaluations = 1 + self.evaluations(config, cut, training_seconds)
        return seconds + evaluations * self.evaluation_seconds(config, cut.rows)

    def evaluation_seconds(self, config: MiniMindConfig, rows: int) -> float:
        """Of one evaluation, in a run whose updates have so many rows."""
        of_position = self.update_seconds(config, rows) / (rows * self.data.T)
        samples = sample_seconds(config.num_hidden_layers, self.prompts)
        return evaluation_share(self.compiled) * of_position * self.data.evaluated + samples

    def evaluations(self, config: MiniMindConfig, cut: Cut, training_seconds: float) -> int:
        """How many come before the last one, in a run whose updates take so many seconds."""
        if not self.data.evaluated or self.eval_interval == 0:
            return 0
        if self.eval_interval is None:
            affordable = EVALUATION_PART * training_seconds / self.evaluation_seconds(config, cut.rows)
            return int(min(affordable, MOST_EVALUATIONS))
        # There is one at most after each update.
        updates_between = max(self.eval_interval / cut.accumulation_steps, 1.0)
        updates = training_seconds / self.update_seconds(config, cut.rows)
        return int(updates / updates_between)

    def memory(self, config: MiniMindConfig, batch_size: int) -> float:
        """Bytes at the peak, with micro-batches of so many rows."""
        device_type = self.machine.device.type
        return training_bytes(
            config,
            batch_size,
            self.data.T,
            half=self.machine.dtype.itemsize,
            # Micro-batches of a GPU are as large as they can be, so plain code counts, which a run may turn out to need.
            compiled=self.compiled and device_type != "cuda",
            recomputes=self.settings.gradient_checkpointing,
            device_type=device_type,
            sharing=self.machine.ranks.sharing,
        )

    def token_flops(self, config: MiniMindConfig) -> float:
        """Floating-point operations for each token."""
        return flops_per_token(config, self.data.length)

    def is_measured(self, config: MiniMindConfig) -> bool:
        """Whether `measure` was called for this size."""
        return Size.of(config) in self.corrections

    def timed_seconds(self) -> float:
        """How long the updates of a measurement take together, at least. Only a budget of time is measured for."""
        assert self.seconds is not None
        return min(TIMED_PART * self.seconds, MOST_TIMED_S)

    def measure(self, plan: Plan) -> bool:
        """Time some updates of a plan, and correct the estimates by that. A collective: all ranks must call it.

        False: compiling took too long. From here on costs are those of plain code.
        """
        config = plan.config
        began = time.monotonic()
        measured_parts = measured_seconds(
            config,
            self.machine,
            rows=self.machine.ranks.rows_of(plan.cut.batch_size),
            T=self.data.T,
            optimizer=self.optimizer,
            compiled=self.compiled,
            gradient_checkpointing=self.settings.gradient_checkpointing,
            times=max(1, min(TIMED, int(MEASURED_PART_OF_UPDATES * plan.updates))),
            least_seconds=self.timed_seconds(),
            compile_seconds=self.compile_seconds,
        )
        self.compile_seconds -= time.monotonic() - began
        if measured_parts is None:
            self.compiled = False
            self.corrections.clear()
            return False
        micro_batch, update = measured_parts
        measured = micro_batch * plan.cut.accumulation_steps + update
        # All ranks must plan with the same numbers.
        measured = on_main(self.machine.ranks, lambda: measured)
        self.compiled_for.add((config.hidden_size, plan.cut.batch_size))
        size = Size.of(config)
        self.corrections[size] = 1.0
        factor = measured / self.update_seconds(config, plan.rows)
        # Another program may have disturbed the measurement. The clock of the run mends the rest.
        most = MOST_CORRECTION[self.machine.device.type]
        self.corrections[size] = min(max(factor, 1 / most), most)
        return True
