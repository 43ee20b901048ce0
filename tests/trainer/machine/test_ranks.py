"""What one rank does for all. References: the messages that are sent, and two real Gloo processes."""

import contextlib
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from common.errors import SaidByAnotherRank, UserError
from tests.helpers import new_port, run_ranks
from trainer.machine import ranks as ranks_module
from trainer.machine.ranks import Ranks, init_distributed_mode, on_main


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


def longer_than_the_timeout():
    new_port("long work")
    ranks, _ = init_distributed_mode("cpu", timeout_s=2)
    try:
        return on_main(ranks, lambda: time.sleep(5) or "done")
    finally:
        dist.destroy_process_group()


def without_signs():
    """The same, and rank 0 says nothing before the end."""
    ranks_module.signs_of_life = contextlib.nullcontext
    try:
        longer_than_the_timeout()
    except RuntimeError as error:
        return ranks_module.loss_of_a_rank(error) or str(error)
    return "done"


@pytest.mark.slow
def test_work_may_take_longer_than_ranks_wait_for_a_message():
    """Reference: without signs of life the other rank gives up."""
    assert run_ranks(longer_than_the_timeout) == ["done", "done"]
    assert "another rank is gone, or silent" in run_ranks(without_signs)[1]
