"""Saving a run and going on with it: what a checkpoint holds, what may differ at a resume, and what is said of it."""

import contextlib
import errno
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from common.errors import UserError, require
from common.wording import counted
from dataset.mixture import Move
from dataset.shares import spelt
from trainer.machine.collectives import on_main
from trainer.machine.measure import versions
from trainer.machine.random_state import rng_state, set_rng_state
from trainer.saving.checkpoint import update_of, verified
from trainer.updates import rows_of_update

if TYPE_CHECKING:
    from trainer.job import Progress
    from trainer.loop import Trainer

# Of a checkpoint; raised when an older trainer's cannot be continued.
FORMAT = 1
# Entries of a row layout that are told as one, see Mixture.layout.
SHARES = ("shares", "repeats")


def state_dict(trainer: "Trainer") -> dict[str, Any]:
    """Everything that a resume needs, as tensors and plain containers. A collective: all ranks must call it."""
    # The sums stay apart for each rank: added up in another order they would differ in the last bit.
    own = {"rng": rng_state(trainer.device), "sums": trainer.engine.sums.tolist()}
    ranks: list[Any] | None = [own]
    if trainer.ranks.world_size > 1:
        ranks = [None] * trainer.ranks.world_size if trainer.ranks.is_main else None
        dist.gather_object(own, ranks, dst=0)
    return {
        "format": FORMAT,
        # The parameters themselves, of which a tied one is seen to be one.
        "model": trainer.engine.model.state_dict(keep_vars=True),
        "engine": trainer.engine.state_dict(),
        "progress": asdict(trainer.progress),
        "ranks": ranks,
        # How many of them shared a micro-batch.
        "sharing": trainer.ranks.sharing,
        "identity": trainer.job.identity.entries,
        "settings": {name: value for name, value in vars(trainer.settings).items() if value is not None},
        "versions": versions(),
        "seconds": trainer.watch.elapsed() if trainer.watch else trainer.seconds_before,
        "tracker_ids": trainer.tracker_ids,
        "job": {name: part.state_dict() for name, part in trainer.job.extra_state.items()},
    }


def progress_of(trainer: "Trainer", state: dict[str, Any]) -> "Progress":
    """What `state_dict` wrote of it."""
    return replace(trainer.progress, **{**state, "moves": [Move(**move) for move in state["moves"]]})


def save(trainer: "Trainer") -> None:
    """Begin to write a checkpoint and the half-precision weights. A disk that is full is reported, and training goes on."""
    # The end of a run and a signal may ask for the same save.
    if trainer.saved_update == trainer.progress.update:
        return
    trainer.saved_update = trainer.progress.update
    wait_for_the_one_before(trainer)
    # All ranks take part in this.
    state = state_dict(trainer)
    sharded = trainer.engine.shards is not None
    # The weight file is a whole one.
    whole = trainer.engine.weights() if sharded else {}
    # Where each rank has a part, each writes its own.
    if not (sharded or trainer.ranks.is_main):
        return
    is_last = trainer.finished

    # Weights first: a run that was killed between the two does its last updates again, and finds nothing missing.
    def save_weights(copy: dict[str, Any]) -> None:
        trainer.job.save_weights(whole or copy["model"], copy["progress"]["update"], is_last)

    trainer.checkpoints.save(state, trainer.progress.update, before=save_weights if trainer.ranks.is_main else None)


def wait_for_the_one_before(trainer: "Trainer") -> None:
    """Wait for the save that is under way, if any, and say how it failed.

    All ranks wait for that of rank 0, which may take longer than they wait for a message: they hear that it still works.
    """

    def wait() -> str:
        """Returns what went wrong, "": nothing."""
        try:
            trainer.checkpoints.wait()
        except OSError as error:
            return failure(error)
        return ""

    problem = on_main(trainer.ranks, wait)
    if problem:
        trainer.reporter.say(
            f"warning: the save before this one failed ({problem}); {what_is_left(trainer)}, training goes on"
        )
    # Where each rank writes its parts, the thread of another rank has done its part by now. What failed, rank 0 has said.
    with contextlib.suppress(OSError):
        trainer.checkpoints.wait()


def finish_saving(trainer: "Trainer") -> None:
    """Wait for the last save; UserError if it failed, since nothing comes after it.

    All ranks wait for it: a launcher that sees one of them gone ends the others at once.
    """

    def wait() -> None:
        try:
            trainer.checkpoints.wait()
        except OSError as error:
            advice = "free some space" if error.errno in DISK_IS_FULL else "mend that"
            raise UserError(f"the last save failed ({failure(error)}): {advice}; {what_is_left(trainer)}") from error

    on_main(trainer.ranks, wait)
    # The thread of another rank has done its part by now.
    trainer.checkpoints.wait()


DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def failure(error: OSError) -> str:
    """Of a save, without the number that str() begins with."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def what_is_left(trainer: "Trainer") -> str:
    """What a user has after a save that failed."""
    return "the checkpoint before it is intact" if trainer.checkpoints.paths() else "there is no checkpoint before it"


def how_to_go_on(trainer: "Trainer") -> str:
    """What a user has after an error that no save came before."""
    for path in trainer.checkpoints.paths():
        if verified(path):
            return f"the checkpoint of update {update_of(path)} is intact, and --from_resume 1 goes on from there"
    return "no checkpoint was saved yet"


def resume(trainer: "Trainer") -> bool:
    """Continue from the newest good checkpoint; returns whether there is one.

    A checkpoint that is damaged is named and passed over, before anything of it is taken over.
    Errors: UserError where data, tokenizer, model or row layout differ from the checkpoint's, naming the difference,
    and where none of the checkpoints is good.
    """
    say = trainer.reporter.say
    found = choose(trainer)
    if found is None:
        earlier = trainer.checkpoints.last_aside()
        hint = f" (rename {earlier} to {trainer.checkpoints.folder} to go on with the run before)" if earlier else ""
        say(f"--from_resume 1: there is no checkpoint yet, starting afresh{hint}")
        return False
    state, path = found
    trainer.engine.load_weights(state["model"])
    trainer.engine.load_state_dict(state["engine"])
    trainer.progress = progress_of(trainer, state["progress"])
    trainer.tracker_ids = state["tracker_ids"]
    for name, part in trainer.job.extra_state.items():
        part.load_state_dict(state["job"][name])
    trainer.seconds_before = state["seconds"]
    trainer.saved_update = trainer.progress.update
    # Last: building the model and the optimiser has drawn random numbers.
    restore_rank(trainer, state["ranks"])
    announce_changes(trainer, state)
    progress = trainer.progress
    say(f"resumed from {path}: epoch {progress.epoch + 1}, row {progress.row}, update {progress.update}")
    return True


def choose(trainer: "Trainer") -> tuple[dict[str, Any], Path] | None:
    """(state, path) of the newest good checkpoint, the same one on all ranks; None where there is none at all.

    Of a sharded model each rank reads no more than its part. Errors: as those of `resume`.
    """

    def check(content: Any, path: Path) -> None:
        check_checkpoint(content, path, trainer)

    def fill(content: Any, path: Path) -> dict[str, Any]:
        return with_parts(trainer, content, path)

    return trainer.checkpoints.newest(trainer.reporter.say, check, fill, trainer.ranks)


def with_parts(trainer: "Trainer", state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The state with the numbers of its tensors; of a sharded model, those of this rank's parts."""
    # It takes a second to import, and most runs do without.
    from trainer.saving.parts import filled

    shards = trainer.engine.shards
    if shards is None:
        return filled(state, folder)
    return filled(state, folder, dist.get_rank(shards.group), dist.get_world_size(shards.group))


def check_checkpoint(state: Any, path: Path, trainer: "Trainer") -> None:
    """Errors: BadContentError where it is no checkpoint, UserError where it is that of another run."""
    require(isinstance(state, dict) and "format" in state, "it is not the state of a run")
    if state["format"] != FORMAT:
        raise UserError(f"{path}: written by another version of this trainer; go on from its .pth with --from_weight")
    identity = trainer.job.identity
    for what, value in identity.entries.items():
        before = state["identity"][what]
        if before != value:
            told = difference(what, before, value, identity.mended_by.get(what, ""))
            raise UserError(f"{path}: {told}")


def restore_rank(trainer: "Trainer", before: list[dict[str, Any]]) -> None:
    """Give this rank its random state and its sums for the log. On another world size rank 0 takes all sums."""
    rank = trainer.ranks.rank
    sums = trainer.engine.sums
    if rank < len(before):
        set_rng_state(before[rank]["rng"], trainer.device)
    if len(before) == trainer.ranks.world_size:
        sums.copy_(torch.tensor(before[rank]["sums"], dtype=sums.dtype))
    elif rank == 0:
        sums.copy_(torch.tensor([of_rank["sums"] for of_rank in before], dtype=sums.dtype).sum(0))


def announce_changes(trainer: "Trainer", state: dict[str, Any]) -> None:
    """Name the settings that may differ from the checkpoint's and do."""
    before = state["settings"]
    now = vars(trainer.settings)
    # With --rows_per_update the micro-batches of an update follow from the ranks.
    derived = ("accumulation_steps",) if before["rows_per_update"] and now["rows_per_update"] else ()
    for name in trainer.job.identity.may_change:
        if name not in derived and before.get(name) != now.get(name):
            trainer.reporter.say(f"--{name} is {now.get(name)}, was {before.get(name)} before the resume")
    for name in trainer.job.identity.only_at_start:
        if before.get(name) != now.get(name):
            trainer.reporter.say(
                f"warning: --{name} {now.get(name)} has no effect: the run goes on from its checkpoint, which began with "
                f"{before.get(name)}"
            )
    # As many ranks as have left their state
    at_once_before = len(state["ranks"]) // state["sharing"]
    product = before["batch_size"] * before["accumulation_steps"] * at_once_before
    rows_before = before["rows_per_update"] or product
    rows_now = rows_of_update(trainer.settings, trainer.ranks)
    if rows_before != rows_now:
        trainer.reporter.say(
            f"warning: an update now covers {counted(rows_now, 'row')}, before the resume it covered {rows_before}; "
            "no document is seen twice, but the curve will differ"
        )


def difference(what: str, before: object, now: object, mended_by: str = "") -> str:
    """One line on what does not agree; of two dicts, their differing entries. mended_by: flags that may mend it."""
    if isinstance(before, dict) and isinstance(now, dict):
        before, now = as_spelt(before), as_spelt(now)
        names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if "shares" in names:
            # What only one kind of mixture has follows from that.
            names = [name for name in names if name == "shares" or (name in before and name in now)]
        before, now = listed(before, names), listed(now, names)
    flags = f" ({mended_by})" if mended_by else ""
    return (
        f"made with another {what}{flags}: {before} there, {now} in this run; use the same one, or start "
        "without --from_resume"
    )


def as_spelt(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries of an identity, the shares of a run's sources in one, as a user writes them."""
    told = {name: value for name, value in entries.items() if name not in SHARES}
    if entries.get("shares"):
        told["shares"] = ", ".join(map(spelt, entries["shares"], entries["repeats"]))
    return told


def listed(entries: dict[str, Any], names: Sequence[str]) -> str:
    """As `pack False, shares 0.7..0.2, 0.3..0.8`."""
    parts = [f"{name} {entries[name]}" if name in entries else f"no {name}" for name in names]
    return ", ".join(parts)
