"""common/files.py: what a killed process left half written goes away, and nothing else does."""

import os
import time

from common.files import LEFT_BEHIND_AFTER_S, atomic_file
from trainer.budget.kept_plan import keep_plan, plan_path
from trainer.machine.ranks import ONE_RANK
from trainer.pretrain.settings import PretrainSettings


def leave(path, seconds_ago):
    path.write_bytes(b"half")
    then = time.time() - seconds_ago
    os.utime(path, (then, then))


def test_what_a_kill_left_of_a_file_goes_away_when_it_is_written_again(tmp_path):
    """An hour old it is nobody's. A younger one may be written by another process now."""
    old = LEFT_BEHIND_AFTER_S + 60
    leave(tmp_path / "a[1].json.123.tmp", old)
    others = ["a[1].json.456.tmp", "a[1].json", "a1.json.123.tmp", "a[1].json.1x.tmp", "a[1].json.b.123.tmp"]
    for name in others:
        leave(tmp_path / name, old)
    leave(tmp_path / "a[1].json.456.tmp", LEFT_BEHIND_AFTER_S - 60)
    (tmp_path / "a[1].json.7.tmp").mkdir()
    with atomic_file(tmp_path / "a[1].json") as file:
        file.write(b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "a[1].json.7.tmp"])
    assert (tmp_path / "a[1].json").read_bytes() == b"whole"


def test_what_a_kill_left_of_a_plan_goes_away_at_the_next_start(tmp_path):
    settings = PretrainSettings(out_dir=str(tmp_path), budget_tokens=3000, max_updates=5)
    stem = tmp_path / "pretrain_16"
    leave(tmp_path / "pretrain_16.plan.yaml.123.tmp", 10**6)
    keep_plan(settings, ONE_RANK, stem)
    assert [path.name for path in tmp_path.iterdir()] == [plan_path(stem).name]
    assert PretrainSettings.read(plan_path(stem)).max_updates == 5
