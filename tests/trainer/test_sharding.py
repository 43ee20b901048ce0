"""A model sharded among ranks in Gloo processes, started once. References: ranks with the whole model each, and one rank."""

import gc
from operator import methodcaller
from pathlib import Path

import pytest
import torch

from tests.helpers import losses, new_port, process_group, records, run_ranks, train, write_corpus
from tests.trainer.test_verify import faulty_rank
from tests.updates import gradients, reference_gradients, relative_difference
from trainer.sharding import clear_caches, is_sharded, own_part

# To start two to four processes takes longer than a quick test may.
pytestmark = pytest.mark.slow
# {world size: (rows, micro-batches) of a rank}: 8 rows in all, or 9. The tail of an epoch leaves the last ranks short of rows.
CUTS = {2: [(4, 1), (2, 2)], 3: [(3, 1), (1, 3)]}
QUICK_KINDS = ("dense packed", "moe packed", "minimind3 moe")
RUN = {
    "batch_size": 2, "use_moe": 1, "epochs": 1, "log_interval": 3, "val_fraction": 0.2, "eval_interval": 6,
    "sample_prompts": "the cat", "grad_clip": 0.1,
}  # fmt: skip
RECOMPUTING = methodcaller("activation_checkpointing_enable", {"use_reentrant": False})
PREPARED = {"moe packed": RECOMPUTING, "minimind3 moe": None}


def in_group(work):
    """work(ranks) in a process group of its own."""
    with process_group("gradients") as ranks:
        result = work(ranks)
        clear_caches()
        gc.collect()
    return result


def cuts_of(kind, ranks, group_size, prepare=None):
    """The gradients of each cut: in one micro-batch, and accumulated."""
    return [gradients(kind, *cut, ranks, group_size, prepare) for cut in CUTS[ranks.world_size]]


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


def two_ranks(folder):
    def work(ranks):
        sharded = {kind: cuts_of(kind, ranks, 2) for kind in QUICK_KINDS}
        alone = {kind: [gradients(kind, rows, 2 * steps) for rows, steps in CUTS[2]] for kind in QUICK_KINDS}
        return {"sharded": sharded, "one rank": alone}

    result = {**in_group(work), "run": whole_runs(folder, "adamw")}
    gc.collect()
    result["left"] = sum(type(thing).__name__ == "DeviceMesh" for thing in gc.get_objects())
    result["faults"] = faulty_rank(Path(folder), shard="full", use_moe=1)
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
    """Bitwise where each rank has one micro-batch. In the last update rank 1 is short of rows or has none."""
    for found in both[0]["sharded"][kind]:
        assert relative_difference(found, reference_gradients(kind)) < 1e-6
    for result in both:
        (once, accumulated), (once_alone, accumulated_alone) = result["sharded"][kind], result["one rank"][kind]
        assert relative_difference(once, once_alone) == 0
        assert relative_difference(accumulated, accumulated_alone) < 1e-7


def test_a_run_is_that_of_whole_models_and_each_rank_has_half_of_weights_and_moments(both, folder):
    assert_alike(folder, "adamw", both[0]["run"], 1e-4)
    assert all(result["run"]["own"] <= 1.02 / 2 for result in both)


def test_a_rank_with_flipped_bits_ends_as_the_undisturbed_one(both):
    """--verify_every; a wrong gradient may show on any rank."""
    assert all(result["faults"]["same"] and result["faults"]["named"] for result in both)
    assert "a row with a fault on rank" in both[0]["faults"]["error"]


def test_nothing_of_a_sharded_run_outlives_its_process_group(both):
    """Else the process may abort when the interpreter ends."""
    assert [result["left"] for result in both] == [0, 0]


def three_ranks(folder):
    def work(ranks):
        return {kind: cuts_of(kind, ranks, 3, prepare) for kind, prepare in PREPARED.items()}

    return in_group(work), whole_runs(folder, "muon")


def test_three_ranks(folder):
    """Reference of the gradients: the formula. Tensors that ranks cannot divide evenly, layers that are computed again, and Muon."""
    results = run_ranks(three_ranks, str(folder), world_size=3)
    for gradients_of_kind, _ in results:
        for kind, cuts in gradients_of_kind.items():
            formula = reference_gradients(kind, rows_of_update=9)
            assert all(relative_difference(found, formula) < 1e-6 for found in cuts)
    assert_alike(folder, "muon", results[0][1], 1e-3)
