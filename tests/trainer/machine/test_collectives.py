"""What ranks do together. References: two real Gloo processes, and lines written out."""

import time
from unittest import mock

import pytest

from common.errors import DataError, PrintedByAnotherRank, UserError
from tests.helpers import process_group, run_ranks
from trainer.machine import ranks as ranks_module
from trainer.machine.measure import versions
from trainer.machine.ranks import Ranks, compare_settings, first_rank_first, on_main, wait_for_all_ranks
from trainer.pretrain.settings import PretrainSettings


def what_two_ranks_do(folder):
    """Long work of each kind; then what rank 0 finds, and what rank 1 does: each adds its number to a file. Then errors."""
    path = folder / "came"

    def come():
        if ranks.rank == 0:
            time.sleep(1)
        with open(path, "a") as file:
            file.write(str(ranks.rank))
        return path.read_text()

    def fail():
        raise DataError(f"rank {ranks.rank} has read it")

    with process_group("together", timeout_s=2) as ranks:
        done = on_main(ranks, lambda: time.sleep(4) or "done")
        with wait_for_all_ranks(ranks):
            time.sleep(4 * ranks.rank)
        found = first_rank_first(ranks, come)
        with pytest.raises(DataError) as of_each:
            first_rank_first(ranks, fail)
        with pytest.raises(UserError if ranks.is_main else PrintedByAnotherRank) as of_main:
            on_main(ranks, mock.Mock(side_effect=UserError("mend it")))
        return done, found, str(of_each.value), str(of_main.value), on_main(ranks, lambda: ranks.rank)


@pytest.mark.slow
def test_what_two_ranks_do_together(tmp_path):
    """Work may take longer than a wait for a message. What rank 0 alone finds wrong ends both, and only rank 0 says it."""
    assert run_ranks(what_two_ranks_do, tmp_path) == [
        ("done", "0", "rank 0 has read it", "mend it", 0),
        ("done", "01", "rank 1 has read it", "", 0),
    ]


@pytest.mark.parametrize("flag, may_differ", [("--data_path", True), ("--from_weight", True), ("--seed", False)])
def test_files_may_lie_elsewhere_on_each_machine_and_packages_are_compared(flag, may_differ, monkeypatch):
    facts = []
    monkeypatch.setattr(ranks_module, "compare_with_main", lambda ranks, of_rank: facts.append(of_rank))
    for value in ("1", "2"):
        compare_settings(Ranks(world_size=2), PretrainSettings.parse([flag, value]))
    assert (facts[0] == facts[1]) == may_differ
    assert versions().items() <= facts[0].items()
