"""Whether a run of train_pretrain.py fits the memory of its device, and which flags would fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from common.arithmetic import ceil_div
from common.errors import UserError
from model.config import MiniMindConfig, parameter_count, table_numbers
from trainer.machine.collectives import least_of_ranks
from trainer.machine.cpu_ranks import bytes_in_shared_memory
from trainer.machine.measure import available_memory, total_memory
from trainer.machine.out_of_memory import batch_flags, gigabytes, same_update
from trainer.machine.ranks import ONE_RANK, Ranks
from trainer.pretrain.memory import FP32, MemoryEstimate, training_memory
from trainer.pretrain.settings import PretrainSettings

# An estimate may be a fifth too high, so only what is beyond this times all memory is refused.
SURELY_TOO_MUCH = 1.2
# What is suggested takes at most this share of what could be had: an estimate may be too low as well.
SAFE_SHARE = 0.85
# ... and of what has just failed, where an estimate says that it should not have.
SMALLER_SHARE = 0.75


@dataclass(frozen=True)
class MicroBatch:
    """What decides how much memory is needed. rows: of all processes that share it."""

    config: MiniMindConfig
    rows: int
    T: int
    gradient_checkpointing: bool


class MemoryPlan:
    """What a run needs and what its device has, looked up before the model is made."""

    def __init__(
        self,
        settings: PretrainSettings,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ONE_RANK,
        group_size: int = 1,
        available: int | None = None,
    ) -> None:
        """group_size: how many ranks have one model together (trainer/sharding.py). available: bytes that could be had when the
        run began; None: it begins now."""
        self.settings = settings
        self.device = device
        self.ranks = ranks
        self.group_size = group_size
        self.half = dtype.itemsize
        self.total = total_memory(device)
        self.available = available_memory(device) if available is None else available
        if device.type == "cpu":
            # The ranks of a launcher share the machine's memory, and each has a micro-batch of its own.
            self.total = None if self.total is None else self.total // ranks.local_world_size
            self.available = None if self.available is None else self.available // ranks.local_world_size
        # See `note`. Until the data is known it is one row.
        self.asked: MicroBatch | None = None

    def needed(self, batch: MicroBatch) -> int:
        """Bytes at the peak, of all processes that share the micro-batch.

        Whether `--use_compile auto` compiles is not known yet, so the smaller figure holds.
        """
        choices = {"0": [False], "1": [True]}.get(self.settings.use_compile, [False, True])
        return min(self._needed(batch, compiled) for compiled in choices)

    def needed_at_most(self, batch: MicroBatch) -> int:
        """As `needed`, be it compiled or not: a run may turn out not to be, and plain code takes more."""
        return max(self._needed(batch, compiled) for compiled in (False, True))

    def _needed(self, batch: MicroBatch, compiled: bool) -> int:
        sharing = self.ranks.sharing
        rows_of_process = ceil_div(batch.rows, sharing)
        estimate = training_memory(
            batch.config,
            rows_of_process,
            batch.T,
            self.settings.optimizer,
            compiled=compiled,
            gradient_checkpointing=batch.gradient_checkpointing,
            device=self.device.type,
            half=self.half,
        )
        if self.group_size > 1:
            return sharing * self._of_part(estimate, batch, compiled)
        shared = 0
        if sharing > 1:
            shared = bytes_in_shared_memory(self.ranks.world_size, parameter_count(batch.config))
        return sharing * estimate.total + shared

    def _of_part(self, estimate: MemoryEstimate, batch: MicroBatch, compiled: bool) -> int:
        """Bytes at the peak, of a rank that has a part of the model.

        Beside its parts it holds the gathered weights and gradients of what is in no layer, and of two layers: while one is
        computed the next one arrives. Copies in half precision are kept for the backward pass by compiled layers and by experts, and
        by none where the backward pass computes layers again: see `without_kept_copies` in model/products.py.
        """
        config = batch.config
        states = estimate.weights + estimate.gradients + estimate.optimizer_states
        outside = table_numbers(config)
        of_layer = (parameter_count(config) - outside) // config.num_hidden_layers
        gathered = 2 * FP32 * (outside + 2 * of_layer)
        keeps_none = batch.gradient_checkpointing or not (compiled or config.use_moe)
        not_kept = estimate.half_weights if keeps_none else 0
        return estimate.total - states - not_kept + states // self.group_size + gathered

    def optimizer_states(self, config: MiniMindConfig) -> int:
        """Bytes that the optimiser keeps on each rank."""
        return self._one_short_row(config).optimizer_states

    def free_on_all_ranks(self) -> float | None:
        """Bytes that the rank with the least had free when the run began; None: not known. A collective."""
        own = math.inf if self.available is None else float(self.available)
        least = least_of_ranks(self.ranks, own, self.device)
        return None if math.isinf(least) else least

    def fits(self, batch: MicroBatch, free: float | None) -> bool:
        """Whether a micro-batch is safe to take where so much is free."""
        return free is None or self.needed_at_most(batch) <= SAFE_SHARE * free

    def first_that_fits(self, config: MiniMindConfig, choices: Sequence[int], T: int, free: float | None) -> int:
        """The first of the numbers of rows that fits; the last one where none does: `refuse_too_much` and `warning` tell that."""
        for rows in choices:
            if self.fits(MicroBatch(config, rows, T, self.settings.gradient_checkpointing), free):
                return rows
        return choices[-1]

    def note(self, config: MiniMindConfig, rows: int, T: int) -> None:
        """What will be trained: `refuse_too_much`, `warning` and `advice` speak of it."""
        self.asked = MicroBatch(config, rows, T, self.settings.gradient_checkpointing)

    def refuse_too_much(self) -> None:
        """Errors: UserError where the device surely has too little for what was noted."""
        assert self.asked is not None
        self.check_weights(self.asked.config)
        needed = self.needed(self.asked)
        if self.total is not None and needed > SURELY_TOO_MUCH * self.total:
            raise UserError(
                f"{self._described(self.asked)} needs about {gigabytes(needed)} to train, and this machine has "
                f"{gigabytes(self.total)} on {self.device}: {self._what_fits(self.total)}"
            )

    def check_weights(self, config: MiniMindConfig) -> None:
        """Errors: UserError where not even weights, gradients and the optimiser's states fit."""
        one_row = self._one_short_row(config)
        states = one_row.weights + one_row.gradients + one_row.optimizer_states
        needed = self.ranks.sharing * states // self.group_size
        if self.total is None or needed <= self.total:
            return
        batch = MicroBatch(config, 1, min(self.settings.max_seq_len, config.max_position_embeddings), False)
        raise UserError(
            f"hidden_size {config.hidden_size}, num_hidden_layers {config.num_hidden_layers}: "
            f"{parameter_count(config) / 1e9:,.1f} billion parameters need {needed / 1e9:,.0f} GB to train, and this "
            f"machine has {self.total / 1e9:,.0f} GB on {self.device}: {self._smaller_model(batch, self.total)}"
        )

    def _one_short_row(self, config: MiniMindConfig) -> MemoryEstimate:
        """The least that training takes: of a row of two positions."""
        return training_memory(
            config, 1, 2, self.settings.optimizer, compiled=False, gradient_checkpointing=True, device=self.device.type
        )

    def warning(self) -> str | None:
        """A line where more is needed than could be had when the run began."""
        if self.asked is None or self.available is None:
            return None
        needed = self.needed(self.asked)
        if needed <= self.available:
            return None
        return (
            f"warning: {self._described(self.asked)} needs about {gigabytes(needed)}, and {gigabytes(self.available)} are "
            f"free on {self.device}: if memory runs out, {self._what_fits(self.available)}"
        )

    def advice(self) -> str:
        """What to say when an allocation has failed: what was there, what was needed, what would fit."""
        if self.asked is None:
            return "choose a smaller model, or free some memory"
        needed = self.needed(self.asked)
        there = "" if self.available is None else f"{gigabytes(self.available)} were free at the start, and "
        wanted = f"{self._described(self.asked)} needs about {gigabytes(needed)}"
        # It failed, so the estimate was too low or others have taken memory since: go well below it.
        bound = SMALLER_SHARE / SAFE_SHARE * needed
        if self.available is not None:
            bound = min(bound, self.available)
        return f"{there}{wanted}; {self._what_fits(bound)}"

    def _described(self, batch: MicroBatch) -> str:
        return f"a micro-batch of {batch.rows:,} x {batch.T:,} positions"

    def _what_fits(self, memory: float) -> str:
        """Flags with which the estimate is a safe share of `memory`, the updates being the same where possible."""
        assert self.asked is not None
        room = SAFE_SHARE * memory
        ways = []
        fewer_rows = self._fewer_rows(self.asked, room)
        if fewer_rows:
            ways.append(fewer_rows)
        if not self.asked.gradient_checkpointing:
            # It takes more time than fewer rows do, so it is for those who want the rows, or have no fewer.
            recomputed = replace(self.asked, gradient_checkpointing=True)
            flag = "--gradient_checkpointing 1"
            if self.needed(recomputed) <= room:
                ways.append(f"{flag} ({gigabytes(self.needed(recomputed))})")
            elif not ways:
                fewer_rows = self._fewer_rows(recomputed, room)
                if fewer_rows:
                    ways.append(f"{flag} {fewer_rows}")
        if not ways:
            return self._smaller_model(self.asked, memory)
        return f"{', or '.join(ways)} would fit"

    def _fewer_rows(self, batch: MicroBatch, room: float) -> str | None:
        """The flags for the most rows with which the estimate is at most `room`; None: not one row fits."""
        settings = self.settings
        smaller = same_update(settings.batch_size, settings.accumulation_steps, self._most_rows(batch, room))
        if smaller is None:
            return None
        rows, steps = smaller
        needed = self.needed(replace(batch, rows=rows))
        flags = batch_flags(settings, rows, steps)
        if settings.warmup_iters:
            # It counts micro-batches, which are more now.
            flags += f" --warmup_iters {round(settings.warmup_iters * settings.batch_size / rows)}"
        return f"{flags} ({gigabytes(needed)}, the same updates)"

    def _most_rows(self, batch: MicroBatch, room: float) -> int:
        """The most rows, fewer than the batch has, that fit; 0: none. By halving the interval: more rows take more."""
        fits, too_many = 0, batch.rows
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.needed(replace(batch, rows=middle)) <= room:
                fits = middle
            else:
                too_many = middle
        return fits

    def _smaller_model(self, batch: MicroBatch, memory: float) -> str:
        """A smaller model of the same kind of which one row fits."""
        config = batch.config
        heads = config.num_attention_heads
        width, depth = config.hidden_size, config.num_hidden_layers
        # A model of someone else's folder has no flags.
        while self.settings.from_weight == "none" and max(width, depth) > 1:
            # A head has an even number of dimensions.
            width = width // 2 // (2 * heads) * 2 * heads
            depth = max(1, depth // 2)
            if not width:
                break
            kept = {"generation": config.generation, "vocab_size": config.vocab_size, "use_moe": config.use_moe}
            smaller = MiniMindConfig(
                **kept,
                hidden_size=width,
                num_hidden_layers=depth,
                num_attention_heads=heads,
                num_key_value_heads=config.num_key_value_heads,
            )
            one_row = replace(batch, config=smaller, rows=1)
            if self.needed(one_row) <= SAFE_SHARE * memory:
                return (
                    f"choose a smaller model; --hidden_size {width} --num_hidden_layers {depth} would fit with "
                    f"--batch_size 1 ({gigabytes(self.needed(one_row))})"
                )
        return "choose a smaller model"
