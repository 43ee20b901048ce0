"""Launching a training command: join the ranks, catch stop signals, and lock the run's files."""

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from common.errors import UserError
from common.start import script_path, shell_line
from trainer.calls import Caller
from trainer.job import RunContext
from trainer.machine.command_line import StopSignals
from trainer.machine.cpu_ranks import available_threads
from trainer.machine.devices import deterministic, own_switches, pick_device
from trainer.machine.ranks import SHARE_BATCHES, Ranks, compare_settings, init_distributed_mode, on_main
from trainer.reporting.reporter import check_tracker
from trainer.saving.run_folder import check_writable, release_locks, take_lock
from trainer.settings import MachineSettings, OutputSettings

SettingsT = TypeVar("SettingsT", bound=MachineSettings)


def launch(
    train: Callable[[SettingsT, RunContext], int],
    settings: SettingsT,
    argv: Sequence[str] | None,
    notices: Sequence[str] = (),
    caller: Caller | None = None,
) -> int:
    """Call train(settings, run_context) with the ranks joined and stop signals caught. Returns its exit code.

    argv: the flags of a function's call; None: this process was started for the run. notices: lines for its start.
    """
    if argv is not None and not settings.folder:
        settings.fix_paths()
    # For the report: the command as a user types it in this folder.
    launcher = ["python"]
    nodes, processes_here = (os.environ.get(name, "1") for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if (nodes, processes_here) != ("1", "1") and SHARE_BATCHES not in os.environ:
        launcher = ["torchrun", "--nnodes", nodes, "--nproc_per_node", processes_here]
    typed = sys.argv[1:] if argv is None else argv
    # torch.distributed.launch adds the rank.
    command = shell_line(
        [*launcher, script_path(f"trainer/{settings.prog}"), *(word for word in typed if "--local-rank=" not in word)]
    )

    # made by the program that calls, such as a worker of Ray Train
    has_group = dist.is_initialized()

    with StopSignals(caller.stop if caller else None) as signals, contextlib.ExitStack() as at_end:
        # Torch's switches are the caller's again at the end.
        at_end.enter_context(own_switches())
        # Before the first operation. By default PyTorch starts a thread per core in each process, even if a container allows fewer.
        torch.set_num_threads(available_threads())
        at_end.callback(release_locks)
        # Before a GPU is first used. CPU runs are deterministic anyway.
        if pick_device(settings.device).type == "cuda":
            if settings.deterministic:
                at_end.enter_context(deterministic())
            elif settings.verify_every:
                raise UserError(
                    "--verify_every on a GPU needs --deterministic 1: otherwise equal updates differ in bits"
                )
        ranks, device = init_distributed_mode(settings.device, settings.dist_timeout)
        compare_settings(ranks, settings)
        if isinstance(settings, OutputSettings) and settings.tracker != "none":
            on_main(ranks, partial(check_tracker, settings.tracker))
        exit_code = train(settings, RunContext(ranks, device, signals, command, notices, caller))
        # After an error this is not reached, and the other ranks would not reach it either.
        if dist.is_initialized() and not has_group:
            # A sharded model refers to the process group, and is part of reference cycles.
            gc.collect()
            # A launcher that sees a rank exit ends the others, perhaps rank 0 before its tracker is done.
            dist.barrier()
            dist.destroy_process_group()
        return exit_code


def lock_files(ranks: Ranks, *stems: Path, sized: bool = False) -> None:
    """Create the folders of the runs' files, and lock the files until this command ends.

    stems: paths of the files without suffix. sized: as in `check_writable`. Errors: UserError that names the run that is writing
    them, or says why they cannot be written.
    """
    for stem in stems:
        on_main(ranks, partial(check_writable, stem, sized))
        on_main(ranks, partial(take_lock, stem))
