"""benchmarks/trained.py: what is finished is kept, for the same flags alone. Reference: the commands that it starts."""

from types import SimpleNamespace

from benchmarks import trained

FLAGS = ["--data_path", "a", "b", "--seed", "42", "--report", "0"]


def test_a_run_is_trained_once_for_the_same_flags_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command[2:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(trained.subprocess, "run", run)
    monkeypatch.setattr(trained, "outcome", lambda folder: folder)
    first = trained.trained(tmp_path, "run", FLAGS)
    assert trained.trained(tmp_path, "run", FLAGS) == first
    expected = [[*FLAGS, "--out_dir", str(first), "--from_resume", "1"]]
    assert commands == expected
    # It was stopped.
    (first / "done").unlink()
    assert trained.trained(tmp_path, "run", FLAGS) == first and commands == 2 * expected
    assert trained.trained(tmp_path, "run", [*FLAGS, "--muon_lr", "0.02"]) != first and len(commands) == 3
