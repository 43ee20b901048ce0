"""What a planned run takes. Reference: its events, counted one after the other."""

from dataclasses import replace

import numpy as np
import pytest

from common.start import ROOT
from model.config import ModelConfig
from tests.helpers import write_texts
from tests.trainer.budget.test_best_plan import costs_of, text_of
from trainer.batching import Batching
from trainer.budget import costs, planner
from trainer.budget.clock import FILES_S, REPORT_S
from trainer.budget.costs import Timed, count_text, head_ids_for
from trainer.budget.measured import CACHED_SHARE
from trainer.budget.planner import batchings, best_plan, sizes, with_best_head, with_best_rows
from trainer.machine.compiling import COMPILE_SECONDS
from trainer.machine.ranks import Ranks
from trainer.pretrain.data import DOCUMENTS
from trainer.pretrain.settings import PretrainSettings

SIZES = sizes({"vocab_size": 6400, "hidden_size": 128})
CONFIG = ModelConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.fixture(autouse=True)
def nothing_has_passed(monkeypatch, tmp_path):
    """Of the budget, and nothing was measured."""
    monkeypatch.setattr(costs, "seconds_since_start", lambda: 0.0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("interval", [1, 10, 1000])
@pytest.mark.parametrize("memory", [None, 4e8])
def test_the_evaluations_that_the_user_asks_for_are_planned(interval, memory):
    """They may take more time than the updates; where the memory cuts these, an interval has fewer of them."""
    costs = costs_of(f"--budget 10m --eval_interval {interval}", memory=memory, evaluated=10_000)
    plan = best_plan(SIZES, costs)
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
    plan = best_plan(SIZES, free)
    assert 1 <= free.evaluations(plan.config, plan.batching, plan.seconds) <= 10
    assert plan.seconds > 0.9 * 600
    assert costs_of("--budget 10m --eval_interval 0").evaluations(plan.config, plan.batching, plan.seconds) == 0


def test_a_plan_begins_with_weights_that_copy():
    for words, generation, scheme in (
        ("", "minimind2", "induction"),
        ("", "minimind3", "zero_out"),
        # Other rates were not measured with it.
        ("--learning_rate 1e-3", "minimind2", "zero_out"),
        ("--init_scheme default", "minimind2", "default"),
    ):
        shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        assert costs_of(words).init_scheme(ModelConfig(generation=generation, **shape)) == scheme


# of a micro-batch, the rest of an update, and a first update, which takes 20 s more with compiling
TIMED = Timed(0.1, 0.1, 20.3)


def test_what_was_compiled_for_a_measurement_serves_the_run():
    """Any number of layers of its width, in micro-batches of its rows; no other plan is left."""
    planned = costs_of(compiled=True)
    plan = best_plan(SIZES, planned)
    cold = planned.other_seconds(plan.config, plan.batching, plan.seconds)
    planned.learn(plan.config, plan.batching, TIMED, compiled=True)
    assert cold - planned.other_seconds(plan.config, plan.batching, plan.seconds) == pytest.approx(COMPILE_SECONDS)
    of_depth = {"vocab_size": 6400, "num_hidden_layers": 5}
    (deeper,), (wider,) = (sizes({**of_depth, "hidden_size": width}) for width in (128, 192))
    assert {batching.batch_size for batching in batchings(deeper, planned)} == {plan.batching.batch_size}
    assert not batchings(wider, planned)


def test_seconds_of_compiling_are_remembered_beside_the_cache():
    """What was compiled before takes a share of them, until that was measured too."""
    first = costs_of(compiled=True)
    small, large = (ModelConfig(hidden_size=width) for width in (128, 256))
    batching = Batching(Ranks(), 8, 8, 8)
    assert first.compile_seconds(small, batching) == COMPILE_SECONDS
    first.learn(small, batching, TIMED, compiled=True)
    second = costs_of(compiled=True)
    assert second.compile_seconds(large, batching) == pytest.approx(20)
    assert second.compile_seconds(small, batching) == pytest.approx(20 * CACHED_SHARE)
    second.learn(small, batching, TIMED._replace(first=2.3), compiled=True)
    assert costs_of(compiled=True).compile_seconds(small, batching) == pytest.approx(2)
    # Beside other programs it takes as long as nothing would be compiled for.
    second.learn(large, batching, TIMED._replace(first=1000.0), compiled=True)
    other = ModelConfig(hidden_size=128, num_attention_heads=2)
    assert second.compile_seconds(other, batching) == pytest.approx(20)
    # Two processes record what each has measured; a file that is damaged is as none.
    first.measured.remember({"speed": 2.0})
    assert costs_of().measured.numbers == second.measured.numbers | {"speed": 2.0}
    first.measured.path.write_text('{"seconds to compile new code": NaN, "speed": "fast", "x": 1e999, ')
    assert costs_of().measured.numbers == {}
    first.measured.path.write_text('{"seconds to compile new code": NaN, "speed": "fast", "x": 1e999}')
    assert costs_of(compiled=True).compile_seconds(other, batching) == COMPILE_SECONDS


@pytest.mark.parametrize("seconds_left, compiles", [(180.0, False), (200.0, True)])
def test_a_budget_is_compiled_for_if_it_earns_that_back(monkeypatch, seconds_left, compiles):
    """By hand: 40 s of compiling, and 1.71 updates instead of 1 in the rest; at least 1.35 times as many are asked for."""
    monkeypatch.setattr(costs, "failure_to_compile", lambda device_type: None)
    monkeypatch.setattr(costs, "seconds_since_start", lambda: 600 - seconds_left)
    assert costs_of().is_worth_compiling(COMPILE_SECONDS) == compiles


def test_a_disturbed_measurement_does_not_end_the_run():
    """The machine seems to be a million times slower than it is."""
    planned = costs_of(evaluated=10_000)
    estimate = planned.update_seconds(CONFIG, 2)
    planned.learn(CONFIG, Batching(Ranks(), 2, 2, 2), Timed(1e4, 1e4, 1e4), compiled=False)
    assert planned.update_seconds(CONFIG, 2) == 4 * estimate
    assert best_plan(SIZES, planned).updates > 0


@pytest.mark.parametrize(
    ("longest", "words", "rows"),
    [
        (4000, "--budget_flops 3e15", 1024),
        (300, "--budget_flops 3e15", 512),
        # Little is learned in few tokens.
        (4000, "--budget_flops 3e12", 512),
        (4000, "--budget_flops 3e15 --max_seq_len 256", 256),
        (4000, "--budget_flops 3e15 --pack 0", 512),
        # Plain code computes the scores of all pairs of a row.
        (4000, "--budget 2h --use_compile 0", 512),
    ],
)
def test_long_documents_get_long_rows(monkeypatch, longest, words, rows):
    """Where a plan may choose them, and expects 1 % less loss: docs/experiments.md, "Longer rows"."""

    def count_text(settings, *_):
        return text_of(4e9, T=settings.max_seq_len, context=min(settings.max_seq_len, longest))

    monkeypatch.setattr(planner, "count_text", count_text)
    monkeypatch.setattr(planner, "head_ids_for", lambda *_: 0)
    costs_of_rows = costs_of(words, compiled="--use_compile" not in words)
    costs_of_rows.text = count_text(costs_of_rows.settings)
    found = with_best_rows(sizes({"vocab_size": 6400, "hidden_size": 256}), costs_of_rows, DOCUMENTS)
    assert found.text.rows.T == found.settings.max_seq_len == rows


@pytest.mark.parametrize(
    ("tokens", "words", "head_ids"),
    [
        (4e9, "--budget_flops 2e14", 768),
        # Eight passes over a megabyte leave budget unused.
        (4e5, "--budget_flops 1e15", 0),
        (4e5, "--budget_flops 1e15 --sampled_softmax 1024", 1024),
        (4e5, "--budget_tokens 3e6", 768),
    ],
)
def test_a_head_is_sampled_where_work_is_short_not_text(monkeypatch, tokens, words, head_ids):
    """docs/experiments.md, "A sampled head"."""
    monkeypatch.setattr(costs, "rows_targets", lambda corpus: np.arange(300)[None])
    whole = costs_of(words, compiled=True, tokens_of_pass=tokens)
    sampled = replace(whole, head_ids=head_ids_for(whole.settings, whole.text, "cpu"))
    assert with_best_head(SIZES, sampled).head_ids == head_ids


def test_updates_are_timed_on_the_text_and_bits_are_told_of_the_validation(tmp_path, tokenizer):
    trained, evaluated = "One text is trained. " * 40, "另一篇只用来评估。" * 20
    data_path, val_path = (write_texts(tmp_path / f"{text[:3]}.jsonl", [text]) for text in (trained, evaluated))
    settings = PretrainSettings(data_path=[data_path], val_path=[val_path], max_seq_len=64)
    settings.tokenizer_path = str(ROOT / "model")
    text = count_text(replace(settings, user_set=frozenset({"val_path"})))
    rows = text.corpus.assembler(2)[text.rows.recipe(range(2))]
    assert rows.input_ids.shape == (2, 64)
    assert all(tokenizer.decode(row, skip_special_tokens=True) in trained for row in rows.input_ids)
    # The end of a document is predicted too.
    predicted = len(tokenizer(evaluated, add_special_tokens=False)["input_ids"]) + 1
    assert text.corpus.bytes_per_target() == len(evaluated.encode()) / predicted
