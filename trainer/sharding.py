"""A sharded model (`--shard`), by PyTorch's FSDP2: each rank keeps a part of every tensor.

Without it each rank has the whole model and the whole state of the optimiser, 16 bytes for each parameter with AdamW, and
the ranks tell each other their gradients (trainer/reducer.py). With it the ranks of a group have one model together:

    rank 0   the first half of each tensor's rows      weight, gradient, moments
    rank 1   the second half                           weight, gradient, moments

A layer's weights are gathered before it is computed, and dropped behind it; in the backward pass once more. Then its
gradients are added up over the group, and each rank keeps the sum of its own rows. So beside its own parts a rank holds
one layer's weights and gradients at a time, and what is in no layer: embeddings, head and last norm.

With more ranks than a group has, the groups hold the same, and add up their gradients too, once an update (HSDP).

Whatever computes with the model takes part in these gatherings, so all ranks have to do it together, and equally often: a
rank without rows computes some that count for nothing, also in evaluations and samples.

A sharded tensor is a DTensor of torch. Its rows are cut among the ranks of a group; a rank holds a plain tensor of its own
rows. A state dict that is read from a file has whole tensors, or TensorParts, which are the rows of this rank alone.
"""

import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from common.errors import UserError
from common.wording import counted
from model.products import without_kept_copies
from trainer.machine.collectives import compare_with_main, on_main
from trainer.machine.ranks import Ranks, network_of
from trainer.machine.settings import FULL, NONE

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.nested import replaced

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
    most = math.ceil(rows / size)
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
    most = math.ceil(tensor.shape[0] / group.size())
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


ModelT = TypeVar("ModelT", bound=PreTrainedModel)

# Methods of a model, beside `forward`, that compute with its weights.
FORWARD_METHODS = ("training_losses",)
# How long the ranks wait for each other in a save at least. Its time is that of their disks, and rank 0 writes the weights
# of the whole model before its part.
LONGEST_SAVE = timedelta(hours=1)


def group_size_of(shard: str, ranks: Ranks) -> int:
    """How many ranks have one model together, as --shard says it; 1: each has its own.

    Errors: UserError where the ranks cannot be divided into such groups.
    """
    if shard == NONE:
        return 1
    if shard == FULL:
        return ranks.world_size
    size = int(shard)
    if ranks.world_size % size:
        raise UserError(
            f"--shard {size}: {counted(ranks.world_size, 'rank')} cannot be divided into groups of {size}; "
            "--shard full makes one group of all, however many there are"
        )
    return size


def put_on_device(
    model: nn.Module, identity: Mapping[str, object], group_size: int, ranks: Ranks, device: torch.device
) -> "Shards | None":
    """Put a model on the device of each rank, sharded among the ranks of a group; None where a group is one rank, which has
    the whole. identity: of the job. Errors: UserError where the ranks' differ: they give each other weights, whose shapes
    follow from it."""
    compare_with_main(ranks, identity)
    if group_size > 1:
        return Shards(model, group_size, ranks, device)
    model.to(device)
    return None


def build_on_main(ranks: Ranks, build: Callable[[], ModelT]) -> ModelT:
    """The model of `build()`. Rank 0 alone has its weights, since no other needs the memory for them.

    The other ranks make one of the same config on the meta device, where tensors have shapes and no content.
    Errors: those of `build`, which end all ranks.
    """
    built: list[ModelT] = []

    def work() -> tuple[type[ModelT], PretrainedConfig]:
        built.append(build())
        return type(built[0]), built[0].config

    kind, config = on_main(ranks, work)
    if built:
        return built[0]
    with torch.device("meta"):
        return kind(config)


def mesh_of(ranks: Ranks, group_size: int, device_type: str) -> "DeviceMesh":
    """How the ranks stand to each other: those of a group along the last dimension, those that hold the same along the first.

    A collective.
    """
    from torch.distributed.device_mesh import DeviceMesh

    replicas = ranks.world_size // group_size
    if replicas == 1:
        assert dist.group.WORLD is not None
        return DeviceMesh.from_group(dist.group.WORLD, device_type, mesh_dim_names=(SHARD,))
    # The ranks of a group follow each other, so that they are on one machine as far as that is large enough.
    numbers = torch.arange(ranks.world_size).view(replicas, group_size)
    # torch would make these groups too, but they would wait for half an hour, whatever --dist_timeout says.
    groups = []
    for numbers_of_groups in (numbers.T, numbers):
        own, _ = dist.new_subgroups_by_enumeration(numbers_of_groups.tolist(), timeout=ranks.timeout)
        groups.append(own)
    return DeviceMesh.from_group(groups, device_type, numbers, mesh_dim_names=("replicate", SHARD))


def shard_units(model: nn.Module, mesh: "DeviceMesh") -> "list[FSDPModule]":
    """Shard a model over a mesh, in place. Returns its units, which are what is gathered at once: each layer, and the rest."""
    # They take a second to import, and most runs do without.
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    without_kept_copies(model)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    # The model comes last: it gets what is in no layer.
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    for name in FORWARD_METHODS:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    units: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        # Losses are divided by the numbers of the whole update, so gradients are sums. (FSDP2 would divide them by the
        # number of ranks.)
        unit.set_gradient_divide_factor(1.0)
        # Gloo cannot multiply while it adds up.
        unit.set_force_sum_reduction_for_comms(True)
    return units


class Shards:
    """The model of this run, sharded within groups of ranks. All ranks must make it, and make the same calls of it.

    model: changed in place. Its parameters are DTensors afterwards, of which this rank has a part, so an optimiser is to be
    made after this. Rank 0 has its weights; on the others it may be one of the meta device.
    """

    def __init__(self, model: nn.Module, group_size: int, ranks: Ranks, device: torch.device) -> None:
        assert ranks.world_size % group_size == 0
        self.model = model
        self.ranks = ranks
        # How many groups of ranks have the same parts.
        self.replicas = ranks.world_size // group_size
        with network_of(ranks):
            mesh = mesh_of(ranks, group_size, device.type)
            # All ranks, for the threads that save: their messages must not come between those of the training.
            timeout = max(ranks.timeout, LONGEST_SAVE) if ranks.timeout is not None else LONGEST_SAVE
            self.saving_group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        # The ranks that have one model together.
        self.group: dist.ProcessGroup = mesh.get_group(SHARD)
        # What `leave_groups` leaves: the process group of all ranks was there before this model.
        of_mesh = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
        self.own_groups = [self.saving_group, *[group for group in of_mesh if group != dist.group.WORLD]]
        # Whole ones, as long as the model has them.
        weights = model.state_dict() if ranks.is_main else {}
        self.units = shard_units(model, mesh)
        if any(parameter.is_meta for parameter in model.parameters()):
            materialise(model, device)
        self._send_weights(weights, device)

    @torch.no_grad()
    def _send_weights(self, weights: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Give each rank its parts of the weights, which rank 0 has; and the buffers, which stay whole.

        One tensor at a time: no rank but the first has room for all of them.
        """
        for name, parameter in self.model.named_parameters():
            assert is_sharded(parameter)
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if self.ranks.is_main:
                whole.copy_(weights[name])
            dist.broadcast(whole, src=0)
            own_part(parameter).copy_(own_rows(whole, parameter))
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)

    @property
    def described(self) -> str:
        """A line for the user."""
        size = self.ranks.world_size // self.replicas
        groups = f"; {self.replicas} groups of ranks hold the same" if self.replicas > 1 else ""
        return f"{size} ranks have weights, gradients and the optimiser's states together{groups}"

    @staticmethod
    def close() -> None:
        """To be called when nothing more is computed with the model, before the process group is left.

        torch remembers how it has computed with sharded tensors, and with that the group. A process that ends while
        something refers to a group that it has left may abort, once in some launches.
        """
        from torch.distributed.tensor import _redistribute, debug

        # There is no other way to make it forget. Other versions of torch may remember in other places.
        infos = getattr(_redistribute, "_gen_transform_infos", None)
        for place, name in (
            (debug, "_clear_sharding_prop_cache"),
            (_redistribute, "clear_redistribute_planner_cache"),
            (infos, "cache_clear"),
        ):
            forget = getattr(place, name, None)
            if forget is not None:
                forget()

    def leave_groups(self) -> None:
        """To be called by all ranks when nothing more is computed with the model, where the process trains another one then.

        Each group has connections to its other ranks.
        """
        # One that has left would break off what another still computes.
        dist.barrier()
        for group in self.own_groups:
            dist.destroy_process_group(group)

    # -------------------------------------------------------------------------------------------- in an update

    def begin_micro_batch(self, last: bool) -> None:
        """last: no other of this update follows. The groups add up their gradients once, after it."""
        if self.replicas == 1:
            return
        for unit in self.units:
            # For all units at once there is a flag; they are a list here.
            unit.set_requires_all_reduce(last, recurse=False)

    def add_up(self, message: torch.Tensor, own_norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of the messages (1-d) over all ranks, norm of the whole gradient (0-d)), in one small all-reduce.

        own_norm: of this rank's parts. Each part is counted once for each group.
        """
        # The square of a large norm is beyond float32.
        square = own_norm.double().square() / self.replicas
        together = torch.cat((message.double(), square.view(1)))
        dist.all_reduce(together)
        return together[:-1].float(), together[-1].sqrt().float()


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give the tensors of a model on the meta device memory, without content. Tied parameters stay tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    # It makes a new parameter for each of these names.
    model.to_empty(device=device)
    for first, *others in names.values():
        parameter = model.get_parameter(first)
        for other in others:
            module, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(module), attribute, parameter)
