"""The garbage collector in a run on a GPU. Reference: what the gc module says of itself."""

import gc

import pytest
import torch

from tests.helpers import train, write_corpus
from tests.trainer.machine.simulated_cuda import simulated_cuda
from trainer.engine import Engine
from trainer.loop import Trainer
from trainer.machine.compiling import LOOK_EVERY, SETTLED_AFTER, QuietCollector


class Node:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self, freed: list[str]) -> None:
        self.me = self
        self.freed = freed

    def __del__(self) -> None:
        self.freed.append("freed")


def settled(collector):
    for _ in range(SETTLED_AFTER):
        collector.after_update()


def test_it_works_only_where_it_is_let():
    freed: list[str] = []
    with QuietCollector(active=True) as collector:
        settled(collector)
        assert not gc.isenabled() and gc.get_freeze_count() > 1000
        Node(freed)
        collector.after_update()
        assert not freed
        collector.look()
        assert freed == ["freed"]
        Node(freed)
        for _ in range(LOOK_EVERY):
            collector.after_update()
        assert freed == ["freed", "freed"]
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_run_on_a_gpu_is_quiet_between_its_saves(tmp_path, monkeypatch):
    """And gives the collector back when it ends, here with an error."""
    data = write_corpus(tmp_path / "data.jsonl", 40)
    enabled: list[bool] = []
    update = Engine.update

    def watched(engine, *arguments):
        enabled.append(gc.isenabled())
        if len(enabled) == SETTLED_AFTER + 2:
            raise KeyError("a defect")
        update(engine, *arguments)

    monkeypatch.setattr(Engine, "update", watched)
    with simulated_cuda(), pytest.raises(KeyError):
        train(data_path=data, out_dir=tmp_path, device="cuda", dtype="float32")
    assert enabled[: SETTLED_AFTER + 1] == [True] * SETTLED_AFTER + [False] and not any(enabled[SETTLED_AFTER:])
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.slow
def test_updates_leave_no_tensor_to_the_collector(tmp_path, monkeypatch):
    """With the collector off, a tensor in a cycle would stay in the memory of the GPU."""
    data = write_corpus(tmp_path / "data.jsonl", 40)
    after_update = Trainer.after_update
    found: list[str] = []

    def searched(trainer, *arguments):
        stop_signal = after_update(trainer, *arguments)
        if trainer.progress.update == SETTLED_AFTER:
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
        elif trainer.progress.update == SETTLED_AFTER + 3:
            gc.collect()
            found.extend(type(thing).__name__ for thing in gc.garbage if isinstance(thing, torch.Tensor))
            gc.set_debug(0)
            gc.garbage.clear()
        return stop_signal

    monkeypatch.setattr(Trainer, "after_update", searched)
    gc.disable()
    try:
        run = train(data_path=data, out_dir=tmp_path, use_moe=1, save_interval=10**6)
    finally:
        gc.set_debug(0)
        gc.enable()
    assert run.progress.update > SETTLED_AFTER + 3
    assert not found
