"""One update: precision, accumulation, synchronisation, clipping and skipping, shared by all trainers.

A trainer hands in an *objective*: `objective(batch, totals) -> (loss, sums)`. `totals` describes the whole update over
all micro-batches and ranks, so the objective divides by the right numbers at once; `loss` (0-d) is this micro-batch's
share of the update's loss; `sums` (1-d, float32, detached) are the quantities to add up for the log.
"""

import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist


class Outcome(NamedTuple):
    """What became of an update, the same on every rank."""

    skipped: float  # updates not applied so far
    skipped_in_a_row: float
    grad_norm: float  # before clipping
    stop_signal: float  # signal number if a rank was asked to stop, else 0
    save: float  # > 0 if a rank was asked to save
    where: object = None  # what the caller of `poll` said about the update


class Engine:
    """Accumulates gradients over micro-batches and applies updates.

    A non-finite loss or gradient on any rank leaves parameters and optimiser state as they are on every rank. On CUDA
    nothing here waits for the device: the decision to skip is made by the fused optimiser itself, and the host reads
    the outcome of an update while the next one runs (`poll`).
    """

    def __init__(self, model, optimizer, objective, *, device, dtype, ranks, grad_clip=1.0, n_sums=4):
        self.model, self.optimizer, self.objective = model, optimizer, objective
        self.device, self.dtype, self.ranks, self.grad_clip = device, dtype, ranks, grad_clip
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        if ranks.world_size > 1:  # the same seed gives the same weights on machines of one kind; this gives them on all
            for parameter in self.parameters:
                dist.broadcast(parameter.data, src=0)
        self.fused = bool(optimizer.param_groups[0].get("fused"))
        sum_dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self.sums = torch.zeros(n_sums, device=device, dtype=sum_dtype)  # this rank's, since the last `collect`
        self.bad_losses = torch.zeros(1, device=device)  # non-finite ones of the update so far
        self.outcome = torch.zeros(len(Outcome._fields) - 1, device=device)  # without `where`
        self._pending = None  # (pinned copy of an earlier outcome, event that says it has arrived)

    def autocast(self):
        if self.dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def micro_batch(self, batch, totals):
        """Add the gradients of one micro-batch to those of the update that `totals` describes."""
        with self.autocast():
            loss, sums = self.objective(batch, totals)
        self.scaler.scale(loss).backward()
        self.bad_losses += ~torch.isfinite(loss)
        self.sums += torch.where(torch.isfinite(sums).all(), sums, 0.0)  # a skipped update is counted, not averaged

    def update(self, lr, stop_signal=0, save=False):
        """Synchronise, clip and apply the accumulated gradients with the learning rate `lr`; clear them.

        stop_signal (a signal number) and save: what this process was asked for; `poll` gives what any rank was.
        """
        requests = [float(stop_signal > 0), float(stop_signal), float(save)]
        stopping, signals, save, bad_losses = self._all_reduce(requests).unbind()
        self.bad_losses.zero_()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.parameters]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        # A NaN or infinity in any gradient makes the norm non-finite; a loss can be infinite with finite gradients.
        bad = (~torch.isfinite(norm) | (bad_losses > 0)).float()
        if self.grad_clip > 0:
            torch._foreach_mul_(gradients, (self.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        if self.fused:
            self.optimizer.found_inf = bad  # the kernel leaves everything as it is where this is 1
            self.optimizer.step()
        elif not bad.item():
            self.optimizer.step()
        if self.scaler.is_enabled():
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        skipped, in_a_row = self.outcome[0] + bad, (self.outcome[1] + 1) * bad
        stop_signal = signals / stopping.clamp(min=1.0)
        self.outcome = torch.stack((skipped, in_a_row, norm, stop_signal, save))

    def _all_reduce(self, requests):
        """Sum gradients, requests and bad losses over the ranks: the one synchronisation of an update."""
        requests = torch.cat((torch.tensor(requests).to(self.device, non_blocking=True), self.bad_losses))
        for p in self.parameters:
            if p.grad is None:  # a rank without rows in the ragged last update
                p.grad = torch.zeros_like(p)
        if self.ranks.world_size > 1:
            gradients = [p.grad for p in self.parameters]
            flat = torch.cat([*(g.reshape(-1) for g in gradients), requests])
            dist.all_reduce(flat)
            *parts, requests = flat.split([*(g.numel() for g in gradients), len(requests)])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
        return requests

    def poll(self, where=None):
        """The Outcomes that are known after an update, oldest first; `where` says what the update was.

        On CUDA that of the last update is still under way: the host gets it with the next one and need not wait for
        the device. All ranks get the same ones and so decide alike.
        """
        if self.device.type != "cuda":
            return [Outcome(*self.outcome.tolist(), where)]
        known = self.drain()
        host = torch.empty(len(self.outcome), pin_memory=True).copy_(self.outcome, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending = (host, arrived, where)
        return known

    def drain(self):
        """Wait for the Outcome that is under way, if any: a list of one or none."""
        if self._pending is None:
            return []
        (host, arrived, where), self._pending = self._pending, None
        arrived.synchronize()
        return [Outcome(*host.tolist(), where)]

    def collect(self):
        """The sums of all ranks since the last call, as floats (on rank 0; the other ranks get their own)."""
        if self.ranks.world_size > 1:
            dist.reduce(self.sums, dst=0)
        values = self.sums.tolist()
        self.sums.zero_()
        return values

    def state_dict(self):
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "skipped": self.outcome[:2].tolist(),  # in all, in a row
        }

    def load_state_dict(self, state):
        """Continue from `state_dict`; the options of the groups (weight decay, rates ...) stay this run's own."""
        own = [{name: value for name, value in g.items() if name != "params"} for g in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, options in zip(self.optimizer.param_groups, own, strict=True):
            group.update(options)
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.outcome[:2] = torch.tensor(state["skipped"])
