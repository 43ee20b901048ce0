"""benchmarks/trained.py: what is finished is kept, for the same flags alone. Reference: the commands that it starts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import trained
from common.errors import UserError

FLAGS = ["--data_path", "a", "b", "--seed", "42", "--report", "0", "--cache_dir", "work/cache"]


@pytest.fixture
def commands(monkeypatch):
    """What is started. Each run begins and ends well."""
    seen = []

    def run(command, **_):
        seen.append(command)
        folder = Path(command[command.index("--out_dir") + 1])
        (folder / "pretrain_64.metrics.jsonl").touch()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(trained.subprocess, "run", run)
    monkeypatch.setattr(trained, "outcome", lambda folder: folder.name)
    return seen


def test_a_run_that_fails_is_told_with_its_log(tmp_path):
    with pytest.raises(UserError, match=r"exit code 2; its log: .*log\.txt"):
        trained.trained(tmp_path / "run", ["--no_such_flag", "1"])
    assert "no_such_flag" in (tmp_path / "run" / "log.txt").read_text()
    assert not (tmp_path / "run" / "done").exists()


def test_flags_that_the_trainer_refused_may_be_mended(tmp_path, commands):
    """A run that has not begun leaves nothing that a later one must agree with."""
    trained.keep_flags(tmp_path / "flags.json", ["--no_such_flag", "1"], is_begun=False)
    assert trained.trained(tmp_path, FLAGS) == tmp_path.name
    assert commands[0][2:-4] == FLAGS


def test_a_finished_run_is_not_trained_again(tmp_path, commands):
    """Wherever its work folder is by now, and whatever flag stands twice."""
    trained.trained(tmp_path / "run", FLAGS)
    moved = ["--seed", "41", *FLAGS[:-1], "elsewhere/cache"]
    assert trained.trained(tmp_path / "run", moved) == "run"
    assert len(commands) == 1


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--data_path", "a", "--seed", "42", "--report", "0"], "--data_path"),
        (["--data_path", "a", "b", "--seed", "43"], "--report, --seed"),
        ([*FLAGS, "--muon_lr", "0.02"], "--muon_lr"),
    ],
)
@pytest.mark.parametrize("is_done", [True, False])
def test_a_folder_of_other_flags_is_refused(tmp_path, commands, flags, names, is_done):
    """Also where the run was stopped: it would go on with others, and be called theirs."""
    trained.trained(tmp_path / "run", FLAGS)
    if not is_done:
        (tmp_path / "run" / "done").unlink()
    with pytest.raises(UserError, match=f"run was made with another {names}: name another --work, or remove that"):
        trained.trained(tmp_path / "run", flags)
    assert len(commands) == 1


def test_a_folder_of_an_earlier_version_is_taken(tmp_path, commands):
    """It does not say with which flags it was made."""
    (tmp_path / "done").touch()
    assert trained.trained(tmp_path, FLAGS) == tmp_path.name
    assert commands == []
