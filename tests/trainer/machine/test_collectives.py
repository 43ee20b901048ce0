"""What ranks do together. References: two real Gloo processes, and lines written out."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist

from common.errors import DataError, SaidByAnotherRank, UserError
from tests.helpers import new_port, run_ranks
from trainer.machine import collectives
from trainer.machine.collectives import (
    compare_precision,
    compare_settings,
    first_rank_first,
    on_main,
    until_all_are_ready,
)
from trainer.machine.ranks import Ranks, init_distributed_mode
from trainer.pretrain.settings import parse_args


def test_work_of_each_rank_for_itself_has_no_collective():
    """Its messages would come between those by which the ranks meet; one rank alone notices it too."""
    with pytest.raises(AssertionError, match="no collective"), until_all_are_ready(Ranks()):
        on_main(Ranks(), lambda: None)
    on_main(Ranks(), lambda: None)


def test_a_rank_that_is_gone_ends_those_that_wait_for_it(monkeypatch):
    def gone(*arguments):
        raise RuntimeError("gloo/transport: connection closed")

    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(collectives, "least_of_ranks", gone)
    with pytest.raises(RuntimeError, match="connection closed"), until_all_are_ready(Ranks(world_size=2)):
        pass


def first_rank_first_of_two(folder):
    """What rank 0 finds, then what rank 1 does: each adds its number to a file. Then both fail with an error of their own."""
    new_port("first rank first")
    ranks, _ = init_distributed_mode("cpu")
    path = folder / "came"

    def come():
        if ranks.rank == 0:
            time.sleep(2)
        with open(path, "a") as file:
            file.write(str(ranks.rank))
        return path.read_text()

    def fail():
        raise DataError(f"rank {ranks.rank} has read it")

    try:
        found = first_rank_first(ranks, come)
        with pytest.raises(DataError) as caught:
            first_rank_first(ranks, fail)
    finally:
        dist.destroy_process_group()
    return found, str(caught.value)


@pytest.mark.slow
def test_the_first_rank_of_a_machine_works_first(tmp_path):
    """It is slower, and still the other one comes behind it. An error of both is what each of them says itself."""
    found = run_ranks(first_rank_first_of_two, tmp_path)
    assert found == [("0", "rank 0 has read it"), ("01", "rank 1 has read it")]


def longer_than_the_timeout(kind, alone):
    """One rank works for longer than the other waits for a message. alone: it says nothing meanwhile."""
    new_port("long work")
    ranks, _ = init_distributed_mode("cpu", timeout_s=2)
    if alone:
        collectives.meetings = contextlib.nullcontext
    try:
        if kind == "on_main":
            return on_main(ranks, lambda: time.sleep(5) or "done")
        with until_all_are_ready(ranks):
            time.sleep(5 * ranks.rank)
        dist.barrier()
    except RuntimeError as error:
        return collectives.loss_of_a_rank(error) or str(error)
    finally:
        dist.destroy_process_group()
    return "done"


@pytest.mark.slow
@pytest.mark.parametrize("kind, waits", [("on_main", 1), ("until_all_are_ready", 0)])
def test_work_may_take_longer_than_ranks_wait_for_a_message(kind, waits):
    """Reference: where they do not meet, the rank that waits gives up."""
    assert run_ranks(longer_than_the_timeout, kind, False) == ["done", "done"]
    assert "another rank is gone, or silent" in run_ranks(longer_than_the_timeout, kind, True)[waits]


def error_of_main():
    """What each rank raises where rank 0 alone has failed, and what all get of the next work."""
    new_port("error of main")
    ranks, _ = init_distributed_mode("cpu", timeout_s=20)

    def fail():
        assert ranks.is_main
        raise UserError("mend it")

    try:
        with pytest.raises(UserError) as caught:
            on_main(ranks, fail)
        return type(caught.value).__name__, on_main(ranks, lambda: ranks.rank)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_an_error_of_rank_0_ends_all_and_rank_0_says_it():
    assert run_ranks(error_of_main) == [("UserError", 0), ("SaidByAnotherRank", 0)]


# --------------------------------------------------------------------------------- what ranks are compared by


@pytest.fixture
def of_rank_0(monkeypatch):
    """Facts that come from rank 0; and what the ranks say."""
    facts, said = {}, []

    def broadcast(message, src):
        message[0] = {**message[0], **facts}

    def first_said(ranks, text):
        said.append(text)
        return text

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(collectives, "first_said", first_said)
    return facts, said


def test_another_rank_says_it_to_rank_0(of_rank_0):
    facts, said = of_rank_0
    other = Ranks(rank=3, world_size=4)
    compare_settings(other, parse_args(["--seed", "5"]))
    facts["--seed"] = 42
    with pytest.raises(SaidByAnotherRank):
        compare_settings(other, parse_args(["--seed", "5"]))
    assert said[0] == "" and said[1].startswith("rank 3 on ") and "has --seed 5 (rank 0: 42): all ranks need" in said[1]


@pytest.mark.parametrize("flag", ["--data_path", "--from_weight"])
def test_files_may_lie_elsewhere_on_each_machine(monkeypatch, flag):
    """Reference: the facts that rank 0 sends."""
    sent = []
    monkeypatch.setattr(collectives, "first_said", lambda ranks, text: text)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda message, src: sent.append(message[0]))
    compare_settings(Ranks(world_size=2), parse_args([flag, "/home/a/file"]))

    def receive(message, src):
        message[0] = sent[0]

    monkeypatch.setattr(dist, "broadcast_object_list", receive)
    compare_settings(Ranks(rank=1, world_size=2), parse_args([flag, "/home/b/file"]))


def test_a_precision_that_a_rank_has_chosen_for_its_hardware_is_a_difference(of_rank_0):
    """All of them were given --dtype bfloat16."""
    facts, said = of_rank_0
    other = Ranks(rank=1, world_size=2)
    facts["precision"] = "bfloat16"
    compare_precision(other, torch.bfloat16)
    with pytest.raises(SaidByAnotherRank):
        compare_precision(other, torch.float16)
    assert said[0] == ""
    assert (
        "has precision float16 (rank 0: bfloat16): name one that all of them have: --dtype float16 on GPUs" in said[1]
    )
