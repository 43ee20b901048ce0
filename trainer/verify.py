"""Faults of the hardware, found by --verify_every: training gives the same bits each time, so other bits are a fault.

    weights and moments, at rest    must have the checksums of the last update; what has changed is taken from a copy
    arrays and buffers of the run   the same, from when they were first seen: the plan of rows, the best weights ...
    an evaluation                   is made again if memory has changed meanwhile
    every N-th update               is computed twice from the same state; if the results differ, a third one decides

A rank checks its own part. Only the computing again needs all ranks, since they exchange gradients.
"""

import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from common.errors import UserError
from common.wording import announce, counted
from trainer.engine import Engine, Requests
from trainer.machine.devices import rng_state, set_rng_state
from trainer.machine.ranks import fail_all_ranks, min_over_ranks

# Tensors that a line names
NAMED = 3
# bytes
WORD = 8
# Modules whose objects hold arrays of a run. Longer containers are lists of texts.
HOLDERS, MAX_PARTS = ("dataset.", "encoders.", "trainer.pretrain.", "trainer.sft."), 4096
T = TypeVar("T")
ADVICE = "use another machine: there --from_resume 1 continues from the newest checkpoint"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns as integers [n]: NaNs are equal to themselves, and -0 is not 0. Words of eight bytes are added fastest."""
    flat = tensor.reshape(-1)
    fits = flat.nbytes % WORD == 0 and flat.storage_offset() * flat.itemsize % WORD == 0
    return flat.view(torch.int64 if fits else torch.uint8)


def checksums(tensors: Collection[torch.Tensor]) -> list[int]:
    """The sum of the bit patterns of each tensor, modulo 2 ** 64: a flipped bit changes it."""
    sums = [bits(tensor).sum() for tensor in tensors]
    # Read only when all are queued on the device.
    return [int(total) for total in sums]


def changes(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str:
    """What differs, as "model.norm.weight (1 bit)"; "": nothing."""
    # A skipped first update may have made no moments.
    both = [name for name in one if name in other]
    differing = [name for name in both if not torch.equal(bits(one[name]), bits(other[name]))]
    named = []
    for name in differing[:NAMED]:
        flipped = (bits(one[name]) ^ bits(other[name])).cpu().numpy().view(np.uint8)
        named.append(f"{name} ({counted(int(np.bitwise_count(flipped).sum()), 'bit')})")
    if len(differing) > NAMED:
        named.append(f"{len(differing) - NAMED} more")
    return ", ".join(named)


def arrays_of(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, content) of the arrays, tensors and buffers in an object and its attributes."""
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Any = ()
    if isinstance(value, torch.Tensor):
        yield name, value.detach()
    elif isinstance(value, np.ndarray):
        # Mapped files are read-only.
        if value.flags.carray:
            yield name, torch.from_numpy(value.reshape(-1).view(np.uint8))
    elif isinstance(value, torch.nn.Module):
        # Each forward pass changes the router's `slots`.
        parts = [part for part in value.named_buffers() if not part[0].endswith("slots")]
    elif isinstance(value, dict | list | tuple) and len(value) <= MAX_PARTS:
        parts = value.items() if isinstance(value, dict) else enumerate(value)
    elif type(value).__module__.startswith(HOLDERS):
        parts = vars(value).items()
    for key, part in [*parts]:
        yield from arrays_of(part, f"{name}.{key}".lstrip("."), seen)


class Known(NamedTuple):
    """A tensor that must stay as it is, with what it must be."""

    tensor: torch.Tensor
    copy: torch.Tensor
    checksum: int


class Verifier:
    """See above. It does nothing if `every`, the number of updates between two that are computed twice, is 0."""

    def __init__(self, engine: Engine, every: int, held: Callable[[], object] = tuple) -> None:
        """held: returns what holds the arrays of the run, see `arrays_of`."""
        self.engine = engine
        self.every = every
        self.held = held
        self.ranks = engine.ranks
        # by name: weights and moments after the last update, and arrays, kept here so that no later one gets the address
        self.known: dict[str, Known] = {}
        # Updates of the run, set by a resume, and after how many of them this rank last had a fault at rest
        self.updates = 0
        self.last_fault = -2
        # ranks with a fault in the last update that was computed twice
        self.faulty: set[int] = set()

    def remember(self) -> None:
        """Take the weights and moments as right."""
        tensors = self.engine.weights_and_moments()
        for (name, tensor), checksum in zip(tensors.items(), checksums(tensors.values()), strict=True):
            copy = self.known[name].copy if name in self.known else torch.empty_like(tensor)
            self.known[name] = Known(tensor, copy.copy_(tensor), checksum)

    def at_rest(self, compute: Callable[[], T]) -> T:
        """The result of something that only reads weights; if memory has changed meanwhile, that of a second time. A collective."""
        while True:
            self.check_at_rest()
            try:
                result = compute()
            except (IndexError, ValueError):
                # A row that is none; on several ranks the others would wait.
                if self.ranks.world_size > 1 or not self.check_at_rest():
                    raise
                continue
            if not self.every or min_over_ranks(self.ranks, -float(self.check_at_rest())) == 0:
                return result

    def check_at_rest(self) -> bool:
        """Put back what has changed since the last update. Call before all that reads weights or moments. Returns whether it had to.

        Errors: UserError if the copy has changed too, or if this happened before the last update too.
        """
        if not self.every:
            return False
        if not self.known:
            # The first update of this process; the weights are new or from a checkpoint, whose digest was checked.
            self.remember()
        for name, array in arrays_of(self.held(), "", set()):
            if name not in self.known or self.known[name].tensor.data_ptr() != array.data_ptr():
                self.known[name] = Known(array, array.clone(), *checksums([array]))
        if self._is_intact():
            return False
        known = self.known.items()
        what = changes({name: one.tensor for name, one in known}, {name: one.copy for name, one in known})
        where = f"rank {self.ranks.rank} on {socket.gethostname()!r}: between two updates its memory has changed {what}"
        if self.updates - self.last_fault <= 1:
            raise UserError(f"{where}, the second time in a row; {ADVICE}")
        self._restore(where)
        self.last_fault = self.updates
        announce(f"warning: {where}; put back from a copy")
        return True

    def _is_intact(self) -> bool:
        known = self.known.values()
        return checksums([one.tensor for one in known]) == [one.checksum for one in known]

    def _restore(self, where: str) -> None:
        """Take all that is known from the copies; moments that an update has made since are 0 again."""
        for tensor, copy, _ in self.known.values():
            tensor.copy_(copy)
        if not self._is_intact():
            raise UserError(f"{where}, and the copy of it; {ADVICE}")
        for name, tensor in self.engine.weights_and_moments().items():
            if name not in self.known:
                tensor.zero_()

    def train(self, batches: Sequence[Any], totals: Any, rate: float, requests: Requests) -> Iterator[None]:
        """As Engine.train. Errors: as `check_at_rest` and `_until_two_agree`."""
        self.check_at_rest()
        self.updates += 1
        # The requests are made once, even if the update is computed again.
        compute = partial(self.engine.train, batches, totals, rate, cache(requests))
        if not self.every or self.updates % self.every:
            yield from compute()
        else:
            for log_sums in self._until_two_agree(compute):
                self.engine.sums += log_sums
                yield
        if self.every:
            self.remember()

    def _until_two_agree(self, compute: Callable[[], Iterator[None]]) -> list[torch.Tensor]:
        """Compute an update until two results agree on every rank. A collective. Returns the sums of each micro-batch for the log.

        The sums of the engine stay as they are. Errors: UserError if three results differ, or if a rank had a fault in the check
        before too.
        """
        for tensor, copy, _ in self.known.values():
            # A fault in the copy itself goes unnoticed until it is used.
            copy.copy_(tensor)
        engine = self.engine
        sums, outcome = engine.sums.clone(), engine.outcome.clone()
        scaler, random = engine.scaler.state_dict(), rng_state(engine.device)
        results: list[tuple[list[int], dict[str, torch.Tensor]]] = []
        own_change = ""
        has_own_fault = agree = False
        for attempt in range(3):
            if attempt:
                self._restore(f"rank {self.ranks.rank} on {socket.gethostname()!r}: a fault in update {self.updates}")
                engine.scaler.load_state_dict(scaler)
                set_rng_state(random, engine.device)
                engine.outcome.copy_(outcome)
            log_sums, own, tensors = self._attempt(compute)
            for own_before, before in results:
                change = changes(tensors, before)
                is_own = own != own_before
                own_change = own_change or change or "its losses" * is_own
                has_own_fault |= is_own
                agree = agree or min_over_ranks(self.ranks, float(not change and not is_own)) == 1
            if agree:
                break
            if attempt < 2:
                results.append((own, {name: tensor.clone() for name, tensor in tensors.items()}))
        engine.sums.copy_(sums)
        if agree and len(results) == 1:
            # no fault
            self.faulty = set()
        else:
            self._report(own_change, has_own_fault, agree)
        return log_sums

    def _attempt(
        self, compute: Callable[[], Iterator[None]]
    ) -> tuple[list[torch.Tensor], list[int], dict[str, torch.Tensor]]:
        """Compute the update once. Returns (the sums of each micro-batch for the log; checksums of what this rank computed before it
        received from others; the new weights and moments, and the gradient's norm: the engine's tensors, not copies).
        """
        engine, log_sums = self.engine, []
        own: list[torch.Tensor] = []
        if engine.reducer is not None:
            engine.reducer.watch = lambda gradient: own.append(bits(gradient).sum())
        engine.sums.zero_()
        for _ in compute():
            log_sums.append(engine.sums.clone())
            engine.sums.zero_()
        if engine.reducer is not None:
            engine.reducer.watch = None
        evidence = [*chain.from_iterable(bits(sums).tolist() for sums in log_sums), *map(int, own)]
        # without its requests, which come from outside
        tensors = {**engine.weights_and_moments(), "the gradient's norm": engine.outcome[:3].clone()}
        return log_sums, evidence, tensors

    def _report(self, change: str, has_own_fault: bool, agree: bool) -> None:
        """Name the ranks with a fault in this update. A collective; see `_until_two_agree` for the arguments and errors.

        A wrong gradient gives all ranks wrong weights. So if the own work of some ranks differs, these are the ones.
        """
        own = (socket.gethostname(), change, has_own_fault)
        ranks = [own] * self.ranks.world_size
        if self.ranks.world_size > 1:
            dist.all_gather_object(ranks, own)
        faulty = {rank for rank, (_, _, has_own) in enumerate(ranks) if has_own}
        # A sharded model passes gradients on unseen: without a rank's own evidence any of these may have made the wrong one.
        faulty = faulty or {rank for rank, (_, changed, _) in enumerate(ranks) if changed}
        where = "; ".join(f"rank {rank} on {ranks[rank][0]!r}: {ranks[rank][1]}" for rank in sorted(faulty))
        line = f"update {self.updates}, computed again from the same state, gave other bits ({where})"
        again_on = " or ".join(str(rank) for rank in sorted(faulty & self.faulty))
        self.faulty = faulty
        if again_on or not agree:
            why = f"the second check in a row with a fault on rank {again_on}" if again_on else "so did a third time"
            fail_all_ranks(self.ranks, f"{line}, {why}; {ADVICE}")
        if self.ranks.is_main:
            announce(f"warning: {line}; a third time gave one of the two results again, which is kept")
