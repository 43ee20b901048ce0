"""Timing updates of a planned size, by all ranks at once, as they will train."""

from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from dataset.batches import Batch
from dataset.loader import to_device
from dataset.packing import Totals
from model.model_minimind import MiniMindLM
from trainer.budget.costs import RunCosts, Timed
from trainer.budget.plan import BudgetPlan
from trainer.cuda_graphs import may_record
from trainer.engine import make_engine
from trainer.machine.compiling import compile_blocks
from trainer.machine.measure import seconds
from trainer.machine.ranks import Ranks, min_over_ranks
from trainer.pretrain.loss import n_sums, pretrain_loss
from trainer.pretrain.sampled_head import HeadSampler, rows_targets
from trainer.pretrain.settings import PretrainSettings

# Minimum number of updates to time, for a median; at most the share below of the run's updates
TIMED = 5
TIMED_SHARE_OF_UPDATES = 0.05
# Minimum length of a measurement, as a share of the budget, and its upper bound: just after an installation, updates took
# 0.56 s at first and 0.33 s in the run.
TIMED_SHARE = 0.01
MAX_TIMED_S = 10.0


class Timing(NamedTuple):
    """Times updates of a plan with a budget of time, on all ranks. It brings its batch, since only rank 0 has opened the text."""

    plan: BudgetPlan
    settings: PretrainSettings
    dtype: torch.dtype
    batch: Batch
    head_sampler: HeadSampler | None
    compiled: bool

    def run(self, ranks: Ranks, device: torch.device) -> Timed:
        """The times of this rank: medians, since a machine may be slower at first. The rest of an update is the exchange of gradients
        and the optimiser. A collective: ranks wait for each other, as in the run."""
        settings, config, dtype = self.settings, self.plan.config, self.dtype
        least_updates = max(1, min(TIMED, int(TIMED_SHARE_OF_UPDATES * self.plan.updates)))
        least_seconds = 0.0 if settings.dry_run else min(TIMED_SHARE * (settings.budget_seconds or 0.0), MAX_TIMED_S)
        batch = to_device(self.batch, device)
        rows, T = batch.input_ids.shape
        recomputes = settings.gradient_checkpointing
        may_use_graphs = settings.cuda_graphs != "0" and self.head_sampler is None
        model = MiniMindLM(config).train()
        model.model.embed_tokens.sparse = self.head_sampler is not None and device.type == "cpu"
        if recomputes:
            model.checkpoint_activations()
        engine = make_engine(
            model,
            partial(pretrain_loss, model, head_sampler=self.head_sampler),
            settings,
            n_sums=n_sums(config),
            identity={},
            cuda_graphs=may_record(may_use_graphs, device, ranks, dtype, recomputes, config.dropout),
            dtype=dtype,
            ranks=ranks,
            device=device,
        )
        # Also without compiling: it prepares the device for eager code as the run does.
        choice = "1" if self.compiled else "0"
        compile_blocks(model.compile_training, choice, device, (rows, T), dtype=dtype)
        micro_batch = partial(engine.micro_batch, batch, Totals(batch.n_targets, batch.n_documents))

        def last_of_update() -> None:
            # Ranks may exchange gradients in its backward pass.
            micro_batch(last=True)
            engine.update(1e-6)

        def first_update() -> None:
            micro_batch()
            last_of_update()

        first_seconds = seconds(first_update, device)
        if engine.graphs is not None:
            # This one records them.
            micro_batch()
        micro_batches: list[float] = []
        lasts: list[float] = []
        # All ranks time as many.
        while len(lasts) < least_updates or min_over_ranks(ranks, sum(micro_batches) + sum(lasts)) < least_seconds:
            micro_batches.append(seconds(micro_batch, device))
            lasts.append(seconds(last_of_update, device))
        engine.close()
        return Timed(median(micro_batches), median(lasts) - median(micro_batches), first_seconds)


def timing_of(plan: BudgetPlan, costs: RunCosts, compiled: bool) -> Timing:
    """On the text itself: the time of some kernels depends on repeated tokens, and on several documents in a row."""
    text, rows, sampler = costs.text, plan.batching.micro_rows, None
    if costs.head_ids:
        targets = rows_targets(text.corpus)
        sampler = HeadSampler(targets, plan.config.vocab_size, costs.head_ids, costs.settings.seed)
    batch = text.corpus.assembler(rows)[text.rows.recipe(range(min(rows, text.rows.n_rows)))]
    return Timing(plan, costs.settings, costs.machine.dtype, batch, sampler, compiled)
