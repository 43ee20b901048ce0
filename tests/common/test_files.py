"""common/files.py: what a killed process left half written goes away, and nothing else does."""

import os
import time

from common.files import LEFT_BEHIND_AFTER_S, atomic_file


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
