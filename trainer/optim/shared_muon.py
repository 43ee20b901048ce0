"""Muon's matrices shared out among ranks that share the memory of one machine.

The Newton-Schulz iterations are nearly all of Muon's work. Without this each rank would do all of them: the ranks have the
same gradients and momenta, and come to the same matrices.
"""

from collections.abc import Sequence

import torch

from trainer.machine.meeting import Meeting, make_meeting
from trainer.machine.ranks import Ranks
from trainer.machine.shared_memory import shared_bytes
from trainer.optim import muon
from trainer.optim.muon import Orthogonalise


class SharedOrthogonalise:
    """`orthogonalise`, of which each rank computes every world-size-th matrix of a batch and reads the others' results.

    Each batch of the model, one for each shape, has a place of its own in the shared memory. A rank writes its results there,
    waits until all have, and reads. It writes there again in the next update. By then all have read, since the sum of
    that update's gradients needed all of them.
    """

    def __init__(self, memory: torch.Tensor, ranks: Ranks, meeting: Meeting) -> None:
        """memory: uint8 [2 bytes for each number in the matrices, those of muon.DTYPE], shared by all ranks, which wait in `meeting`."""
        self.meeting = meeting
        self.ranks = ranks
        self._numbers = memory.view(muon.DTYPE)
        # {shape of a batch: where its results are}, in the order in which the batches first come.
        self._results: dict[torch.Size, torch.Tensor] = {}
        self._n_used = 0

    def __call__(self, matrices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """[n, rows, columns] -> the same in bf16, to be read until the next update. All ranks must call it."""
        results = self._results.get(matrices.shape)
        if results is None:
            end = self._n_used + matrices.numel()
            results = self._numbers[self._n_used : end].view(matrices.shape)
            self._results[matrices.shape] = results
            self._n_used = end
        own = slice(self.ranks.rank, None, self.ranks.world_size)
        # There may be fewer matrices of a shape than ranks.
        if len(matrices[own]):
            results[own] = muon.orthogonalise(matrices[own])
        self.meeting.wait()
        return results


def make_orthogonalise(matrices: Sequence[torch.nn.Parameter], ranks: Ranks) -> Orthogonalise:
    """What orthogonalises these matrices: together with the other ranks where they share memory, alone elsewhere.

    A collective: all ranks must call it.
    """
    on_cpu = all(matrix.device.type == "cpu" for matrix in matrices)
    if on_cpu and ranks.world_size > 1 and ranks.on_one_machine:
        numbers = sum(matrix.numel() for matrix in matrices)
        memory = shared_bytes(muon.DTYPE.itemsize * numbers, ranks)
        if memory is not None:
            return SharedOrthogonalise(memory, ranks, make_meeting(ranks))
    return muon.orthogonalise
