"""Around a training command: join the ranks, catch stop signals, and keep other runs away from its files."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch.distributed as dist

from common.errors import UserError
from trainer.job import Surroundings
from trainer.machine.command_line import launch_line
from trainer.machine.ranks import Ranks, init_distributed_mode, on_main
from trainer.machine.signals import StopSignals
from trainer.saving.places import check_writable
from trainer.saving.run_lock import hold, release_all


class LaunchSettings(Protocol):
    """The flags that decide where a command runs."""

    device: str | None
    dist_timeout: int


SettingsT = TypeVar("SettingsT", bound=LaunchSettings)


def launch(
    train: Callable[[SettingsT, Surroundings], int],
    script: str,
    settings: SettingsT,
    argv: Sequence[str],
    ddp: bool = False,
) -> int:
    """train(settings, surroundings) with the ranks joined and stop signals caught. Returns its exit code.

    script, argv: the command as it was typed, for the report. ddp: the user asked for a launcher, and it must be there.
    """
    with StopSignals() as signals, contextlib.ExitStack() as at_end:
        at_end.callback(release_all)
        ranks, device = init_distributed_mode(settings.device, settings.dist_timeout, ddp)
        exit_code = train(settings, Surroundings(ranks, device, signals, launch_line(script, argv)))
        # After an error this is not reached, and the other ranks would not reach it either.
        if dist.is_initialized():
            # A launcher that sees a rank gone ends the others, perhaps rank 0 before its tracker is done.
            dist.barrier()
            dist.destroy_process_group()
        return exit_code


def claim(ranks: Ranks, *stems: Path) -> None:
    """Make the folders of the runs' files, and keep other runs from writing them until this command ends.

    stems: paths of the files without their endings. Errors: UserError that names the run that is writing them, or says
    why none can.
    """

    def claim_all() -> None:
        for stem in stems:
            make_folder(stem.parent)
            check_writable(stem)
            hold(stem)

    on_main(ranks, claim_all)


def make_folder(folder: Path, flag: str = "--out_dir") -> None:
    """Errors: UserError that names the flag."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag}: {folder} cannot be made ({error.strerror}): name another folder") from error
