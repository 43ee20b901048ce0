"""What a planned run takes. Reference: its events, counted one after the other."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.start import ROOT
from model.config import ModelConfig
from tests.helpers import write_texts
from tests.trainer.budget.test_best_plan import best, text_of
from trainer.batching import Batching
from trainer.budget import costs, planner
from trainer.budget.clock import FILES_S, REPORT_S
from trainer.budget.compile_times import CACHED_SHARE
from trainer.budget.costs import RunCosts, count_text
from trainer.budget.planner import batchings, sizes, with_best_head, with_best_rows
from trainer.machine.compiling import COMPILE_SECONDS
from trainer.machine.ranks import Ranks
from trainer.pretrain.data import DOCUMENTS
from trainer.pretrain.settings import PretrainSettings

MACHINE = {"ranks": Ranks(), "device": torch.device("cpu"), "dtype": torch.float32, "product_rate": 1e11}
SIZES = sizes({"vocab_size": 6400, "hidden_size": 128})
CONFIG = ModelConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.fixture(autouse=True)
def nothing_has_passed(monkeypatch):
    """Of the budget."""
    monkeypatch.setattr(costs, "seconds_since_start", lambda: 0.0)


def costs_of(*words, evaluated=0, machine=None, **data):
    settings = PretrainSettings.parse(["--budget", "10m", "--use_compile", "0", *words])
    return RunCosts(settings, text_of(evaluated=evaluated, **data), **{**MACHINE, **(machine or {})})


@pytest.mark.parametrize("interval", [1, 10, 1000])
@pytest.mark.parametrize("memory", [None, 4e8])
def test_the_evaluations_that_the_user_asks_for_are_planned(interval, memory):
    """They may take more time than the updates; where the memory cuts these, an interval has fewer of them."""
    costs = costs_of("--eval_interval", str(interval), machine={"available_memory": memory}, evaluated=10_000)
    plan = best(SIZES, costs)
    assert (plan.batching.micro_batches > 1) == (memory is not None)
    # The last one, and one behind each update in which the steps come to a multiple of the interval.
    each = plan.batching.micro_batches
    ends = range(each, each * plan.updates + 1, each)
    count = 1 + sum(end // interval > (end - each) // interval for end in ends)
    one = costs.evaluation_seconds(plan.config, plan.batching.rows)
    assert plan.other_seconds == pytest.approx(FILES_S + REPORT_S + count * one, rel=0.01, abs=one)
    assert plan.seconds + plan.other_seconds == pytest.approx(600, rel=0.02)


def test_without_an_interval_evaluations_take_little_and_0_means_none():
    free = costs_of(evaluated=10_000)
    plan = best(SIZES, free)
    assert 1 <= free.evaluations(plan.config, plan.batching, plan.seconds) <= 10
    assert plan.seconds > 0.9 * 600
    assert costs_of("--eval_interval", "0").evaluations(plan.config, plan.batching, plan.seconds) == 0


def test_a_plan_begins_with_weights_that_copy():
    for words, generation, scheme in (
        ((), "minimind2", "induction"),
        ((), "minimind3", "zero_out"),
        # Other rates were not measured with it.
        (("--learning_rate", "1e-3"), "minimind2", "zero_out"),
        (("--init_scheme", "default"), "minimind2", "default"),
    ):
        shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        assert costs_of(*words).init_scheme(ModelConfig(generation=generation, **shape)) == scheme


def compiling_costs(monkeypatch, tmp_path, use_compile):
    """Costs with an empty cache of compiled code, where an update takes 0.2 s, and a first one with compiling 20 s more."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(costs, "failure_to_compile", lambda device_type: None)
    monkeypatch.setattr(RunCosts, "timed", lambda *_: (0.1, 0.1, 20.3))
    return costs_of("--use_compile", use_compile)


def test_what_was_compiled_for_a_measurement_serves_the_run(monkeypatch, tmp_path):
    """Any number of layers of its width, in micro-batches of its rows; no other plan is left."""
    planned = compiling_costs(monkeypatch, tmp_path, "1")
    plan = best(SIZES, planned)
    cold = planned.other_seconds(plan.config, plan.batching, plan.seconds)
    planned.measure(plan.config, plan.batching, plan.updates, compiled=True)
    assert cold - planned.other_seconds(plan.config, plan.batching, plan.seconds) == pytest.approx(COMPILE_SECONDS)
    of_depth = {"vocab_size": 6400, "num_hidden_layers": 5}
    (deeper,), (wider,) = (sizes({**of_depth, "hidden_size": width}) for width in (128, 192))
    assert {batching.batch_size for batching in batchings(deeper, planned)} == {plan.batching.batch_size}
    assert not batchings(wider, planned)


def test_seconds_of_compiling_are_remembered_beside_the_cache(monkeypatch, tmp_path):
    """What was compiled before takes a share of them, until that was measured too."""
    first = compiling_costs(monkeypatch, tmp_path, "1")
    small, large = (ModelConfig(hidden_size=width) for width in (128, 256))
    batching = Batching(Ranks(), 8, 8, 8)
    assert first.compile_seconds(small, batching) == COMPILE_SECONDS
    first.measure(small, batching, updates=100, compiled=True)
    second = compiling_costs(monkeypatch, tmp_path, "1")
    assert second.compile_seconds(large, batching) == pytest.approx(20)
    assert second.compile_seconds(small, batching) == pytest.approx(20 * CACHED_SHARE)
    monkeypatch.setattr(RunCosts, "timed", lambda *_: (0.1, 0.1, 2.3))
    second.measure(small, batching, updates=100, compiled=True)
    assert compiling_costs(monkeypatch, tmp_path, "1").compile_seconds(small, batching) == pytest.approx(2)
    # Beside other programs it takes as long as nothing would be compiled for.
    monkeypatch.setattr(RunCosts, "timed", lambda *_: (0.1, 0.1, 1000.0))
    second.measure(large, batching, updates=100, compiled=True)
    assert second.compile_seconds(ModelConfig(hidden_size=128, num_attention_heads=2), batching) == pytest.approx(20)


@pytest.mark.parametrize("seconds_left, compiles", [(180.0, False), (200.0, True)])
def test_a_budget_is_compiled_for_if_it_earns_that_back(monkeypatch, tmp_path, seconds_left, compiles):
    """By hand: 40 s of compiling, and 1.71 updates instead of 1 in the rest; at least 1.35 times as many are asked for."""
    planned = compiling_costs(monkeypatch, tmp_path, "auto")
    monkeypatch.setattr(costs, "seconds_since_start", lambda: 600 - seconds_left)
    assert planned.is_worth_compiling(COMPILE_SECONDS) == compiles


def test_a_disturbed_measurement_does_not_end_the_run(monkeypatch):
    """The machine seems to be a million times slower than it is."""
    monkeypatch.setattr(RunCosts, "timed", lambda *_: (1e4, 1e4, 1e4))
    planned = costs_of(evaluated=10_000)
    estimate = planned.update_seconds(CONFIG, 2)
    planned.measure(CONFIG, Batching(Ranks(), 2, 2, 2), updates=100, compiled=False)
    assert planned.update_seconds(CONFIG, 2) == 4 * estimate
    assert best(SIZES, planned).updates > 0


@pytest.mark.parametrize(
    ("longest", "words", "rows"),
    [
        (4000, ["--budget_flops", "3e15"], 1024),
        (300, ["--budget_flops", "3e15"], 512),
        # Little is learned in few tokens.
        (4000, ["--budget_flops", "3e12"], 512),
        (4000, ["--budget_flops", "3e15", "--max_seq_len", "256"], 256),
        (4000, ["--budget_flops", "3e15", "--pack", "0"], 512),
        # Plain code computes the scores of all pairs of a row.
        (4000, ["--budget", "2h", "--use_compile", "0"], 512),
    ],
)
def test_long_documents_get_long_rows(monkeypatch, longest, words, rows):
    """Where a plan may choose them, and expects 1 % less loss: docs/experiments.md, "Longer rows"."""

    def count_text(settings, *_, **__):
        T = settings.max_seq_len
        return text_of(4e9, T=T, context=min(T, longest))

    monkeypatch.setattr(planner, "count_text", count_text)
    monkeypatch.setattr(costs, "failure_to_compile", lambda device_type: None)
    settings = PretrainSettings.parse(words)
    costs_of_rows = RunCosts(settings, count_text(settings), **MACHINE)
    found = with_best_rows(sizes({"vocab_size": 6400, "hidden_size": 256}), costs_of_rows, DOCUMENTS)
    assert found.text.rows.T == found.settings.max_seq_len == rows


@pytest.mark.parametrize(
    ("tokens", "words", "head_ids"),
    [
        (4e9, ["--budget_flops", "2e14"], 768),
        # Eight passes over a megabyte leave budget unused.
        (4e5, ["--budget_flops", "1e15"], 0),
        (4e5, ["--budget_flops", "1e15", "--sampled_softmax", "1024"], 1024),
        (4e5, ["--budget_tokens", "3e6"], 768),
    ],
)
def test_a_head_is_sampled_where_work_is_short_not_text(monkeypatch, tokens, words, head_ids):
    """docs/experiments.md, "A sampled head"."""
    monkeypatch.setattr(costs, "rows_targets", lambda corpus: np.arange(300)[None])
    found = with_best_head(SIZES, RunCosts(PretrainSettings.parse(words), text_of(tokens), **MACHINE))
    assert found.head_ids == head_ids


def test_updates_are_timed_on_the_text_and_bits_are_told_of_the_validation(tmp_path, tokenizer):
    """Reference: what the files say."""
    trained, evaluated = "One text is trained. " * 40, "另一篇只用来评估。" * 20
    data_path, val_path = (write_texts(tmp_path / f"{text[:3]}.jsonl", [text]) for text in (trained, evaluated))
    settings = PretrainSettings(data_path=[data_path], val_path=[val_path], max_seq_len=64)
    settings.tokenizer_path = str(ROOT / "model")
    text = count_text(replace(settings, user_set={"val_path"}), Ranks())
    rows = text.corpus.assembler(2)[text.rows.recipe(range(2))]
    assert rows.input_ids.shape == (2, 64)
    assert all(tokenizer.decode(row, skip_special_tokens=True) in trained for row in rows.input_ids)
    # The end of a document is predicted too.
    predicted = len(tokenizer(evaluated, add_special_tokens=False)["input_ids"]) + 1
    assert text.corpus.bytes_per_target() == len(evaluated.encode()) / predicted
