"""benchmarks/sweep.py. References: figures whose means and deviations are known, and the flags that reach the trainer."""

import pytest

from benchmarks import sweep
from benchmarks.arguments import sweep_parser
from benchmarks.sweep import AS_PLANNED, row, variants_of, verdict
from benchmarks.trained import Outcome
from common.errors import UserError


def test_variants_are_names_and_flags():
    found = variants_of(["half the batch=--batch_size 2", "prompts=--sample_prompts 'a b' --muon_lr 0.02"])
    assert found == {
        AS_PLANNED: [],
        "half the batch": ["--batch_size", "2"],
        "prompts": ["--sample_prompts", "a b", "--muon_lr", "0.02"],
    }


@pytest.mark.parametrize("words", [["--muon_lr 0.02"], ["=--muon_lr 0.02"], ["a=--x 1", "a=--x 2"], [f"{AS_PLANNED}="]])
def test_a_variant_without_a_name_of_its_own_is_refused(words):
    with pytest.raises(UserError, match="give NAME=FLAGS"):
        variants_of(words)


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ([2.0, 2.1, 2.2], "within the spread"),
        ([1.6, 1.7, 1.8], "better"),
        ([2.4, 2.5, 2.6], "worse"),
        # By the larger one of both deviations.
        ([1.0, 1.8, 2.6], "within the spread"),
        ([1.5], "one seed"),
    ],
)
def test_the_verdict_is_by_the_spread(figures, said):
    assert verdict(figures, [2.0, 2.1, 2.2]) == said


def test_a_row_has_mean_deviation_and_ratio():
    planned = [Outcome(1, figure, 1.0, 1, 1) for figure in (2.0, 2.2)]
    ends = [Outcome(1, figure, 1.0, 1, 1) for figure in (1.0, 1.1)]
    assert row("some", ["--a", "1"], ends, planned) == "| some | `--a 1` | 1.0500 ± 0.0707 | 0.5000 | better |"


def test_a_run_gets_the_flags_of_all_and_its_own(monkeypatch, tmp_path):
    """The variant's come last, so that they count."""
    seen = []

    def instead(folder, flags):
        seen.append((folder, flags))
        return Outcome(1, 2.0, 3.0, 4, 5)

    monkeypatch.setattr(sweep, "trained", instead)
    words = ["--data_path", "a", "b", "--val_path", "v", "--work", str(tmp_path), "--flags", "--cpu_processes 1"]
    args = sweep_parser().parse_args([*words, "--variants", "x=--muon_lr 1"])
    sweep.run(args, "half the batch", ["--batch_size", "2"], 7)
    ((folder, flags),) = seen
    assert folder == tmp_path / "1e+13_128_half_the_batch_seed7"
    assert flags[-4:] == ["--cpu_processes", "1", "--batch_size", "2"]
    assert flags[flags.index("--data_path") + 1 :][:2] == ["a", "b"]
    assert flags[flags.index("--seed") + 1] == "7"
