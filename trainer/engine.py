"""One update: precision, accumulation, synchronisation, clipping and skipping, shared by all trainers.

A trainer hands in an *objective*: `objective(batch, totals) -> (loss, sums)`. `totals` describes the whole update over
all micro-batches and ranks, so the objective divides by the right numbers at once; `loss` (0-d) is this micro-batch's
share of the update's loss; `sums` (1-d, float32, detached) are the quantities to add up for the log.
"""

import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist

BUCKET_BYTES = 25 << 20  # of gradients that go over the network in one piece


class Outcome(NamedTuple):
    """What became of an update, the same on every rank."""

    skipped: float  # updates not applied so far
    skipped_in_a_row: float
    grad_norm: float  # before clipping
    stop_signal: float  # signal number if a rank was asked to stop, else 0
    save: float  # > 0 if a rank was asked to save
    where: object = None  # what the caller of `poll` said about the update


class Reducer:
    """Sums gradients over the ranks in buckets, each as soon as the backward pass has finished its parameters.

    Buckets start in one fixed order, the last parameters first, so that all ranks make the same calls whatever each of
    them has to train; what is still missing when `finish` is called counts as zero.
    """

    def __init__(self, parameters, bucket_bytes=BUCKET_BYTES):
        """parameters: in about the order of the forward pass."""
        self.buckets, size = [[]], 0
        for p in reversed(parameters):
            if size and size + p.nbytes > bucket_bytes:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += p.nbytes
        self.active, self._started = False, []
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda _, number=number: self._finished_one(number))
        self._missing = [len(bucket) for bucket in self.buckets]

    def _finished_one(self, number):
        if not self.active:  # more micro-batches of this update follow
            return
        self._missing[number] -= 1
        while len(self._started) < len(self.buckets) - 1 and not self._missing[len(self._started)]:
            self._start()

    def _start(self, *more):
        flat = torch.cat([*(p.grad.reshape(-1) for p in self.buckets[len(self._started)]), *more])
        self._started.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self, extra):
        """Wait until every gradient holds its sum; returns the sum of `extra` (1-d), which the last bucket carries."""
        for p in (p for bucket in self.buckets for p in bucket):
            if p.grad is None:  # a rank without rows in the ragged last update
                p.grad = torch.zeros_like(p)
        while len(self._started) < len(self.buckets) - 1:
            self._start()
        self._start(extra)
        for bucket, (flat, work) in zip(self.buckets, self._started, strict=True):
            work.wait()
            gradients = [p.grad for p in bucket]
            *parts, rest = flat.split([*(g.numel() for g in gradients), len(flat) - sum(g.numel() for g in gradients)])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
        self.active, self._started = False, []
        self._missing = [len(bucket) for bucket in self.buckets]
        return rest


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
        own = {id(p) for p in self.parameters}
        in_order = [p for p in model.parameters() if id(p) in own]  # of the model; the optimiser's groups have another
        self.reducer = Reducer(in_order) if ranks.world_size > 1 else None
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

    def micro_batch(self, batch, totals, last=False):
        """Add the gradients of one micro-batch to those of the update that `totals` describes.

        last: no other of this update follows, so its gradients may be sent to the other ranks as they come.
        """
        if self.reducer is not None:
            self.reducer.active = last
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
        if self.reducer is not None:
            return self.reducer.finish(requests)
        for p in self.parameters:
            if p.grad is None:  # nothing of the update reached it
                p.grad = torch.zeros_like(p)
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
        sums = self.sums
        if self.ranks.world_size > 1:
            if dist.get_backend() == "gloo":
                sums = sums.cpu()  # of a GPU's tensors Gloo broadcasts and adds up over all ranks, no more
            dist.reduce(sums, dst=0)
        values = sums.tolist()
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
