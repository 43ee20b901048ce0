"""Saving a run and going on with it: what a checkpoint holds, what may differ at a resume, and what is said of it."""

import errno
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import UserError
from common.wording import counted
from trainer.machine.measure import versions
from trainer.machine.random_state import rng_state, set_rng_state
from trainer.machine.ranks import on_main
from trainer.saving.checkpoint import load_checkpoint, update_of
from trainer.saving.checkpoint_content import check_fit, check_form, require

FORMAT = 1  # of a checkpoint; raised when an older trainer's cannot be continued


def state_dict(run):
    """Everything that a resume needs, as tensors and plain containers. A collective: all ranks must call it."""
    # The sums stay apart for each rank: added up in another order they would differ in the last bit.
    ranks = [{"rng": rng_state(run.engine.device), "sums": run.engine.sums.tolist()}]
    if run.ranks.world_size > 1:
        own, ranks = ranks[0], [None] * run.ranks.world_size if run.ranks.is_main else None
        dist.gather_object(own, ranks, dst=0)
    return {
        "format": FORMAT,
        "model": run.engine.model.state_dict(),
        "engine": run.engine.state_dict(),
        "progress": asdict(run.progress),
        "ranks": ranks,
        "identity": run.identity,
        "settings": {name: value for name, value in vars(run.args).items() if value is not None},
        "versions": versions(),
        "seconds": run.watch.elapsed() if run.watch else run.seconds_before,
        "tracker_ids": run.tracker_ids,
    }


def save(run):
    """Begin to write a checkpoint and the half-precision weights. A disk that is full is reported, and training goes on."""
    if run.saved_update == run.progress.update:
        return
    run.saved_update = run.progress.update
    state = state_dict(run)
    if run.ranks.is_main:
        try:
            run.checkpoints.wait()
        except OSError as error:
            run.reporter.say(
                f"warning: the save before this one failed ({failure(error)}); {what_is_left(run)}, training goes on"
            )
        # Weights first: a run that was killed between the two does its last updates again, and finds nothing missing.
        run.checkpoints.save(
            state, run.progress.update, before=lambda copy: run.save_weights(copy["model"], copy["progress"]["update"])
        )


def finish_saving(run):
    """Wait for the last save; UserError if it failed, since nothing comes after it.

    All ranks wait for it: a launcher that sees one of them gone ends the others at once.
    """

    def wait():
        try:
            run.checkpoints.wait()
        except OSError as error:
            advice = "free some space" if error.errno in DISK_IS_FULL else "mend that"
            raise UserError(f"the last save failed ({failure(error)}): {advice}; {what_is_left(run)}") from error

    on_main(run.ranks, wait)


DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def failure(error: OSError) -> str:
    """Of a save, without the number that str() begins with."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def what_is_left(run: Any) -> str:
    return "the checkpoint before it is intact" if run.checkpoints.paths() else "there is no checkpoint before it"


def resume(run):
    """Continue from the newest good checkpoint; returns whether there is one.

    A checkpoint with a wrong content is named and passed over, before anything of it is taken over.
    Errors: UserError where data, tokenizer, model or row layout differ from the checkpoint's, naming the difference,
    and where none of the checkpoints is good.
    """
    say, state = run.reporter.say, None

    def choose():
        nonlocal state
        found = run.checkpoints.newest(say, lambda state, path: check_checkpoint(state, path, run))
        if not found:
            return None
        state, path = found
        return str(path)

    path = on_main(run.ranks, choose)  # all ranks follow the choice of rank 0; the folder is one that all of them see
    if path is None:
        earlier = run.checkpoints.last_aside()
        hint = f" (rename {earlier} to {run.checkpoints.folder} to go on with the run before)" if earlier else ""
        say(f"--from_resume 1: there is no checkpoint yet, starting afresh{hint}")
        return False
    state = state or load_checkpoint(path)
    run.engine.model.load_state_dict(state["model"])
    run.engine.load_state_dict(state["engine"])
    run.progress, run.tracker_ids = replace(run.progress, **state["progress"]), state["tracker_ids"]
    run.seconds_before = state["seconds"]
    run.saved_update = run.progress.update
    restore_rank(run, state["ranks"])
    announce_changes(run, state)
    say(f"resumed from {path}: epoch {run.progress.epoch + 1}, row {run.progress.row}, update {run.progress.update}")
    return True


def check_checkpoint(state: Any, path: Path, run: Any) -> None:
    """Errors: BadContentError where it is no checkpoint of such a run, UserError where it is that of another one."""
    require(isinstance(state, dict), f"it holds a {type(state).__name__}, not the state of a run")
    require(type(state.get("format")) is int, "it does not say which format it has")
    if state["format"] != FORMAT:
        raise UserError(f"{path}: written by another version of this trainer; go on from its .pth with --from_weight")
    check_form(state)
    for what, value in run.identity.items():
        require(what in state["identity"], f"identity: {what} is missing")
        if state["identity"][what] != value:
            raise UserError(f"{path}: {difference(what, state['identity'][what], value)}")
    check_fit(state, run, update_of(path))


def restore_rank(run, before):
    """Give this rank its random state and its sums for the log. On another world size rank 0 takes all sums."""
    rank, sums = run.ranks.rank, run.engine.sums
    if rank < len(before):
        set_rng_state(before[rank]["rng"], run.engine.device)
    if len(before) == run.ranks.world_size:
        sums.copy_(torch.tensor(before[rank]["sums"], dtype=sums.dtype))
    elif rank == 0:
        sums.copy_(torch.tensor([of_rank["sums"] for of_rank in before], dtype=sums.dtype).sum(0))


def is_past(run):
    """A function that tells whether a line of the metrics file is of the time before this run goes on.

    Lines after it are of a run that was killed later than its last checkpoint; without them each stands there once.
    """
    step, due = run.progress.step, run.progress.evaluation_due
    again = {"val_loss", "text"} if due else set()  # an evaluation and its samples
    return lambda record: record["step"] < step or record["step"] == step and not again & record.keys()


def never_saved(metrics: Path) -> bool:
    """Whether a metrics file is of a run that ended before its first save, or of none: nobody can go on from that."""
    starts, last_step, updates_left = [], -1, True
    try:
        for line in metrics.read_bytes().splitlines():
            record = json.loads(line)
            if "settings" in record:
                starts.append(record["settings"]["save_interval"])
            elif "eta" in record:
                last_step, updates_left = record["step"], record["eta"] > 0
        return len(starts) <= 1 and updates_left and last_step + 1 < min(starts, default=1)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, TypeError, KeyError):  # no file of ours, or cut off: it is kept
        return False


SCHEDULE_FLAGS = (
    "epochs",
    "learning_rate",
    "muon_lr",
    "lr_schedule",
    "warmup_iters",
    "batch_size",
    "accumulation_steps",
    "grad_clip",
    "weight_decay",
    "max_steps",
    "sampling",
    "gen_smooth",
    "disc_smooth",
    "dropout",
    "warmup_steps",
    "warmup_share",
)


def announce_changes(run, state):
    """Name the settings that may differ from the checkpoint's and do."""
    before, now = state["settings"], vars(run.args)
    for name in SCHEDULE_FLAGS:
        if before.get(name) != now.get(name):
            run.reporter.say(f"--{name} is {now.get(name)}, was {before.get(name)} before the resume")
    batches = [
        settings["batch_size"] * settings["accumulation_steps"] * world_size
        for settings, world_size in ((before, len(state["ranks"])), (now, run.ranks.world_size))
    ]
    if batches[0] != batches[1]:
        run.reporter.say(
            f"warning: an update now covers {counted(batches[1], 'row')}, before the resume it covered {batches[0]}; "
            "no document is seen twice, but the curve will differ"
        )


def difference(what, before, now):
    """One line on what does not agree; of two dicts, their differing entries."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        before, now = ({name: side.get(name) for name in names} for side in (before, now))
    flag = {
        "data": " (--data_path, --text_field, --skip_bad_lines)",
        "tokenizer": " (--tokenizer_path, --vocab_path or --model_path)",
    }.get(what, "")
    return f"made with another {what}{flag}: {before} there, {now} in this run; use the same one, or start without --from_resume"
