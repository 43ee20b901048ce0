"""A model sharded among ranks in real Gloo processes. References: ranks that have the whole model each, and one rank.

One start of the processes serves many tests: importing torch takes longer than all that they do.
"""

import gc
from operator import methodcaller

import pytest
import torch
import torch.distributed as dist

from tests.helpers import losses, new_port, records, run_ranks, train, write_corpus
from tests.updates import gradients, reference_gradients, relative_difference
from trainer.machine.ranks import init_distributed_mode
from trainer.sharding import clear_caches, is_sharded, own_part

# To start two to four processes takes longer than a quick test may.
pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
# {world size: (rows, micro-batches) of a rank}: 8 rows in all, or 9. The tail of an epoch leaves the last ranks short or without
# rows.
ONE_MICRO_BATCH = {2: (4, 1), 3: (3, 1)}
ACCUMULATED = {2: (2, 2), 3: (1, 3)}
QUICK_KINDS = ("dense packed", "moe packed", "minimind3 moe")
RUN = {
    "batch_size": 2, "use_moe": 1, "epochs": 1, "log_interval": 3, "val_fraction": 0.2, "eval_interval": 6,
    "sample_prompts": "the cat", "grad_clip": 0.1,
}  # fmt: skip


def in_group(name, work, timeout_s=60):
    """work(ranks) in a process group of its own."""
    new_port(name)
    ranks, _ = init_distributed_mode("cpu", timeout_s=timeout_s)
    try:
        return work(ranks)
    finally:
        clear_caches()
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


def own_share(engine):
    """This rank's share of the elements of weights and AdamW's moments."""
    tensors = [*engine.parameters]
    for kept in engine.optimizers[0].state.values():
        tensors += [kept["exp_avg"], kept["exp_avg_sq"]]
    assert all(is_sharded(tensor) for tensor in tensors)
    return sum(own_part(tensor).numel() for tensor in tensors) / sum(tensor.numel() for tensor in tensors)


def whole_runs(folder, optimizer):
    """A run, sharded and with whole models: {name: figures} of rank 0, and the share of a sharded AdamW's numbers."""
    found = {}
    for shard in ("full", "none"):
        new_port(f"run {shard}")
        options = {"shard": shard, "optimizer": optimizer, **RUN}
        run = train(data_path=f"{folder}/data.jsonl", out_dir=f"{folder}/{optimizer} {shard}", **options)
        if (shard, optimizer) == ("full", "adamw"):
            found["own"] = own_share(run.engine)
        if run.ranks.is_main:
            found[shard] = {
                "losses": losses(run),
                # The first line stands behind a micro-batch, before any update.
                "norms": [line["grad_norm"] for line in records(run, "grad_norm")[1:]],
                "val_losses": [line["val_loss"] for line in records(run, "val_loss")],
            }
            assert len(records(run, "text")) == len(records(run, "val_loss")) > 1
        del run
    return found


def assert_alike(folder, optimizer, runs, tolerance):
    """Norms are added up in another order, and with them the clipped gradients differ in their last bits."""
    for name, values in runs["none"].items():
        assert runs["full"][name] == pytest.approx(values, rel=tolerance), name
    weights = [torch.load(folder / f"{optimizer} {shard}" / "pretrain_16_moe.pth") for shard in ("full", "none")]
    # Files are in float16.
    torch.testing.assert_close(*weights, rtol=2e-3, atol=2 * tolerance)


# ------------------------------------------------------------------------------------------------ two ranks


def two_ranks(folder):
    def work(ranks):
        return {
            "sharded": {kind: cuts_of(kind, ranks, 2) for kind in QUICK_KINDS},
            "one rank": {kind: cuts_of_one_rank(kind, ranks.world_size) for kind in QUICK_KINDS},
        }

    result = {**in_group("gradients", work), "run": whole_runs(folder, "adamw")}
    gc.collect()
    result["left"] = sum(type(thing).__name__ == "DeviceMesh" for thing in gc.get_objects())
    return result


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


def test_a_run_is_that_of_whole_models_and_each_rank_has_half_of_weights_and_moments(both, folder):
    assert_alike(folder, "adamw", both[0]["run"], 1e-4)
    assert all(result["run"]["own"] <= 1.02 / 2 for result in both)


def test_nothing_of_a_sharded_run_outlives_its_process_group(both):
    """Else the process may abort when the interpreter ends."""
    assert [result["left"] for result in both] == [0, 0]


# ------------------------------------------------------------------------------------- more ranks, and other ways


def three_ranks(folder):
    def work(ranks):
        return {kind: cuts_of(kind, ranks, 3, prepare) for kind, prepare in PREPARED.items()}

    return in_group("gradients", work), whole_runs(folder, "muon")


RECOMPUTING = methodcaller("activation_checkpointing_enable", {"use_reentrant": False})
PREPARED = {"moe packed": RECOMPUTING, "minimind3 moe": None}


def test_three_ranks(folder):
    """Reference of the gradients: the formula. Tensors that ranks cannot divide evenly, layers that are computed again, and Muon."""
    results = run_ranks(three_ranks, str(folder), world_size=3)
    for gradients_of_kind, _ in results:
        for kind, cuts in gradients_of_kind.items():
            formula = reference_gradients(kind, rows_of_update=9)
            assert all(relative_difference(found, formula) < 1e-6 for found in cuts)
    assert_alike(folder, "muon", results[0][1], 1e-3)
