"""The tensors of a sharded model: what a rank has of one, how it is made whole, and how a whole one is sharded.

A sharded tensor is a DTensor of torch. Its rows are cut among the ranks of a group; a rank holds a plain tensor of its own
rows. A state dict that is read from a file has whole tensors, or TensorParts, which are the rows of this rank alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from common.arithmetic import ceil_div
from common.nested import replaced
from trainer.machine.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

# The dimension of a mesh of ranks along which tensors are sharded: the last one, and its name.
SHARD_DIM = -1
SHARD = "shard"


def is_sharded(value: object) -> "TypeIs[DTensor]":
    """Whether it is a tensor of which this rank has a part. Asked so, the class need not be imported."""
    return hasattr(value, "to_local")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, as a plain one that shares its memory; a tensor that is not sharded itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def rows_of_ranks(rows: int, size: int) -> list[int]:
    """How FSDP2 cuts a tensor's rows among the ranks of a group: equal parts, of which the last ones are short or empty."""
    most = ceil_div(rows, size)
    return [max(0, min(most, rows - rank * most)) for rank in range(size)]


@dataclass(frozen=True)
class TensorPart:
    """What a rank has of a sharded tensor, without the ranks: `own`, the rows from `first_row` on of a tensor of this shape."""

    own: torch.Tensor
    first_row: int
    shape: torch.Size


def part_of(tensor: "DTensor") -> TensorPart:
    """This rank's part of a sharded tensor, whose memory it shares."""
    mesh = tensor.device_mesh
    rows = rows_of_ranks(tensor.shape[0], mesh.size(SHARD_DIM))
    return TensorPart(own_part(tensor), sum(rows[: mesh.get_local_rank(SHARD)]), tensor.shape)


def own_rows(whole: torch.Tensor, like: "DTensor") -> torch.Tensor:
    """The rows of a whole tensor that this rank has of a sharded one."""
    part = part_of(like)
    return whole[part.first_row : part.first_row + len(part.own)]


def sharded(value: "torch.Tensor | TensorPart", like: "DTensor") -> "DTensor":
    """A whole tensor, which each rank has, or this rank's part, as one that is sharded like another. Nothing is sent.

    A whole one is copied, a part is taken over.
    """
    from torch.distributed.tensor import DTensor

    own = (
        value.own.to(like.device) if isinstance(value, TensorPart) else own_rows(value, like).to(like.device, copy=True)
    )
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@torch.no_grad()
def whole_of(tensor: "DTensor") -> torch.Tensor:
    """A sharded tensor in one piece. All ranks of a group must call it.

    `full_tensor` does the same, and torch then remembers the process group for ever: see `Shards.close`.
    """
    group = tensor.device_mesh.get_group(SHARD)
    own = tensor.to_local()
    # All ranks send as many rows.
    most = ceil_div(tensor.shape[0], group.size())
    sent = own.new_zeros(most, *tensor.shape[1:])
    sent[: len(own)] = own
    received = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(received, sent, group=group)
    return torch.cat(received)[: tensor.shape[0]]


def gathered(state: Any, ranks: Ranks) -> Any:
    """A nest of dicts and lists in which each sharded tensor is whole, on the CPU. A tensor that is in it twice stays one.

    All ranks must call it. Rank 0 alone keeps what is gathered, one tensor after the other; the others have None there.
    """

    def whole(name: str, value: Any) -> Any:
        if not is_sharded(value):
            return value
        gathered_value = whole_of(value)
        return gathered_value.cpu() if ranks.is_main else None

    return replaced(state, whole)


def sharded_weights(weights: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A state dict of whole tensors, which each rank has, or of this rank's TensorParts, sharded as the model is."""
    own = model.state_dict()
    return {name: sharded(value, own[name]) if is_sharded(own[name]) else value for name, value in weights.items()}


def sharded_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimiser, of whole tensors or TensorParts as above, sharded as its parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_parameters: dict[int, dict[str, Any]] = {}
    for number, kept in state["state"].items():
        parameter = parameters[number]
        of_parameters[number] = {}
        for name, value in kept.items():
            # Counts are numbers that every rank has.
            has_its_shape = isinstance(value, (torch.Tensor, TensorPart)) and value.shape == parameter.shape
            of_parameters[number][name] = (
                sharded(value, parameter) if has_its_shape and is_sharded(parameter) else value
            )
    return {**state, "state": of_parameters}
