"""One update through the engine, and its reference: every document alone through autograd, for tests of gradients."""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from dataset.batches import Assembler, UpdateSchedule
from dataset.loader import Loader
from dataset.packing import EpochPlan
from tests.dataset.test_packing import make_store
from tests.helpers import tiny_model
from trainer.engine import Engine, Idle
from trainer.machine.ranks import Ranks
from trainer.pretrain.loss import n_sums, pretrain_loss
from trainer.sharding import is_sharded, shard_model

T = 16
# {kind: (fields of the config, whether rows are packed)}
KINDS = {"dense packed": ({}, True), "dense padded": ({}, False)}
KINDS |= {"moe packed": ({"use_moe": True}, True), "moe padded": ({"use_moe": True}, False)}
# The newer generation. Its auxiliary loss would depend on how an update is cut, so it is off.
MINIMIND3 = {
    "minimind3": ({"generation": "minimind3"}, True),
    "minimind3 moe": ({"generation": "minimind3", "use_moe": True, "router_aux_loss_coef": 0.0}, True),
}
ALL_KINDS = {**KINDS, **MINIMIND3}
# 2 to 3T tokens: ragged masks, documents in pieces. Both plans leave a tail of fewer than 8 rows.
LENGTHS = [5, 17, 2, 31, 16, 3, 48, 9, 12, 17, 4, 26, 7, 2, 40, 11, 16, 6, 33]


class Recorder(torch.optim.SGD):
    """Keeps the whole gradients of each update and leaves the parameters alone."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1.0)
        self.updates = []

    def step(self, closure=None):
        gradients = [p.grad for p in self.param_groups[0]["params"]]
        self.updates.append([g.full_tensor() if is_sharded(g) else g.clone() for g in gradients])


def plan_of(kind):
    """(store, EpochPlan) of a kind."""
    store = make_store(LENGTHS, np.random.default_rng(0).integers(3, 97, sum(LENGTHS)).astype(np.uint16))
    return store, EpochPlan(store.offsets, T, seed=3, epoch=0, pack=ALL_KINDS[kind][1])


def gradients(kind, batch_size, accumulation_steps, ranks=None, group_size=1, prepare=None):
    """The gradients of every update of an epoch, [update][parameter], cut in this way; group_size ranks have the model together,
    on which prepare(model) is called before."""
    ranks = ranks or Ranks()
    # Other weights on each rank: all get those of rank 0.
    model = tiny_model(ranks.rank, **ALL_KINDS[kind][0])
    if prepare is not None:
        prepare(model)
    if group_size > 1:
        shard_model(model, ranks, torch.device("cpu"))
    recorder = Recorder(model.parameters())
    engine = Engine(
        model, [recorder], partial(pretrain_loss, model), device=torch.device("cpu"), dtype=torch.float32,
        ranks=ranks, grad_clip=0, n_sums=n_sums(model.config),
    )  # fmt: skip
    store, plan = plan_of(kind)
    assembler = Assembler(store)
    rows = batch_size * accumulation_steps * ranks.world_size
    schedule = UpdateSchedule(plan.n_rows, rows, batch_size, ranks.world_size)
    for update, batches in Loader(assembler, ranks.rank).updates(plan.recipe, schedule):
        first, end = schedule.rows(update)
        if engine.is_sharded:
            idle = Idle(assembler[plan.recipe(range(first, first + 1))])
            batches = [idle if batch is None else batch for batch in batches]
        assert len(batches) == len([*engine.train(batches, plan.totals(first, end), rate=1.0)])
    return recorder.updates


def reference_gradients(kind, rows_of_update=8):
    """The same from the formula: each piece alone through forward(), one backward() over all pieces of an update."""
    model = tiny_model(**ALL_KINDS[kind][0])
    store, plan = plan_of(kind)
    updates = []
    for first in range(0, plan.n_rows, rows_of_update):
        losses, aux_losses, targets = [], [], 0
        for row in range(first, min(first + rows_of_update, plan.n_rows)):
            for document, start, pairs in plan.pieces_of_row(row):
                begin = store.offsets[document] + start
                ids = torch.from_numpy(store.tokens[begin : begin + pairs + 1].astype("int64"))
                output = model(ids[None, :-1])
                losses.append(F.cross_entropy(output.logits[0], ids[1:], reduction="sum"))
                aux_losses.append(output.aux_loss)
                targets += pairs
        loss = torch.stack(losses).sum() / targets + torch.stack(aux_losses).mean()
        updates.append(torch.autograd.grad(loss, list(model.parameters())))
    return updates


def relative_difference(ours, reference):
    """Largest relative difference (2-norm over all parameters) among the updates."""
    flat = [[torch.cat([g.reshape(-1) for g in update]).double() for update in side] for side in (ours, reference)]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*flat, strict=True))
