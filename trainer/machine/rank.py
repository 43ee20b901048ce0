"""One process among those of a run, as far as that needs no torch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    # Ranks that share one micro-batch of --batch_size rows. 1 under a launcher, where each rank has its own micro-batches.
    # All of them if the command has divided itself (machine/cpu_ranks.py), so that its flags keep their meaning.
    sharing: int = 1
    # Ranks that the launcher started on this machine; 1 if it does not say, and for the copies of a command
    local_world_size: int = 1
    # SharedMemory (machine/ranks.py) of the copies of a command. Any: its class needs torch.
    memory: Any = None

    @property
    def micro_batches_at_once(self) -> int:
        """Micro-batches of --batch_size rows that the ranks compute in parallel."""
        return self.world_size // self.sharing

    @property
    def is_main(self) -> bool:
        """True for the process that writes and prints."""
        return self.rank == 0


ONE_RANK = Ranks()
