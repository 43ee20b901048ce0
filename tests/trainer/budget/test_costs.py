"""What a planned run takes. Reference: its events, counted one after the other."""

import pytest
import torch

from model.config import MiniMindConfig
from tests.trainer.budget.test_plan import demands
from trainer.budget import costs
from trainer.budget.costs import COMPILE_S, WARM_COMPILE_S, RunCosts
from trainer.budget.data import Data
from trainer.budget.plan import Cut, best_plan, sizes
from trainer.budget.reserves import seconds_at_end
from trainer.budget.speed import Machine
from trainer.machine.ranks import Ranks
from trainer.pretrain.settings import parse_args

MACHINE = Machine(torch.device("cpu"), torch.float32, Ranks(), 1e11)
SIZES = sizes({"vocab_size": 6400, "hidden_size": 128})


def costs_of(*words, evaluated=100_000):
    data = Data(
        vocab_size=6400,
        tokens_of_pass=2e7,
        T=512,
        fill=1.0,
        length=200.0,
        bytes_per_token=3.0,
        evaluated=evaluated,
        val_fraction=0.01,
        text_scale=1.0,
    )
    given = {word.removeprefix("--") for word in words if word.startswith("--")}
    settings = parse_args(["--budget", "10m", "--use_compile", "0", *words])
    return RunCosts(settings, data, MACHINE, "muon", given)


def evaluations_of(plan, interval):
    """How many come before the last one, one update after the other."""
    count = 0
    steps = 0
    for _ in range(plan.updates):
        before = steps
        steps += plan.cut.accumulation_steps
        count += steps // interval > before // interval
    return count


@pytest.mark.parametrize("interval", [1, 7, 10, 64, 1000])
@pytest.mark.parametrize("memory", [None, 2.5e8])
def test_the_evaluations_that_the_user_asks_for_are_planned(interval, memory):
    """They may take more time than the updates; where the memory cuts these, an interval has fewer of them."""
    costs = costs_of("--eval_interval", str(interval), evaluated=10_000)
    plan = best_plan(SIZES, demands(memory=memory), costs)
    assert (plan.cut.accumulation_steps > 1) == (memory is not None)
    count = 1 + evaluations_of(plan, interval)
    took = seconds_at_end(True) + count * costs.evaluation_seconds(plan.config, plan.rows)
    assert plan.other_seconds == pytest.approx(took, rel=0.01, abs=costs.evaluation_seconds(plan.config, plan.rows))
    assert plan.seconds + plan.other_seconds == pytest.approx(600, rel=0.02)


def test_without_an_interval_evaluations_take_little_and_0_means_none():
    free = costs_of(evaluated=10_000)
    plan = best_plan(SIZES, demands(), free)
    assert 1 <= free.evaluations(plan.config, plan.cut, plan.seconds) <= 10
    assert plan.seconds > 0.9 * 600
    none = costs_of("--eval_interval", "0")
    assert none.evaluations(plan.config, plan.cut, plan.seconds) == 0


def test_what_was_compiled_for_a_measurement_serves_its_width_and_micro_batch_alone(monkeypatch):
    monkeypatch.setattr(costs, "what_the_compiler_lacks", lambda device: None)
    monkeypatch.setattr(costs, "measured_seconds", lambda *_, **__: (0.1, 0.1))
    planned = costs_of("--use_compile", "1", evaluated=0)
    plan = best_plan(SIZES, demands(), planned)
    cold = planned.other_seconds(plan.config, plan.cut, plan.seconds)
    planned.measure(plan)
    warm = planned.other_seconds(plan.config, plan.cut, plan.seconds)
    assert cold - warm == pytest.approx(COMPILE_S - WARM_COMPILE_S)
    deeper = MiniMindConfig(vocab_size=6400, hidden_size=128, num_hidden_layers=plan.config.num_hidden_layers + 1)
    assert planned.other_seconds(deeper, plan.cut, plan.seconds) == pytest.approx(warm)
    of_other_rows = Cut(2 * plan.cut.batch_size, 1, plan.cut.at_once)
    assert planned.other_seconds(plan.config, of_other_rows, plan.seconds) == pytest.approx(cold)
