"""One update: precision, accumulation, synchronisation, clipping and skipping, shared by all jobs.

An update is one optimiser step. Its rows are split into micro-batches, which are distributed over the ranks. The job
provides an *objective* that is called for each micro-batch: `objective(batch, totals) -> (loss, sums)`. `totals`
describes the whole update over all micro-batches and ranks, so the objective divides by the right numbers at once, and
nothing is rescaled afterwards. `loss` (0-d) is this micro-batch's share of the update's loss; `sums` (1-d, float32,
detached) are the quantities to add up for the log.

A non-finite loss or gradient must not reach the weights. So an update has three stages:

1. The ranks add up their gradients, and after them a small message: whether any rank had a non-finite loss, was asked to
   stop, or was asked to save. If the model is sharded (trainer/sharding.py), the message also holds the norms of the
   ranks' parts.
2. From the sums every rank derives the same decision: whether the update is good, and how far to clip it.
3. A good update is applied. A bad one leaves weights and optimiser unchanged, and is counted.

The decision is a number on the device. Reading it would make the host wait until the device has done all its work, and
then the device wait for the host. With a fused optimiser on CUDA nothing here reads it: the optimiser does, on the
device, and the host learns an update's outcome while the next one runs. Other optimisers cost one wait per update.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common.processes import stop_signals
from dataset.loader import to_device
from trainer.cuda_graphs import UpdateGraphs, pinned_numbers
from trainer.machine.command_line import EVENT
from trainer.machine.devices import autocast
from trainer.machine.ranks import Ranks
from trainer.optim.build import build_optimizers
from trainer.optim.muon import iteration_dtype
from trainer.reducer import DistributedReducer
from trainer.settings import NONE, OptimizerSettings
from trainer.sharding import add_up, clear_caches, is_sharded, own_part, put_on_device, sharded_as, sharded_state
from trainer.snapshot import snapshot

# The loss of a job, see above. Batch and totals are NamedTuples of the job.
Objective = Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]]
# (stop request, save) of this process, see `Engine.update`
Requests = Callable[[], tuple[int, bool]]

# stop request of a rank whose loader failed; any other is that of StopSignals
LOADER_FAILED = 1 << 16
# All stop requests. Messages are summed over the ranks, so each request has its own element.
STOP_REQUESTS = (*stop_signals(), EVENT, LOADER_FAILED)


class Update(NamedTuple):
    """One optimiser step: the rows [first_row, end_row) of an epoch of `n_rows`, over all ranks."""

    number: int  # within the run, from 1
    epoch: int  # from 0
    n_rows: int
    first_row: int
    end_row: int
    first_step: int  # micro-batches, counted from 0 within the epoch
    last_step: int
    targets: int  # trained tokens


class Outcome(NamedTuple):
    """Outcome of an update, the same on every rank."""

    # updates skipped so far: in total, and since the last good one (not counting float16 overflows)
    skipped: float
    skipped_in_a_row: float
    grad_norm: float  # before clipping
    stop_request: float  # the largest of all ranks: the number of a signal, or LOADER_FAILED; 0: none
    save: float  # > 0 if any rank was asked to save
    overflow: float  # 1 if skipped because scaled float16 gradients overflowed, with finite losses; the scale is halved
    update: Update | None = None  # argument of `poll`


class Idle(NamedTuple):
    """A batch that is computed only because other ranks compute theirs: it contributes nothing."""

    batch: Any


# length of `Engine.outcome`
N_OUTCOME = len(Outcome._fields) - 1


class Engine:
    """Accumulates gradients over micro-batches and applies updates."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        objective: Objective,
        *,
        device: torch.device,
        dtype: torch.dtype,
        ranks: Ranks,
        grad_clip: float = 1.0,
        n_sums: int,
        cuda_graphs: bool | None = None,
    ) -> None:
        """optimizers: of disjoint parameters. dtype: of matrix products. grad_clip: maximum norm of the gradient; 0: no clipping.
        n_sums: length of `sums`.

        cuda_graphs: whether to record the kernels of an update, with a fused optimiser; None: they are not always the same, see
        may_record in trainer/cuda_graphs.py.
        """
        self.model = model
        self.optimizers = optimizers
        self.objective = objective
        self.device = device
        self.dtype = dtype
        self.ranks = ranks
        self.grad_clip = grad_clip
        self.parameters: list[torch.nn.Parameter] = [p for group in self.groups for p in group["params"]]
        # True: each rank has a part of every parameter (trainer/sharding.py)
        self.is_sharded = is_sharded(self.parameters[0])
        # torch's initial scale, 2^16, loses ELECTRA's first updates. Its public trainers start with 2^11.
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**11, enabled=dtype is torch.float16)
        if self.scaler.is_enabled():
            # Create the scale now: a rank without rows would reach unscale_ without one.
            self.scaler.scale(torch.zeros((), device=device))
        # A fused optimiser reads `found_inf` on the device, and is a no-op if it is 1. The first group decides for all: Muon, which
        # follows AdamW, reads it too.
        self.fused = bool(self.groups[0].get("fused"))
        self.reducer: DistributedReducer | None = None
        if ranks.world_size > 1 and not self.is_sharded:
            # A seed gives the same weights only on machines of the same kind.
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.data, src=0)
            tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding) and m.sparse]
            self.reducer = DistributedReducer([p for p in model.parameters() if p.requires_grad], tables)
        # MPS has no float64.
        sum_dtype = torch.float32 if device.type == "mps" else torch.float64
        # this rank's sums since the last `collect`
        self.sums = torch.zeros(n_sums, device=device, dtype=sum_dtype)
        # number of non-finite losses of the current update
        self.bad_losses = torch.zeros(1, device=device)
        # in the order of Outcome's fields
        self.outcome = torch.zeros(N_OUTCOME, device=device)
        self.graphs: UpdateGraphs | None = None
        # On a first reading skip the graphs: without them, as on a CPU, an update is `_accumulate` and `_end_update`.
        if cuda_graphs is not None and self.fused:
            assert ranks.world_size == 1 and not self.scaler.is_enabled()
            self.graphs = UpdateGraphs(
                partial(self._accumulate, last=True, counts=True),
                self._end_update,
                self.groups,
                len(STOP_REQUESTS) + 1,
                device,
                self._changed_by_an_update,
                may_record=cuda_graphs,
            )
        self._stop_numbers = torch.tensor(STOP_REQUESTS, device=device, dtype=torch.float32)
        # outcome in flight: (pinned copy, event of its arrival, its update)
        self._pending: tuple[torch.Tensor, torch.cuda.Event, Update | None] | None = None

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimisers, each with its rate."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Context for running the model: matrix products in `dtype`."""
        # A sharded model gathers one layer at a time, and must not cache half-precision copies of all.
        return autocast(self.device, self.dtype, cache_weights=not self.is_sharded)

    # -------------------------------------------------------------------------------------------------- an update

    def train(
        self, batches: Sequence[Any], totals: Any, rate: float, requests: Requests = lambda: (0, False)
    ) -> Iterator[None]:
        """Compute an update and apply it with this learning rate. Yields after each micro-batch, whose sums are then added.

        batches: of this rank, a micro-batch each; None: it has no rows in it. requests: asked for once, at the end.
        """
        for number, batch in enumerate(batches, start=1):
            if batch is not None:
                counts = not isinstance(batch, Idle)
                batch = to_device(batch if counts else batch.batch, self.device)
                self.micro_batch(batch, totals, last=number == len(batches), counts=counts)
            yield
        self.update(rate, *requests())

    def micro_batch(self, batch: Any, totals: Any, last: bool = False, counts: bool = True) -> None:
        """Forward and backward pass of one micro-batch of the update that `totals` describes.

        last: last one of its update, so its gradients are sent to the other ranks as soon as they are ready.
        counts: False for an Idle batch.
        """
        if self.graphs is not None:
            # A single rank has all rows.
            assert counts
            self.graphs.compute(batch, totals)
        else:
            self._accumulate(batch, totals, last, counts)

    def _accumulate(self, batch: Any, totals: Any, last: bool, counts: bool) -> None:
        """Device part of `micro_batch`."""
        if self.reducer is not None:
            self.reducer.begin_micro_batch(last)
        with self.autocast():
            loss, sums = self.objective(batch, totals)
        if not counts:
            loss = loss * 0.0
            sums = torch.zeros_like(sums)
        self.scaler.scale(loss).backward()
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                # Else each micro-batch would add its rows to a list.
                parameter.grad = parameter.grad.coalesce()
        self.bad_losses += ~torch.isfinite(loss)
        # One NaN would spoil the mean of the whole log interval: leave such a micro-batch out.
        self.sums += torch.where(torch.isfinite(sums).all(), sums, 0.0)

    def update(self, lr: float, stop_request: int = 0, save: bool = False) -> None:
        """Synchronise, clip and apply the accumulated gradients with the learning rate `lr`; clear them.

        The stages are those at the top of this file. With a fused optimiser nothing waits for the device.
        stop_request (one of STOP_REQUESTS), save: requests to this process; `poll` returns those to any rank.
        """
        # Stage 1: gradients and messages are added up over the ranks.
        assert stop_request in (0, *STOP_REQUESTS)
        # 1 or 0 for each kind of stop: the sum over the ranks shows which ones were requested.
        stops = [float(stop_request == number) for number in STOP_REQUESTS]
        requests = [*stops, float(save)]
        rates = [lr * group.get("lr_scale", 1.0) for group in self.groups]
        if self.graphs is not None:
            self.graphs.update(rates, requests)
            # Code that reads the groups, such as a checkpoint, expects numbers.
            for group, rate in zip(self.groups, rates, strict=True):
                group["lr"] = rate
        else:
            self._end_update(rates, pinned_numbers(requests, self.device).to(self.device, non_blocking=True))

    def _end_update(self, rates: Sequence[float | torch.Tensor], requests: torch.Tensor) -> None:
        """Device part of `update`. rates: of the optimisers' groups. requests: of this rank to all, see `update`."""
        # one number for each of STOP_REQUESTS, one for a save, one for non-finite losses
        message = torch.cat((requests, self.bad_losses))
        self.bad_losses.zero_()
        for parameter in self.parameters:
            # not reached by this update, for example on a rank without rows
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.reducer is not None:
            # The one synchronisation of an update: gradients and messages. With a sharded model the messages follow below, with
            # the norm.
            message = self.reducer.finish(message)

        # Stage 2: decide whether the update is good, and clip it.
        if self.scaler.is_enabled():
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)

        gradients = [own_part(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if self.is_sharded:
            message, norm = add_up(message, norm)
        stops = message[: len(STOP_REQUESTS)]
        any_save, bad_losses = message[len(STOP_REQUESTS) :].unbind()
        # 1 if the update must not be applied, else 0; on the device, not read here. A NaN or infinity in any gradient makes the
        # norm non-finite; a loss can be infinite with finite gradients.
        bad = (~torch.isfinite(norm) | (bad_losses > 0)).float()
        if self.grad_clip > 0:
            # torch.nn.utils.clip_grad_norm_ would compute the norm again.
            scale = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, scale)

        # Stage 3: apply the update, or skip and count it.
        for group, rate in zip(self.groups, rates, strict=True):
            group["lr"] = rate
        if self.fused or not bad.item():
            for optimizer in self.optimizers:
                if self.fused:
                    optimizer.found_inf = bad  # type: ignore[attr-defined]  # which torch's own GradScaler sets too
                optimizer.step()
        overflow = torch.zeros_like(bad)
        if self.scaler.is_enabled():
            one = torch.ones((), device=self.device)
            scale_before = self.scaler.scale(one)
            self.scaler.update()
            # A scaler starts with a large scale and halves it until the gradients fit into float16. At a scale of 1 or less the scale
            # is not the cause.
            is_lower = (scale_before > 1) & (self.scaler.scale(one) < scale_before)
            overflow = bad * (is_lower & (bad_losses == 0))
        # The gradients of a reducer are views of its buckets.
        keeps_gradients = self.graphs is not None or self.reducer is not None
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not keeps_gradients)
        # The outcome for `poll`. Up to here `outcome` is that of the previous update.
        skipped = self.outcome[0] + bad
        skipped_in_a_row = (self.outcome[1] + 1 - overflow) * bad
        # Ranks may have received different signals.
        signal = torch.where(stops > 0, self._stop_numbers, 0.0).max()
        self.outcome.copy_(torch.stack((skipped, skipped_in_a_row, norm, signal, any_save, overflow)))

    def weights_and_moments(self) -> dict[str, torch.Tensor]:
        """{name: this rank's part}: weights first, then moments, once an update has made them."""
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        tensors = {names[parameter]: own_part(parameter.detach()) for parameter in self.parameters}
        for optimizer in self.optimizers:
            for parameter, moments in optimizer.state.items():
                for name, moment in moments.items():
                    if isinstance(moment, torch.Tensor):
                        tensors[f"{name} of {names[parameter]}"] = own_part(moment)
        return tensors

    def _changed_by_an_update(self) -> list[torch.Tensor]:
        """All tensors that micro-batches and the end of an update change; their addresses are fixed after a first update."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [self.sums, self.bad_losses, self.outcome, *gradients, *self.weights_and_moments().values()]

    # ------------------------------------------------------------------------------------------ outcomes of updates

    def poll(self, update: Update | None = None) -> list[Outcome]:
        """Returns the Outcomes known after this update, oldest first.

        On CUDA that of the last update is still in flight: it is returned with the next one, so the host need not wait for
        the device. All ranks get the same ones and so decide alike.
        """
        if self.device.type != "cuda":
            return [Outcome._make([*self.outcome.tolist(), update])]
        known = self.drain()
        # Only a copy into pinned memory is asynchronous.
        host = torch.empty(N_OUTCOME, pin_memory=True).copy_(self.outcome, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending = (host, arrived, update)
        return known

    def drain(self) -> list[Outcome]:
        """Wait for the Outcome in flight, if any. Returns a list of one or none."""
        if self._pending is None:
            return []
        host, arrived, update = self._pending
        self._pending = None
        arrived.synchronize()
        return [Outcome._make([*host.tolist(), update])]

    def collect(self) -> list[float]:
        """Returns the sums of all ranks since the last call, as floats."""
        if self.ranks.world_size > 1:
            # On all ranks, though only rank 0 logs: Gloo has no `reduce` for tensors on a GPU.
            dist.all_reduce(self.sums)
        values = self.sums.tolist()
        self.sums.zero_()
        return values

    def close(self) -> None:
        """Call after the last update, before the process group is destroyed."""
        # A recorded graph keeps the memory of its activations.
        self.graphs = None
        if self.is_sharded:
            clear_caches()

    # ----------------------------------------------------------------------------------------------- checkpoints

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the model's state dict on the CPU, for rank 0 only. A collective if the model is sharded."""
        # keep_vars: `snapshot` recognises tied parameters by identity.
        return snapshot(self.model.state_dict(keep_vars=True), keeps=self.ranks.is_main)

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Load a state dict of `weights`, which all ranks have."""
        own = self.model.state_dict()
        self.model.load_state_dict({name: sharded_as(own[name], value) for name, value in weights.items()})

    def state_dict(self) -> dict[str, Any]:
        """State for a resume, besides the weights. If the model is sharded, so are the moments in it."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return {
            "optimizer": states[0] if len(states) == 1 else {"optimizers": states},
            "scaler": self.scaler.state_dict(),
            # in total, and in a row
            "skipped": self.outcome[:2].tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; the options of the groups (weight decay, `lr_scale` ...) stay those of this run."""
        saved = state["optimizer"]
        for optimizer, part in zip(self.optimizers, saved.get("optimizers", [saved]), strict=True):
            groups = optimizer.state_dict()["param_groups"]
            for group, before in zip(groups, part["param_groups"], strict=True):
                # Except the rate, from the last update: a finished run that is resumed and saved again stays the same.
                group["lr"] = before["lr"]
            # Each rank has the whole state; a sharded model takes this rank's rows of it.
            optimizer.load_state_dict(sharded_state({**part, "param_groups": groups}, optimizer))
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.outcome[:2] = torch.tensor(state["skipped"])


def make_engine(
    model: torch.nn.Module,
    objective: Objective,
    settings: OptimizerSettings,
    *,
    n_sums: int,
    identity: Mapping[str, object],
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    shard: str = NONE,
    cuda_graphs: bool | None = None,
    **adam: Any,
) -> Engine:
    """Put a model on its device and build its engine, with the optimisers of the settings.

    identity: of the job, compared among the ranks. shard: --shard. cuda_graphs: see Engine. adam: options of AdamW.
    """
    # These depend on a rank's hardware, not on --dtype alone. Gradients of a float16 rank are scaled, and cannot be added to others.
    facts = {"precision": str(dtype), **identity}
    if settings.optimizer == "muon":
        facts["precision of Muon's iterations"] = str(iteration_dtype(device))
    put_on_device(model, facts, shard, ranks, device)
    return Engine(
        model,
        build_optimizers(model, settings, ranks, **adam),
        objective,
        device=device,
        dtype=dtype,
        ranks=ranks,
        grad_clip=settings.grad_clip,
        n_sums=n_sums,
        cuda_graphs=cuda_graphs,
    )
