"""What a planned run takes. Reference: its events, counted one after the other."""

import mmap
import os
import statistics
from dataclasses import replace

import pytest
import torch

from common.start import ROOT
from model.config import MiniMindConfig
from tests.helpers import write_texts
from tests.trainer.budget.test_best_plan import best, text_of
from trainer.batching import Batching
from trainer.budget import costs, planner
from trainer.budget.clock import FILES_S, REPORT_S
from trainer.budget.costs import WARM_COMPILE_S, RunCosts, count_text
from trainer.budget.planner import sizes, with_best_rows
from trainer.machine.compiling import COMPILE_SECONDS
from trainer.machine.ranks import Ranks, SharedMemory
from trainer.pretrain.data import DOCUMENTS
from trainer.pretrain.settings import PretrainSettings

MACHINE = {"ranks": Ranks(), "device": torch.device("cpu"), "dtype": torch.float32, "product_rate": 1e11}
SIZES = sizes({"vocab_size": 6400, "hidden_size": 128})


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
    took = FILES_S + REPORT_S + count * costs.evaluation_seconds(plan.config, plan.batching.rows)
    assert plan.other_seconds == pytest.approx(
        took, rel=0.01, abs=costs.evaluation_seconds(plan.config, plan.batching.rows)
    )
    assert plan.seconds + plan.other_seconds == pytest.approx(600, rel=0.02)


def test_without_an_interval_evaluations_take_little_and_0_means_none():
    free = costs_of(evaluated=10_000)
    plan = best(SIZES, free)
    assert 1 <= free.evaluations(plan.config, plan.batching, plan.seconds) <= 10
    assert plan.seconds > 0.9 * 600
    none = costs_of("--eval_interval", "0")
    assert none.evaluations(plan.config, plan.batching, plan.seconds) == 0


@pytest.mark.parametrize(
    ("words", "generation", "scheme"),
    [
        ((), "minimind2", "induction"),
        ((), "minimind3", "zero_out"),
        # Other rates were not measured with it.
        (("--learning_rate", "1e-3"), "minimind2", "zero_out"),
        (("--init_scheme", "default"), "minimind2", "default"),
    ],
)
def test_a_plan_begins_with_weights_that_copy(words, generation, scheme):
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    assert costs_of(*words).init_scheme(MiniMindConfig(generation=generation, **shape)) == scheme


def test_what_was_compiled_for_a_measurement_serves_its_width_and_micro_batch_alone(monkeypatch):
    monkeypatch.setattr(costs, "failure_to_compile", lambda device_type: None)
    monkeypatch.setattr(RunCosts, "timed", lambda *_: (0.1, 0.1))
    planned = costs_of("--use_compile", "1")
    plan = best(SIZES, planned)
    cold = planned.other_seconds(plan.config, plan.batching, plan.seconds)
    planned.measure(plan.config, plan.batching, plan.updates)
    warm = planned.other_seconds(plan.config, plan.batching, plan.seconds)
    assert cold - warm == pytest.approx(COMPILE_SECONDS - WARM_COMPILE_S)
    deeper = MiniMindConfig(vocab_size=6400, hidden_size=128, num_hidden_layers=plan.config.num_hidden_layers + 1)
    assert planned.other_seconds(deeper, plan.batching, plan.seconds) == pytest.approx(warm)
    of_other_rows = replace(plan.batching, micro_rows=2 * plan.batching.micro_rows)
    assert planned.other_seconds(plan.config, of_other_rows, plan.seconds) == pytest.approx(cold)


CONFIG = MiniMindConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize(("least_seconds", "rounds"), [(2.0, 5), (10.0, 15)])
def test_a_measurement_lasts_until_the_machine_is_as_fast_as_in_the_run(monkeypatch, least_seconds, rounds):
    """The first five updates of two micro-batches take 1.2 s, later ones 0.4 s. A short one ends after five, as it always did."""
    durations = []

    def seconds(work, device):
        work()
        durations.append(0.6 if len(durations) < 10 else 0.2)
        return durations[-1]

    monkeypatch.setattr(costs, "seconds", seconds)
    monkeypatch.setattr(RunCosts, "min_timed_seconds", lambda _: least_seconds)
    of_micro_batch, of_rest = costs_of(T=8).timed(CONFIG, 2, times=5)
    assert len(durations) == 2 * rounds
    assert of_micro_batch == statistics.median(durations[::2]) and of_rest == 0
    assert of_micro_batch == (0.2 if rounds > 10 else 0.6)


def test_a_disturbed_measurement_does_not_end_the_run(monkeypatch):
    """The machine seems to be a million times slower than it is."""
    monkeypatch.setattr(RunCosts, "timed", lambda *_: (1e4, 1e4))
    planned = costs_of(evaluated=10_000)
    estimate = planned.update_seconds(CONFIG, 2)
    planned.measure(CONFIG, Batching(Ranks(), 2, 2, 2), updates=100)
    assert planned.update_seconds(CONFIG, 2) == 4 * estimate
    assert best(SIZES, planned).updates > 0


def test_what_a_measurement_shares_is_given_back(monkeypatch, tmp_path):
    """Reference: the size of the file, with Muon's matrices in it while updates are timed."""
    file = os.open(tmp_path / "memory", os.O_RDWR | os.O_CREAT)
    ranks = Ranks(memory=SharedMemory(file, 1))
    sizes_then = []
    monkeypatch.setattr(costs, "seconds", lambda *_: sizes_then.append(os.fstat(file).st_size) or 0.1)
    costs_of(machine={"ranks": ranks}).measure(CONFIG, Batching(Ranks(), 2, 2, 2), updates=100)
    assert os.fstat(file).st_size == mmap.ALLOCATIONGRANULARITY < sizes_then[0]


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
