"""benchmarks/isoflop.py. References: laws whose losses are made up by their own formula, and a parabola that is known."""

import itertools
import math
import sys

import pytest

from benchmarks import isoflop
from benchmarks.isoflop import Best, Run, best_of, fits, growth, growth_of, law_lines
from benchmarks.trained import outcome
from tests.helpers import write_corpus
from trainer.budget.laws import LossLaw
from trainer.train_pretrain import main

SIZES = (0.5e6, 1e6, 2e6, 4e6, 8e6)
FLOPS = (1e13, 4e13, 1.6e14)
# Its floor and its powers are of the grid.
LAW = LossLaw(floor=1.2, size_factor=35.0, size_power=0.24, data_factor=43.0, data_power=0.19)


def run_of(flops, parameters, loss, seed=1):
    return Run(flops, 64, seed, round(parameters), round(flops / (6 * parameters)), loss, 0.0)


def runs_of(law):
    runs = [run_of(flops, size, 0.0) for flops, size in itertools.product(FLOPS, SIZES)]
    return [run._replace(loss=law.loss(run.parameters, run.tokens)) for run in runs]


def test_a_law_is_found_again():
    best, *others = fits(runs_of(LAW))
    assert best.error < 1e-6
    assert (best.law.floor, best.law.size_power, best.law.data_power) == pytest.approx((1.2, 0.24, 0.19))
    assert best.law.size_factor == pytest.approx(35.0, rel=1e-3)
    assert best.law.data_factor == pytest.approx(43.0, rel=1e-3)
    assert min(fit.error for fit in others) > best.error


def test_the_error_of_a_fit_is_that_of_its_law():
    """Reference: the definition, computed run by run."""
    runs = [run._replace(loss=run.loss * (1 + 0.01 * (-1) ** i)) for i, run in enumerate(runs_of(LAW))]
    for law, error in fits(runs)[:50]:
        squares = [(law.loss(run.parameters, run.tokens) / run.loss - 1) ** 2 for run in runs]
        assert error == pytest.approx(math.sqrt(sum(squares) / len(squares)), rel=1e-4)


def test_fits_that_are_nearly_as_good_tell_the_spread():
    runs = [run._replace(loss=run.loss * (1 + 0.01 * (-1) ** i)) for i, run in enumerate(runs_of(LAW))]
    lines = law_lines(fits(runs))
    (floor,) = [line for line in lines if line.startswith("floor: ")]
    low, high = floor.removeprefix("floor: ").partition(",")[0].split(" to ")
    assert float(low) < float(high)


@pytest.mark.parametrize("best_size", [0.9e6, 2.5e6])
def test_the_lowest_point_of_a_curve(best_size):
    """Reference: losses of a parabola over the logarithm of the size."""
    curve = [run_of(1e13, size, 4.0 + 0.1 * math.log(size / best_size) ** 2) for size in SIZES]
    best = best_of(curve)
    assert best.is_inside
    assert best.parameters == pytest.approx(best_size, rel=1e-6)
    assert best.loss == pytest.approx(4.0)
    # Tokens fall as the size grows, and 6 N D are the operations.
    assert 6 * best.parameters * best.tokens == pytest.approx(1e13, rel=1e-3)


def test_several_seeds_of_a_size_count_by_their_mean():
    curve = []
    for size, wrong in itertools.product(SIZES, (0.02, -0.02)):
        curve.append(run_of(1e13, size, 4.0 + wrong + 0.1 * math.log(size / 2e6) ** 2))
    assert best_of(curve).parameters == pytest.approx(2e6, rel=1e-6)


def test_the_best_size_at_the_end_of_the_widths_is_called_so():
    falling = [run_of(1e13, size, 5.0 - 0.1 * math.log(size)) for size in SIZES]
    best = best_of(falling)
    assert not best.is_inside and best.parameters == SIZES[-1]


def test_how_the_best_size_grows():
    """Reference: sizes made up to grow with the power; and the minimum of the law along each curve, found by brute force."""
    bests = [Best(flops, 3e-3 * flops**0.44, 1.0, 4.0, True) for flops in FLOPS]
    assert growth(bests) == pytest.approx(0.44)
    sizes = [1e5 * 1.002**i for i in range(4000)]
    lowest = []
    for flops in FLOPS:
        size = min(sizes, key=lambda size: LAW.loss(size, flops / (6 * size)))
        lowest.append(Best(flops, size, 1.0, 4.0, True))
    assert growth(lowest) == pytest.approx(growth_of(LAW), abs=2e-3)


@pytest.mark.slow
def test_the_whole_benchmark(tmp_path, monkeypatch, capsys):
    """Two curves of three sizes and a law. Each run is one of the trainer's main in this process, which spares the imports."""
    text = write_corpus(tmp_path / "text.jsonl", n_documents=200)

    def in_this_process(folder, flags):
        assert main([*flags, "--out_dir", str(folder)]) == 0
        return outcome(folder)

    monkeypatch.setattr(isoflop, "trained", in_this_process)
    words = ["isoflop.py", "--data_path", str(text), "--val_path", str(text), "--flops", "2e10", "4e10"]
    words += ["--widths", "16", "32", "64", "--max_seq_len", "64", "--work", str(tmp_path / "work")]
    words += ["--flags", "--allow_val_overlap 1 --use_compile 0 --device cpu --cpu_processes 1"]
    monkeypatch.setattr(sys, "argv", words)
    isoflop.main()
    printed = capsys.readouterr().out
    assert printed.count("seed 42: loss") == 6
    assert "The best number of parameters grows as FLOP^" in printed
    assert "root mean square" in printed
