"""Muon for matrices of which each rank has some rows (trainer/sharding.py).

Momentum and averages are computed on each rank's own rows. To orthogonalise a matrix needs all of it. So each matrix has an
owner among the ranks of a group: they send it their rows, it orthogonalises the whole, and sends each its rows back. The
owners take turns, so that each has about as many matrices of a shape, and the two messages are in bf16, in which the
iterations run.
"""

import torch
import torch.distributed as dist

from trainer.optim import muon
from trainer.sharding import rows_of_ranks


class ShardedOrthogonalise:
    """`orthogonalise` of matrices whose rows are sharded among the ranks of a group. All of them must call it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # {n: `_order` of n matrices}
        self._orders: dict[int, torch.Tensor] = {}

    def __call__(self, matrices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """[n, own rows, columns] -> the same in bf16, as parts of orthogonal matrices of `shape` (rows, columns)."""
        n, own_rows, columns = matrices.shape
        rows = rows_of_ranks(shape[0], self.size)
        assert own_rows == rows[self.rank]
        order = self._order(n, matrices.device)
        matrices_of = [len(range(owner, n, self.size)) for owner in range(self.size)]
        mine = matrices_of[self.rank]

        # To each owner this rank's rows of its matrices, one matrix after the other.
        sent = matrices.to(muon.DTYPE)[order].flatten()
        sent_sizes = [count * own_rows * columns for count in matrices_of]
        # From each rank its rows of this rank's matrices.
        received_sizes = [mine * count * columns for count in rows]
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self.group)
        parts = received.split(received_sizes)
        shaped = [part.view(mine, count, columns) for part, count in zip(parts, rows, strict=True)]
        if mine:
            whole = muon.orthogonalise(torch.cat(shaped, dim=1))
            parts = torch.split(whole, rows, dim=1)

        # The same way back.
        returned = torch.cat([part.flatten() for part in parts])
        result = torch.empty_like(sent)
        dist.all_to_all_single(result, returned, sent_sizes, received_sizes, group=self.group)
        in_turn = torch.empty_like(matrices, dtype=muon.DTYPE)
        in_turn[order] = result.view(n, own_rows, columns)
        return in_turn

    def _order(self, n: int, device: torch.device) -> torch.Tensor:
        """The numbers of n matrices, those of one owner behind each other: matrix i belongs to rank i mod size.

        It stays on the device. An index that lies in main memory would be copied there in each update.
        """
        if n not in self._orders:
            numbers = [number for owner in range(self.size) for number in range(owner, n, self.size)]
            self._orders[n] = torch.tensor(numbers, device=device)
        return self._orders[n]
