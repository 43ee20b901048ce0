"""A model sharded among ranks in real Gloo processes. References: ranks that have the whole model each, and one rank.

One start of the processes serves many tests: importing torch takes longer than all that they do.
"""

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.helpers import losses, new_port, records, run_ranks, tiny_model, train, write_corpus
from tests.updates import gradients, reference_gradients, relative_difference
from trainer.engine import Engine
from trainer.machine.ranks import init_distributed_mode
from trainer.optim.build import build_optimizer
from trainer.pretrain.loss import pretrain_loss
from trainer.saving.checkpoint import snapshot
from trainer.sharding import Shards, is_sharded, own_part

# To start two to four processes takes longer than a quick test may.
pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
# {world size: (rows, micro-batches) of a rank}: 8 rows in all, or 9. The tail of an epoch leaves the last ranks short or without
# rows.
ONE_MICRO_BATCH = {2: (4, 1), 3: (3, 1)}
ACCUMULATED = {2: (2, 2), 3: (1, 3)}
QUICK_KINDS = ("dense packed", "moe packed", "minimind3 moe")
RUN = {"batch_size": 2, "use_moe": 1, "epochs": 1, "log_interval": 3, "val_fraction": 0.2, "eval_interval": 6}


def state_of(engine):
    """What of an engine a checkpoint holds, whole on rank 0."""
    return {"weights": engine.weights(), "engine": snapshot(engine.state_dict(), engine.ranks.is_main)}


def trained_engine(ranks, group_size, updates=2, kind="adamw", dtype=torch.float32, seed=0):
    """An engine after some updates, and the norms of their gradients."""
    from tests.trainer.test_engine import batch_of

    # Only rank 0 has the weights that the others are to get.
    model = tiny_model(seed if ranks.is_main or group_size == 1 else seed + 1)
    shards = Shards(model, ranks, CPU) if group_size > 1 else None
    optimizer = build_optimizer(model, 1e-3, kind=kind, ranks=ranks, shards=shards)
    engine = Engine(
        model,
        optimizer,
        partial(pretrain_loss, model),
        device=CPU,
        dtype=dtype,
        ranks=ranks,
        n_sums=4,
        grad_clip=0.1,
        shards=shards,
    )
    norms = []
    for _ in range(updates):
        # Other rows on each rank, the same over all.
        engine.micro_batch(*batch_of(rows=range(ranks.rank, 4, ranks.world_size)), last=True)
        engine.update(1e-3)
        norms.append(engine.poll()[-1].grad_norm)
    return engine, norms


def in_group(name, work, timeout_s=60):
    """work(ranks) in a process group of its own."""
    new_port(name)
    ranks, _ = init_distributed_mode("cpu", timeout_s=timeout_s)
    try:
        return work(ranks)
    finally:
        Shards.close()
        gc.collect()
        dist.destroy_process_group()


def cuts_of(kind, ranks, group_size, prepare=None):
    """The gradients of each cut."""
    world_size = ranks.world_size
    cuts = (ONE_MICRO_BATCH[world_size], ACCUMULATED[world_size])
    return [gradients(kind, *cut, ranks, group_size, prepare) for cut in cuts]


def cuts_of_one_rank(kind, world_size, prepare=None):
    """The same with all micro-batches on one rank."""
    cuts = (ONE_MICRO_BATCH[world_size], ACCUMULATED[world_size])
    return [gradients(kind, batch_size, steps * world_size, prepare=prepare) for batch_size, steps in cuts]


# ------------------------------------------------------------------------------------------------ two ranks


def two_ranks(folder):
    result = in_group("engine", of_two_ranks)
    new_port("run")
    result["run"] = whole_run(folder)
    gc.collect()
    result["left"] = sum(type(thing).__name__ == "DeviceMesh" for thing in gc.get_objects())
    return result


def of_two_ranks(ranks):
    found = {
        "sharded": {kind: cuts_of(kind, ranks, 2) for kind in QUICK_KINDS},
        "one rank": {kind: cuts_of_one_rank(kind, ranks.world_size) for kind in QUICK_KINDS},
    }
    for kind in ("adamw", "muon"):
        for group_size in (1, 2):
            engine, norms = trained_engine(ranks, group_size, kind=kind)
            if (kind, group_size) == ("adamw", 2):
                found["own"] = own_share(engine)
            found[f"{kind} {group_size}"] = {"norms": norms, "state": state_of(engine)}
    return found


def own_share(engine):
    """Of all numbers of weights and moments, those that this rank has."""
    tensors = [*engine.parameters]
    for kept in engine.optimizer.state.values():
        tensors += [kept["exp_avg"], kept["exp_avg_sq"]]
    assert all(is_sharded(tensor) for tensor in tensors)
    return sum(own_part(tensor).numel() for tensor in tensors) / sum(tensor.numel() for tensor in tensors)


def whole_run(folder):
    """A run with evaluations and samples, sharded and not: its losses, figures and texts."""
    found = {}
    for shard in ("full", "none"):
        options = {"shard": shard, "sample_prompts": "the cat", **RUN}
        run = train(data_path=f"{folder}/data.jsonl", out_dir=f"{folder}/{shard}", **options)
        if run.ranks.is_main:
            found[shard] = {
                "losses": losses(run),
                "val_losses": [line["val_loss"] for line in records(run, "val_loss")],
                "texts": [line["text"] for line in records(run, "text")],
            }
        del run
        new_port(f"after {shard}")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    write_corpus(folder / "data.jsonl", 53)
    return folder


@pytest.fixture(scope="module")
def both(folder):
    return run_ranks(two_ranks, str(folder))


@pytest.mark.parametrize("kind", QUICK_KINDS)
def test_gradients_of_two_ranks_equal_those_of_one_rank(both, kind):
    """Bitwise where each rank has one micro-batch; with two of them the sums are added up in another order. In the last update
    rank 1 is short of rows or has none."""
    for found in both[0]["sharded"][kind]:
        assert relative_difference(found, reference_gradients(kind)) < 1e-6
    for result in both:
        (once, accumulated), (once_alone, accumulated_alone) = result["sharded"][kind], result["one rank"][kind]
        assert relative_difference(once, once_alone) == 0
        assert relative_difference(accumulated, accumulated_alone) < 1e-7


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_updates_equal_those_of_whole_models(both, kind):
    """The norm is added up in another order, and with it the clipped gradients differ in their last bits."""
    whole, sharded = both[0][f"{kind} 1"], both[0][f"{kind} 2"]
    assert sharded["norms"] == pytest.approx(whole["norms"], rel=1e-6)
    for name, tensor in whole["state"]["weights"].items():
        torch.testing.assert_close(sharded["state"]["weights"][name], tensor, rtol=1e-5, atol=1e-6)
    assert sharded["state"]["weights"].keys() == whole["state"]["weights"].keys()


def test_each_rank_has_half_of_weights_and_moments(both):
    for result in both:
        assert result["own"] <= 1.02 / 2


def test_a_run_has_the_losses_of_a_run_with_whole_models(both):
    sharded, whole = both[0]["run"]["full"], both[0]["run"]["none"]
    assert sharded["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert sharded["val_losses"] == pytest.approx(whole["val_losses"], rel=1e-5)
    assert len(sharded["val_losses"]) > 1 and len(sharded["texts"]) == len(whole["texts"]) > 1


def test_nothing_of_a_sharded_run_outlives_its_process_group(both):
    """Else the process may abort when the interpreter ends."""
    assert [result["left"] for result in both] == [0, 0]


# ------------------------------------------------------------------------------------- more ranks, and other ways


def three_ranks():
    """The gradients of each kind, and the norms of Muon's updates with whole models and with a sharded one."""

    def work(ranks):
        found = {kind: cuts_of(kind, ranks, 3, prepare) for kind, prepare in PREPARED.items()}
        found["norms"] = [trained_engine(ranks, size, kind="muon")[1] for size in (1, 3)]
        return found

    return in_group("several", work)


def recomputing(model):
    model.activation_checkpointing_enable({"use_reentrant": False})


PREPARED = {"moe packed": recomputing, "minimind3 moe": None}


def test_gradients_of_three_ranks():
    """Reference: the formula. Tensors that ranks cannot divide evenly, and layers that are computed again."""
    for result in run_ranks(three_ranks, world_size=3):
        whole, of_shards = result.pop("norms")
        assert of_shards == pytest.approx(whole, rel=1e-3)
        for kind, cuts in result.items():
            formula = reference_gradients(kind, rows_of_update=9)
            assert all(relative_difference(found, formula) < 1e-6 for found in cuts)


def test_one_process_has_nothing_to_shard(tmp_path, capsys):
    write_corpus(tmp_path / "data.jsonl", 20)
    train(data_path=tmp_path / "data.jsonl", out_dir=tmp_path, shard="full", max_updates=1)
    assert "--shard full has no effect" in capsys.readouterr().out
