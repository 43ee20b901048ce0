"""What ranks do together. References: the messages that are sent, and two real Gloo processes."""

import contextlib
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from common.errors import DataError, SaidByAnotherRank, UserError
from tests.helpers import new_port, run_ranks
from trainer.machine import collectives
from trainer.machine.collectives import first_rank_first, on_main, until_all_are_ready
from trainer.machine.ranks import Ranks, init_distributed_mode


@pytest.fixture
def sent(monkeypatch):
    """What rank 0 sends, in order; and an event that is set when it has sent three messages."""
    messages, third = [], threading.Event()

    def broadcast(message, src):
        messages.append(list(message))
        if len(messages) == 3:
            third.set()

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    return messages, third


def test_rank_0_says_that_it_still_works(sent):
    """A quarter of the time that the others wait lies between two signs."""
    messages, third = sent
    ranks = Ranks(world_size=2, timeout=timedelta(seconds=0.04))

    def work():
        assert third.wait(30)
        return "result"

    assert on_main(ranks, work) == "result"
    *signs, answer = messages
    assert answer == ["result", False, True]
    assert len(signs) >= 3 and all(sign == [None, False, False] for sign in signs)


def test_quick_work_sends_one_message(sent):
    messages, _ = sent
    assert on_main(Ranks(world_size=2), lambda: 5) == 5
    assert messages == [[5, False, True]]


def test_an_error_ends_the_signs(sent):
    messages, _ = sent

    def work():
        raise UserError("mend it")

    with pytest.raises(UserError, match="mend it"):
        on_main(Ranks(world_size=2), work)
    assert messages == [[None, True, True]]
    assert not any(thread.name == "signs of life" for thread in threading.enumerate())


def test_other_ranks_wait_for_the_answer(monkeypatch):
    """They do no work of their own, and pass over signs of life."""
    coming = [[None, False, False], [None, False, False], ["result", False, True]]

    def broadcast(message, src):
        message[:] = coming.pop(0)

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    other = Ranks(rank=1, world_size=2)
    assert on_main(other, lambda: pytest.fail("rank 0 alone works")) == "result"
    coming.append([None, True, True])
    with pytest.raises(SaidByAnotherRank):
        on_main(other, lambda: None)


@pytest.fixture
def meetings(monkeypatch):
    """What this rank says when the ranks meet: 1 once it is done. The other rank is done from the fifth time on."""
    said, third = [], threading.Event()

    def least_of_ranks(ranks, number, device):
        said.append(number)
        if len(said) == 3:
            third.set()
        return min(number, float(len(said) >= 5))

    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(collectives, "least_of_ranks", least_of_ranks)
    return said, third


def test_ranks_meet_until_all_are_ready(meetings):
    said, third = meetings
    with until_all_are_ready(Ranks(world_size=2, timeout=timedelta(seconds=0.04))):
        assert third.wait(30)
    assert len(said) >= 5 and said[:3] == [0.0, 0.0, 0.0] and said[-1] == 1.0 and said == sorted(said)


def test_work_of_each_rank_for_itself_has_no_collective():
    """Its messages would come between those by which the ranks meet; one rank alone notices it too."""
    with pytest.raises(AssertionError, match="no collective"), until_all_are_ready(Ranks()):
        on_main(Ranks(), lambda: None)
    on_main(Ranks(), lambda: None)


def test_a_rank_that_fails_no_longer_comes(meetings):
    said, third = meetings
    with pytest.raises(UserError), until_all_are_ready(Ranks(world_size=2, timeout=timedelta(seconds=0.04))):
        assert third.wait(30)
        raise UserError("mend it")
    for thread in threading.enumerate():
        if thread.name == "until all are ready":
            thread.join(30)
    assert 1.0 not in said


def test_a_rank_that_is_gone_ends_those_that_wait_for_it(meetings, monkeypatch):
    def gone(*arguments):
        raise RuntimeError("gloo/transport: connection closed")

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


def longer_than_the_timeout():
    new_port("long work")
    ranks, _ = init_distributed_mode("cpu", timeout_s=2)
    try:
        return on_main(ranks, lambda: time.sleep(5) or "done")
    finally:
        dist.destroy_process_group()


def without_signs():
    """The same, and rank 0 says nothing before the end."""
    collectives.signs_of_life = contextlib.nullcontext
    try:
        longer_than_the_timeout()
    except RuntimeError as error:
        return collectives.loss_of_a_rank(error) or str(error)
    return "done"


def own_work_longer_than_the_timeout(alone):
    """Rank 1 has work for longer than rank 0 waits for a message. alone: they say nothing meanwhile."""
    new_port("own work")
    ranks, _ = init_distributed_mode("cpu", timeout_s=2)
    together = contextlib.nullcontext() if alone else until_all_are_ready(ranks)
    try:
        with together:
            time.sleep(5 * ranks.rank)
        dist.barrier()
    except RuntimeError as error:
        return collectives.loss_of_a_rank(error) or str(error)
    finally:
        dist.destroy_process_group()
    return "done"


@pytest.mark.slow
def test_work_of_one_rank_may_take_longer_than_the_others_wait_for_a_message():
    """Reference: where they do not meet, the other rank gives up."""
    assert run_ranks(own_work_longer_than_the_timeout, False) == ["done", "done"]
    assert "another rank is gone, or silent" in run_ranks(own_work_longer_than_the_timeout, True)[0]


@pytest.mark.slow
def test_work_may_take_longer_than_ranks_wait_for_a_message():
    """Reference: without signs of life the other rank gives up."""
    assert run_ranks(longer_than_the_timeout) == ["done", "done"]
    assert "another rank is gone, or silent" in run_ranks(without_signs)[1]
