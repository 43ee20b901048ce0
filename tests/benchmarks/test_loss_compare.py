"""benchmarks/loss_compare.py. References: the flags that differ between the sides, differences worked out by hand."""

import shlex

import pytest

from benchmarks import loss_compare
from tests.helpers import ROOT, command_line, complaint, flags
from trainer import train_pretrain


@pytest.fixture
def compare(data, monkeypatch, capsys):
    """compare(*words, other=[]): (exit code, cells) of a comparison with a side that has `other` flags; runs in this process."""

    def run(*words, other=()):
        def run_logged(python, command, log_path):
            added = other if log_path.parent.name == "before" else ()
            return train_pretrain.main([*command[1:], *added]), ""

        monkeypatch.setattr(loss_compare, "run_logged", run_logged)
        code = loss_compare.main(["--flags", shlex.join(flags(data_path=data, max_updates=4)), *words])
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| yours")]
        return code, rows[0].strip("| ").split(" | ")[1:]

    return run


def test_differences_by_hand():
    assert loss_compare.difference([1.0, 2.0, 4.0], [1.0, 2.5, 3.0]) == "2.5e-01, from 2 of 3"
    assert loss_compare.difference([1.0, 2.0], [1.0, 2.0]) == "equal"


@pytest.mark.slow
def test_what_differs_is_found_from_its_first_update_on(compare, tmp_path):
    before = str(tmp_path / "before.json")
    assert compare("--save", before) == (0, ["equal", "equal"])
    assert compare("--against", before) == (0, ["equal", "equal"])
    # The first update has two micro-batches, with the initial weights.
    code, (losses, weights) = compare(other=["--learning_rate", "1e-3"])
    assert code == 1 and losses.endswith(", from 3 of 8") and float(losses.split(",")[0]) > 0
    # Only the weights after the last update show it.
    code, (losses, weights) = compare("--flags", shlex.join(flags(max_updates=1)), other=["--learning_rate", "1e-3"])
    assert (code, losses) == (1, "equal") and weights.startswith("differ; the sample: ") and weights.endswith(" of 500")


def test_a_mistake_is_one_line(compare, capsys, tmp_path):
    elsewhere = shlex.join(flags(max_updates=1, out_dir=tmp_path))
    code, (said,) = compare("--flags", elsewhere)
    assert code == 1 and said.startswith("failed: ") and said.endswith("no checkpoint in its --out_dir")
    before = str(tmp_path / "before.json")
    compare("--save", before)
    for words, message in (
        (["--against", before], "has no run of these flags: train_pretrain.py --device cpu"),
        (["--against", str(tmp_path)], "not a regular file"),
        (["--commit", "0123456789"], "--commit: git finds no commit 0123456789 here"),
        (["--against", before, "--commit", "HEAD"], "--against has the other side already"),
    ):
        assert message in complaint(capsys, loss_compare.main, words)


@pytest.mark.slow
def test_the_files_of_a_commit_and_a_failing_run(data, tmp_path):
    words, script = ["--commit", "HEAD", "--flags"], ROOT / "benchmarks" / "loss_compare.py"
    done = command_line([*words, shlex.join(flags(data_path=data, max_updates=3))], script=script)
    assert (done.returncode, done.stdout.splitlines()[2]) == (0, "| yours | equal | equal |"), done.stderr
    done = command_line([*words, "--no_such_flag 1"], script=script)
    assert done.returncode == 1 and "exit code 2: error: unrecognized arguments: --no_such_flag" in done.stdout
