"""Updates by CUDA graphs, with graphs that a CPU records: each operator with its arguments, to be called again."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.training import packed_batch
from dataset.packing import Totals
from tests.helpers import tiny_model
from tests.trainer.test_engine import make_engine
from trainer import cuda_graphs
from trainer.pretrain.loss import pretrain_loss

ROWS, T = 3, 40
SEEN = []


class Recording(TorchDispatchMode):
    """Like a CUDA graph, it keeps memory and plain numbers, and forgets Python. An operator that reads a number would wait."""

    def __init__(self):
        super().__init__()
        self.calls = []
        # What was there before, as it was: a graph computes nothing while it is recorded.
        self.before = {}
        self.own = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in func.__name__, "a graph cannot read a number"
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and storage(tensor) not in self.own | self.before.keys():
                n = tensor.untyped_storage().nbytes() // tensor.itemsize
                whole = torch.as_strided(tensor.detach(), (n,), (1,), 0)
                self.before[storage(tensor)] = whole, whole.clone()
        result = func(*args, **(kwargs or {}))
        made = [storage(tensor) for tensor in tree_iter(result) if isinstance(tensor, torch.Tensor)]
        self.own.update(place for place in made if place not in self.before)
        self.calls.append((func, args, kwargs or {}, result))
        return result

    # of all graphs
    replays = 0

    @torch.no_grad()
    def replay(self):
        Recording.replays += 1
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for new, old in zip(tree_iter(again), tree_iter(result), strict=True):
                if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def record(work):
    recording = Recording()
    with recording:
        work()
    for whole, before in recording.before.values():
        whole.copy_(before)
    return recording.replay


def trained(cuda_graphs, optimizer="adamw", objective=pretrain_loss, **fields):
    """(weights, outcomes) after five updates of two micro-batches, no two of which are alike."""
    model = tiny_model(**fields)
    engine = make_engine(model, losses=partial(objective, model), optimizer=optimizer, cuda_graphs=cuda_graphs)
    generator = torch.Generator().manual_seed(1)
    outcomes = []
    for update in range(5):
        batches = [packed_batch(ROWS, T, 8, model.config.vocab_size, generator)[0] for _ in range(2)]
        totals = Totals(sum(b.n_targets for b in batches) + update, sum(b.n_documents for b in batches))
        for batch in batches:
            engine.micro_batch(batch, totals)
        engine.update(1e-3 / (update + 1), save=update == 3)
        outcomes += engine.poll()
    # Numbers, as a checkpoint has them
    assert engine.groups[0]["lr"] == 1e-3 / 5
    return [p.detach().clone() for p in model.parameters()], outcomes, engine.collect()


@pytest.mark.parametrize("generation, use_moe", [("minimind2", False), ("minimind2", True), ("minimind3", True)])
def test_replayed_updates_have_the_bits_of_others(monkeypatch, capsys, generation, use_moe):
    monkeypatch.setattr(cuda_graphs, "record", record)
    fields = {"generation": generation, "use_moe": use_moe}
    optimizer = "muon" if (generation, use_moe) == ("minimind2", True) else "adamw"
    plain = trained(False, optimizer, **fields)
    monkeypatch.setattr(Recording, "replays", 0)
    weights, outcomes, sums = trained(True, optimizer, **fields)
    assert not capsys.readouterr().out
    # Four updates of two micro-batches, and the update in which both ways are compared
    assert Recording.replays == 4 * 3 + 2
    assert all(map(torch.equal, weights, plain[0]))
    assert (outcomes, sums) == plain[1:]
    assert [outcome.save for outcome in outcomes] == [0, 0, 0, 1, 0]


def reads_a_number(model, batch, totals):
    loss, sums = pretrain_loss(model, batch, totals)
    return loss * float(loss.detach() > 0), sums


def takes_a_number(model, batch, totals):
    """A number of Python's own, which a graph would keep for ever."""
    SEEN.append(1)
    loss, sums = pretrain_loss(model, batch, totals)
    return loss * (1 + len(SEEN) * 0.1), sums


@pytest.mark.parametrize("objective, why", [(reads_a_number, "cannot read"), (takes_a_number, "other bits")])
def test_what_a_graph_cannot_do_is_trained_without(monkeypatch, capsys, objective, why):
    def record_or_raise(work):
        try:
            return record(work)
        except AssertionError as error:
            # As CUDA does
            raise RuntimeError(str(error)) from error

    monkeypatch.setattr(cuda_graphs, "record", record_or_raise)
    graphs = trained(True, objective=objective)
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("training without CUDA graphs: ") and why in said
    if objective is reads_a_number:
        assert all(map(torch.equal, graphs[0], trained(False, objective=objective)[0]))
