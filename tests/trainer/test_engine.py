"""One update: accumulation, precision, skipping. References: brute force per document (tests/updates.py), torch.autograd."""

from functools import partial
from unittest import mock

import pytest
import torch

from dataset.batches import Assembler
from dataset.packing import Totals
from tests.faults.harness import digest
from tests.helpers import tiny_model
from tests.updates import KINDS, gradients, plan_of, reference_gradients, relative_difference
from trainer.engine import Engine, Idle
from trainer.machine.ranks import Ranks
from trainer.optim.build import build_optimizers
from trainer.pretrain.loss import n_sums, pretrain_loss
from trainer.settings import OptimizerSettings
from trainer.verify import Verifier

CPU = torch.device("cpu")
CUTS = [(1, 8), (2, 4), (8, 1)]


def make_engine(model, dtype=torch.float32, losses=None, optimizer="adamw", **options):
    """An engine of one rank, or of the `ranks` among the options."""
    optimizers = build_optimizers(model, OptimizerSettings(learning_rate=1e-3, optimizer=optimizer))
    options = {"device": CPU, "ranks": Ranks(), "n_sums": n_sums(model.config), **options}
    return Engine(model, optimizers, losses or partial(pretrain_loss, model), dtype=dtype, **options)


def batch_of(kind="dense packed", rows=range(4)):
    """(Batch, Totals) of an update of these rows alone."""
    store, plan = plan_of(kind)
    batch = Assembler(store)[plan.recipe(rows)]
    return batch, Totals(batch.n_targets, batch.n_documents)


def all_equal(xs, ys):
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def test_an_optimiser_that_is_not_fused_has_no_graphs():
    """On one CUDA GPU the trainer asks for them whatever --optimizer is, such as CONTRIBUTING.md's SGD."""
    model = tiny_model()
    engine = Engine(
        model, [torch.optim.SGD(model.parameters(), lr=0.1)], partial(pretrain_loss, model), device=CPU, dtype=torch.float32,
        ranks=Ranks(), n_sums=n_sums(model.config), cuda_graphs=True,
    )  # fmt: skip
    before = [p.detach().clone() for p in engine.parameters]
    engine.micro_batch(*batch_of(), last=True)
    engine.update(0.1)
    assert engine.graphs is None and not all_equal(engine.parameters, before)


@pytest.mark.parametrize("every", [0, 1])
def test_an_update_is_one_call(every):
    """Reference: its parts by hand. None and an Idle batch add nothing; requests are asked for once, also if it is computed twice."""
    (first, _), (second, _), (_, totals) = batch_of(rows=range(2)), batch_of(rows=range(2, 4)), batch_of()
    by_hand, engine = make_engine(tiny_model()), make_engine(tiny_model())
    by_hand.micro_batch(first, totals)
    by_hand.micro_batch(second, totals, last=True)
    by_hand.update(1e-3, save=True)
    train, sums, requests = Verifier(engine, every).train, [], mock.Mock(return_value=(0, True))
    for _ in train([first, None, Idle(first), second], totals, 1e-3, requests):
        sums.append(float(engine.sums[0]))
    assert sums[0] == sums[1] == sums[2] < sums[3] == float(by_hand.sums[0])
    assert all_equal(engine.parameters, by_hand.parameters) and requests.call_count == 1
    assert engine.poll() == by_hand.poll() and by_hand.poll()[-1].save == 1


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_do_not_depend_on_the_micro_batches(kind):
    """1x8, 2x4, 8x1 against one big batch document by document, the ragged tail of the epoch included: 1e-6 in fp32."""
    reference = reference_gradients(kind)
    cuts = [gradients(kind, *cut) for cut in CUTS]
    assert len(reference) == 3
    for ours in cuts:
        assert relative_difference(ours, reference) < 1e-6
        assert relative_difference(ours, cuts[0]) < 1e-6


def poisoned(model, poison):
    """An objective whose loss or gradients are not finite while poison["now"] is set."""
    plain = partial(pretrain_loss, model)

    def losses(batch, totals):
        loss, sums = plain(batch, totals)
        if poison["now"] == "loss":  # infinite, with finite gradients
            loss = loss + float("inf")
        if poison["now"] == "gradient":
            loss = loss * float("nan")
        if poison["now"] == "sums":
            loss, sums = loss * float("nan"), sums * float("nan")
        return loss, sums

    return losses


@pytest.mark.parametrize("what", ["loss", "gradient", "sums"])
@pytest.mark.parametrize("optimizer, fused", [("adamw", True), ("adamw", False), ("muon", True)])
def test_non_finite_updates_are_not_applied(what, optimizer, fused):
    """Reference: a run without the poisoned update; parameters, moments and steps bitwise equal."""
    batch, totals = batch_of()
    ends = []
    for poison in (["", what, what, ""], ["", ""]):
        now, model = {"now": ""}, tiny_model()
        engine = make_engine(model, losses=poisoned(model, now), optimizer=optimizer)
        if not fused:
            engine.fused = False
            for group in engine.groups:
                group["fused"] = False
        for now["now"] in poison:
            engine.micro_batch(batch, totals)
            engine.update(1e-3)
            if now["now"]:
                assert engine.poll()[-1].skipped_in_a_row >= 1
        ends.append((engine, engine.poll()[-1], engine.collect()))
    (engine, outcome, sums), (clean, _, _) = ends
    assert outcome.skipped == 2 and outcome.skipped_in_a_row == 0
    assert all(map(torch.isfinite, map(torch.tensor, sums)))
    assert all_equal(engine.parameters, clean.parameters)
    states = [digest(one.state_dict()["optimizer"]) for one in (engine, clean)]
    assert states[0] == states[1]


def test_fp16_overflow_counts_in_a_row_from_a_scale_of_1_on():
    """The scale is halved from 8 to 1 by three updates, which are no fault of the data. The two behind them are bad."""
    engine = make_engine(tiny_model(), dtype=torch.float16)
    engine.scaler.update(8.0)
    outcomes = []
    for _ in range(5):
        # As of a finite loss whose gradients are too large for float16 at the scale of now
        for parameter in engine.parameters:
            parameter.grad = torch.full_like(parameter, float("inf"))
        engine.update(1e-3)
        outcomes.append(engine.poll()[-1])
    assert [outcome.overflow for outcome in outcomes] == [1, 1, 1, 0, 0]
    assert [outcome.skipped for outcome in outcomes] == [1, 2, 3, 4, 5]
    assert [outcome.skipped_in_a_row for outcome in outcomes] == [0, 0, 0, 1, 2]
