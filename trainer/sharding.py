"""A sharded model (`--shard`), by PyTorch's FSDP2: each rank keeps a part of every tensor.

Without it each rank has the whole model and optimiser state, 16 bytes per parameter with AdamW, and the ranks exchange
gradients (trainer/reducer.py). With it the ranks share one model:

    rank 0   the first half of each tensor's rows      weight, gradient, moments
    rank 1   the second half                           weight, gradient, moments

A layer's weights are gathered before it runs and freed after it, and once more in the backward pass. Then its gradients
are summed over the ranks, and each keeps the sum of its own rows. So all ranks must run the model together and equally often: a
rank without rows computes some that do not count, also in evaluation and sampling.

A sharded tensor is a torch DTensor; a state dict in a file has whole tensors.
"""

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.machine.ranks import Ranks, compare_with_main
from trainer.settings import FULL

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_sharded(value: object) -> "TypeIs[DTensor]":
    """True for a DTensor. Found by an attribute, so that the class need not be imported."""
    return hasattr(value, "to_local")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, or the rows of a coalesced sparse one, as a plain tensor of the same memory; any other
    tensor unchanged."""
    if tensor.is_sparse:
        return tensor.values()
    return tensor.to_local() if is_sharded(tensor) else tensor


def rows_of_ranks(rows: int, size: int) -> list[int]:
    """Rows of each rank, as FSDP2 splits a tensor: equal parts, of which the last ones may be short or empty."""
    most = math.ceil(rows / size)
    return [max(0, min(most, rows - rank * most)) for rank in range(size)]


def sharded_as(like: torch.Tensor, value: Any) -> Any:
    """Shard a whole tensor, which each rank has, as `like` is sharded; no communication. Other values, such as a count,
    do not change."""
    if not (is_sharded(like) and isinstance(value, torch.Tensor) and value.shape == like.shape):
        return value
    # The import takes a second, and most runs do without.
    from torch.distributed.tensor import DTensor

    rows = rows_of_ranks(like.shape[0], like.device_mesh.size())
    own = value.split(rows)[like.device_mesh.get_local_rank()].to(like.device, copy=True)
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def sharded_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Shard the state dict of an optimiser, which has whole tensors, like its parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded: dict[int, dict[str, Any]] = {}
    for number, moments in state["state"].items():
        sharded[number] = {name: sharded_as(parameters[number], value) for name, value in moments.items()}
    return {**state, "state": sharded}


def ranks_per_model(shard: str, ranks: Ranks) -> int:
    """Number of ranks that share a model, by --shard; 1: each has its own."""
    return ranks.world_size if shard == FULL else 1


def put_on_device(
    model: nn.Module, identity: Mapping[str, object], shard: str, ranks: Ranks, device: torch.device
) -> None:
    """Put a model on the device of each rank, sharded over all of them if --shard asks for it.

    identity: of the job. Errors: UserError if it differs between ranks: they exchange weights, whose shapes follow from it.
    """
    compare_with_main(ranks, identity)
    if ranks_per_model(shard, ranks) > 1:
        shard_model(model, ranks, device)
    else:
        model.to(device)


def shard_model(model: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Shard a model over all ranks. A collective, as are all later calls of the model.

    Its parameters become DTensors, of which this rank has a part, so build the optimiser afterwards. The weights are those
    of rank 0: a seed gives the same ones only on machines of the same kind.
    """
    # The imports take a second, and most runs do without.
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    # whole weights, while the model still has them
    weights = model.state_dict() if ranks.is_main else {}

    # Units, each gathered as one: every layer, and the model for the parameters outside the layers.
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    layers = [module for name, module in model.named_modules() if re.search(r"\.layers?\.\d+$", name)]
    for module in (*layers, model):
        unit = fully_shard(module, mesh=mesh)
        assert isinstance(unit, FSDPModule)
        # Losses are divided by the totals of the whole update, so gradients are sums. (FSDP2 would divide them by the
        # number of ranks.)
        unit.set_gradient_divide_factor(1.0)
        # Gloo cannot scale within a sum.
        unit.set_force_sum_reduction_for_comms(True)
    # MiniMind computes its losses and samples outside of `forward`.
    for method in ("training_losses", "next_logits"):
        if hasattr(model, method):
            register_fsdp_forward_method(model, method)

    # Rank 0's weights, sent one tensor at a time: all of them may not fit on a GPU. Buffers stay whole.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)


def clear_caches() -> None:
    """Call after the last use of a sharded model, before the process group is destroyed.

    torch caches how it has computed with sharded tensors, and the caches refer to the group. A process that ends while
    something refers to a destroyed group sometimes aborts.
    """
    from torch.distributed.tensor import _redistribute, debug

    # No public way clears these caches.
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


def add_up(message: torch.Tensor, own_norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (sum of all ranks' messages (1-d), norm of the whole gradient (0-d)), by one small all-reduce.

    own_norm: of this rank's parts.
    """
    # The square of a large norm overflows float32.
    square = own_norm.double().square()
    together = torch.cat((message.double(), square.view(1)))
    dist.all_reduce(together)
    return together[:-1].float(), together[-1].sqrt().float()
