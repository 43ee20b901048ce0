"""benchmarks/ledger.py. References: published quantiles of Student's t, a ledger that nobody disturbs."""

import json
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import ledger
from common.errors import UserError
from tests.helpers import ROOT, complaint, flags, is_running, stopped_after, wait_until
from trainer import train_pretrain
from trainer.saving import run_folder


@pytest.fixture
def arguments(data, tmp_path):
    """arguments(*variants, **changes): the command line of a ledger in tmp_path. changes: to the flags of all its runs."""

    def of(*variants, seeds=1, drop=100, **changes):
        work = {"data_path": data, "max_updates": 4, "val_fraction": 0.2, "save_interval": 4}
        words = ["--common", shlex.join(flags(**{**work, **changes})), "--seeds", str(seeds), "--drop", str(drop)]
        return [*words, "--out_dir", str(tmp_path / "ledger"), *(f"--variant={variant}" for variant in variants)]

    yield of
    run_folder.release_locks()


@pytest.fixture
def started(monkeypatch):
    """The names of the runs that are started; they train in this process."""
    names = []

    def run(command, stdout=None, **options):
        if stdout is None:
            return subprocess.run(command, **options)
        names.append(command[command.index("--out_dir") + 1].rpartition("/")[2])
        try:
            return SimpleNamespace(returncode=train_pretrain.main(command[2:]))
        except UserError as error:
            stdout.write(f"a line\nerror: {error}\n".encode())
            return SimpleNamespace(returncode=2)

    monkeypatch.setattr(ledger, "subprocess", SimpleNamespace(run=run))
    return names


def table(tmp_path):
    """(the cells of each row but the seconds, the lines behind the table) of ledger.md."""
    _, _, *lines = (tmp_path / "ledger" / "ledger.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ")[:-1] for line in lines if line.startswith("|")]
    return rows, [line for line in lines if line.startswith("-")]


# 97.5 % quantiles of Student's t with 1, 2 and 4 degrees of freedom, as every table has them
def test_a_verdict_needs_an_interval_without_zero():
    for bits, quantile, verdict in (
        ([0.99, 1.99], 12.706, "no difference"),
        ([0.98, 1.95, 2.93], 4.303, "better"),
        ([1.02, 2.05, 3.07, 4.10, 5.08], 2.776, "worse"),
    ):
        base, other = {n: (float(n),) for n in range(1, 9)}, {n: (b,) for n, b in enumerate(bits, 1)}
        values, text, found = ledger.judge({"base": base, "other": other}, "other", 1)
        assert values == pytest.approx([100 * (b - n) / n for n, b in enumerate(bits, 1)]) and found == verdict
        mean, low, high, spread = (float(word.strip("(),")) for word in text.split() if word not in ("to", "spread"))
        assert (high + low, high - low) == pytest.approx((2 * mean, 2 * quantile * spread / len(bits) ** 0.5), abs=0.1)


def test_a_stopped_ledger_continues_and_ends_as_an_undisturbed_one(arguments, started, tmp_path):
    words = arguments("base", "wide: --hidden_size 32")
    assert ledger.main(words) == 0
    expected = table(tmp_path)
    (tmp_path / "ledger").rename(tmp_path / "undisturbed")
    with stopped_after(3):
        assert ledger.main(words) == 1
    assert table(tmp_path) == ([], ["- base, seed 1: exit code 143: ", "- wide, seed 1: exit code 143: "])
    assert ledger.main(words) == 0 and table(tmp_path) == expected


def test_the_worse_are_dropped_what_fails_is_a_line_and_the_others_go_on(arguments, started, tmp_path):
    two = ("base", "slow: --learning_rate 1e-9")
    words = arguments(*two, "odd: --num_attention_heads 3", "same", seeds=2, drop=0.01)
    assert ledger.main(words) == 1 and started == ["base-1", "slow-1", "odd-1", "same-1", "base-2", "same-2"]
    (base, slow, same), (odd,) = table(tmp_path)
    assert (base[:2], slow[4], same[1]) == (["base", "2"], "dropped", "2") and float(slow[3]) > 0.01
    assert "+0.00 (+0.00 to +0.00)" in same[3] and "odd, seed 1: exit code 2: error: hidden_size=16" in odd
    # Tokens and FLOP
    assert same[5:] == base[5:] and 100 < float(base[5]) < 1e-4 * float(base[6])
    # It is tried again, and nothing else. The reference alone is compared with nothing.
    assert ledger.main(words) == 1 and ledger.main(arguments(*two, seeds=3, drop=0.01)) == 0
    assert started[6:] == ["odd-1"]


def test_another_command_in_the_same_folder_is_refused(arguments, started, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "WAIT_S", 0.1)
    assert ledger.main(arguments("base")) == 0
    for other in (arguments("base", max_updates=5), arguments("base: --dropout 0.1")):
        assert "base-1 has the run of python " in complaint(capsys, ledger.main, other)
        assert "is writing these files" in complaint(capsys, ledger.main, other)
        run_folder.release_locks()
    assert ledger.main(arguments("base", "more: --dropout 0.1")) == 0 and started == ["base-1", "more-1"]


@pytest.mark.parametrize(
    "variants, changes, message",
    [
        (["base", "wide: --hiden_size 32"], {}, "did you mean --hidden_size?"),
        (["base", "old: @0123456789"], {}, "--variant old: git finds no commit 0123456789 here"),
        (["base"], {"val_fraction": None}, "--variant base: all need the same validation text"),
        (["base", "other: --data_path other.jsonl"], {}, "--variant other: all need the same validation text"),
    ],
)
def test_a_mistake_is_told_before_the_first_run(arguments, started, capsys, variants, changes, message):
    assert message in complaint(capsys, ledger.main, arguments(*variants, **changes)) and not started


@pytest.mark.slow
def test_kill_9_and_the_files_of_a_commit(arguments, tmp_path):
    """In processes of their own. The run is killed too, and ends with the bits of the reference."""
    words = arguments("base", "before: @HEAD --dropout 0", "killed", max_updates=100)
    command = [sys.executable, str(ROOT / "benchmarks" / "ledger.py"), *words]
    first = subprocess.Popen(command)
    killed = tmp_path / "ledger" / "killed-1"
    wait_until(lambda: list(killed.glob("*_resume/*.pt")), seconds=200)
    first.kill()
    pid = json.loads((killed / ".pretrain_16.running").read_text())["pid"]
    wait_until(lambda: not is_running(pid))
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "before, seed 1" not in said and "resumed from" in (tmp_path / "ledger" / "killed-1.log").read_text()
    (base, before, killed), _ = table(tmp_path)
    assert before[0] == "before" and killed[2:4] == [base[2], "+0.00"]
