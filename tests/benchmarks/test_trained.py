"""benchmarks/trained.py: what is finished is kept, for the same flags alone. Reference: the commands that it starts."""

from types import SimpleNamespace

import pytest

from benchmarks import trained

FLAGS = ["--data_path", "a", "b", "--seed", "42", "--report", "0"]


@pytest.fixture
def commands(monkeypatch):
    """What is started. Each run ends well."""
    seen = []

    def run(command, **_):
        seen.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(trained.subprocess, "run", run)
    monkeypatch.setattr(trained, "outcome", lambda folder: folder)
    return seen


def test_a_finished_run_is_not_trained_again_and_other_flags_are_another_run(tmp_path, commands):
    first = trained.trained(tmp_path, "run", FLAGS)
    assert trained.trained(tmp_path, "run", FLAGS) == first
    assert len(commands) == 1 and commands[0][2:-4] == FLAGS
    other = trained.trained(tmp_path, "run", [*FLAGS, "--muon_lr", "0.02"])
    assert other != first and len(commands) == 2


def test_a_run_that_was_stopped_goes_on(tmp_path, commands):
    folder = trained.trained(tmp_path, "run", FLAGS)
    (folder / "done").unlink()
    assert trained.trained(tmp_path, "run", FLAGS) == folder
    assert [command[-4:] for command in commands] == [["--out_dir", str(folder), "--from_resume", "1"]] * 2
