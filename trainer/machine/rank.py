"""One process among those of a run, as far as that needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    # Ranks on this machine; 1 if the launcher does not say
    local_world_size: int = 1
    # True: the processes of one command (machine/cpu_ranks.py) share each micro-batch of --batch_size rows, so that its flags keep
    # their meaning. Under a launcher each rank has its own.
    share_batches: bool = False

    @property
    def batches_at_once(self) -> int:
        """Micro-batches of --batch_size rows that the ranks compute in parallel."""
        return 1 if self.share_batches else self.world_size

    @property
    def is_main(self) -> bool:
        """True for the process that writes and prints."""
        return self.rank == 0


ONE_RANK = Ranks()
