"""The settings of the machine that a run uses."""

from dataclasses import dataclass

from common.flags import AUTO, not_negative, positive
from common.settings import Settings, setting, switch

MOST_PROCESSES = 64
# values of --shard
NONE = "none"
FULL = "full"


def process_count(text: str) -> str:
    """`auto`, or a number of processes; as text, since a setting has one type."""
    return text if text == AUTO else str(positive(int, MOST_PROCESSES)(text))


@dataclass(kw_only=True)
class MachineSettings(Settings):
    """machine"""

    device: str | None = setting(None, help="cuda:0, mps or cpu (default: the best there is)")
    dtype: str = setting("bfloat16", choices=("bfloat16", "float16", "float32"), help="of matrix products (autocast)")
    use_compile: str = setting("auto", choices=("auto", "0", "1"), help="torch.compile")
    num_workers: int = setting(1, check=not_negative(int), help="processes that load batches; 0: none")
    gradient_checkpointing: bool = switch(
        False, help="recompute activations in the backward pass: less memory, more time"
    )
    deterministic: bool = switch(
        False,
        help="the same bits in every run on a GPU too; an operation that has no such form ends the run",
    )
    dist_timeout: int = setting(600, check=positive(int), help="seconds after which a silent rank ends the job")
    shard: str = setting(
        NONE,
        choices=(NONE, FULL),
        help="full: the ranks have weights, gradients and the optimiser's states together; none: each has its own",
    )


@dataclass(kw_only=True)
class DividedMachineSettings(MachineSettings):
    """machine"""

    cpu_processes: str = setting(
        "auto",
        check=process_count,
        help="processes that share each micro-batch on a CPU, on Linux; 1: one process with all threads",
    )
