"""Saving and resuming a run: the content of a checkpoint, and what a resume may change."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import UserError, user_errors
from common.flags import AUTO
from common.settings import field_default
from common.wording import LONGEST_REASON, counted, one_line
from trainer.job import Job, Progress
from trainer.machine.devices import rng_state, set_rng_state
from trainer.machine.measure import exhausted_line
from trainer.machine.ranks import compare_with_main, fail_all_ranks, flatten_facts, min_over_ranks, on_main
from trainer.reporting.records import RunRecords
from trainer.reporting.reporter import Reporter
from trainer.saving.checkpoint import Checkpoints, load_checkpoint, recorded_digests, update_of, verified
from trainer.saving.run_folder import RECORDS
from trainer.saving.weights import weights_to_save
from trainer.settings import RunSettings
from trainer.snapshot import snapshot

# version of a checkpoint's content; goes up when older ones can no longer be resumed
FORMAT = 2
# --save_minutes auto on a GPU. A kill costs two minutes at most, and a save of the 26 M model about a tenth of a second.
GPU_MINUTES = 2.0


class Saver:
    """Saves a run, and resumes it from its checkpoints.

    What: a checkpoint has all that a resume needs, whole tensors and the state of each rank; beside it are weights for other programs.
    Why: a run that is killed at any moment ends with the bits of an undisturbed one, and may go on with other ranks. So rank 0
    writes one file for all, in a thread, and it is intact or does not count (checkpoint.py).
    Not taken: a file for each rank, which ties a resume to as many ranks; saving in the loop, where training waits for the disk.
    """

    def __init__(self, job: Job, reporter: Reporter) -> None:
        self.job = job
        self.settings = job.settings
        self.reporter = reporter
        self.engine = job.engine
        self.ranks = job.engine.ranks
        # Only rank 0 saves.
        self.checkpoints = Checkpoints(f"{job.files.stem}_resume", job.settings.keep_checkpoints)
        # on rank 0: weights of the lowest validation loss, in the dtype of the file; empty before the first evaluation
        self.best_weights: dict[str, torch.Tensor] = {}

    # ------------------------------------------------------------------------------------------------ saving

    def save(self, progress: Progress, is_last: bool) -> None:
        """Start writing a checkpoint and the half-precision weights. A full disk is reported, and training continues.

        is_last: the run is finished. A collective.
        """
        problem = self._wait()
        if problem:
            self.reporter.say(f"warning: the save before this one failed {problem}; training continues")
        # Collectives, so all ranks call them.
        state = snapshot(self._state_dict(progress), keeps=self.ranks.is_main)
        if not self.ranks.is_main:
            return

        # Weights first: a run killed between the two repeats its last updates, and nothing is missing.
        def save_weights() -> None:
            self.job.save_weights(state["model"], state["progress"]["update"], is_last)
            self.write_best(state["best"], state["progress"])

        self.checkpoints.save(state, progress.update, save_weights)

    def _state_dict(self, progress: Progress) -> dict[str, Any]:
        """Everything that a resume needs, as tensors and plain containers. A collective."""
        # Each rank's sums are saved: added up in another order they would differ in the last bit.
        this_rank = {"rng": rng_state(self.engine.device), "sums": self.engine.sums.tolist()}
        ranks: list[Any] = [this_rank] * self.ranks.world_size
        if self.ranks.world_size > 1:
            dist.all_gather_object(ranks, this_rank)
        clock = self.job.length.clock
        return {
            "format": FORMAT,
            # keep_vars: `snapshot` recognises tied parameters by identity.
            "model": self.engine.model.state_dict(keep_vars=True),
            "engine": self.engine.state_dict(),
            "progress": asdict(progress),
            "best": self.best_weights,
            "ranks": ranks,
            "update_rows": self.job.batching.rows,
            "identity": self.job.identity.entries,
            "settings": {name: value for name, value in self.settings.values().items() if value is not None},
            "job": {"clock": clock.state_dict()} if clock else {},
        }

    def _wait(self) -> str:
        """Sync the metrics and end the save in progress. Returns its error and what a resume would start from; "": no error.

        All ranks wait for rank 0, which may take longer than the timeout of a message: `on_main` allows for that.
        """

        def wait() -> str:
            self.reporter.sync()
            try:
                with user_errors():
                    self.checkpoints.wait()
            except UserError as error:
                return f"({error}); {self.how_to_resume()}"
            return ""

        return on_main(self.ranks, wait)

    def write_outputs(self, progress: Progress) -> None:
        """Write the weights of a finished run again: a full disk or a kill may have left others. A collective."""
        save = partial(self.job.save_weights, self.engine.weights(), progress.update, is_last=True)
        on_main(self.ranks, lambda: self.checkpoints.with_room(save))

    def finish(self) -> None:
        """Wait for the last save. Errors: UserError if it failed, since no other follows.

        All ranks wait for it: a launcher that sees one of them exit ends the others at once.
        """
        problem = self._wait()
        fail_all_ranks(self.ranks, problem and f"the last save failed {problem}")

    def how_to_resume(self) -> str:
        """Names the checkpoint that a resume would start from, for the end of an error message."""
        for path in self.checkpoints.paths():
            if verified(path):
                return f"the checkpoint of update {update_of(path)} is intact, and --from_resume 1 continues from there"
        return "none of the checkpoints is intact" if self.checkpoints.paths() else "no checkpoint was saved yet"

    # ------------------------------------------------------------------------------------------------ resuming

    def set_aside_earlier_run(self) -> None:
        """On rank 0: move the files and checkpoints of an earlier run out of the way of a fresh one."""
        files, stem = self.job.files, self.job.files.stem
        records = [Path(f"{stem}.{ending}") for ending in RECORDS]
        stale = [path for pattern in files.stale_patterns for path in sorted(stem.parent.glob(pattern))]
        metrics = Path(f"{stem}.metrics.jsonl")
        # A run that was killed before its first save has left only these, which are deleted.
        unsaved = [metrics, Path(f"{stem}.settings.yaml"), *files.write_at_start]
        # The curve of a finished run is kept in any case.
        with contextlib.suppress(UserError):
            if RunRecords.read(metrics).last("eta") == 0:
                unsaved = []
        self.checkpoints.set_aside([*records, *files.write_at_start, *stale], files.outputs.values(), unsaved)

    def resume(self) -> Progress | None:
        """Load the newest intact checkpoint. Returns its progress, or None if there is none.

        Errors: UserError if data, tokenizer, model or row layout differ from the checkpoint's, naming the difference,
        or if none of the checkpoints is intact.
        """
        say = self.reporter.say
        # Machines without a shared disk would resume different runs, or some of them start afresh.
        digests = {path.name: str(recorded_digests(path)[:12], "ascii", "replace") for path in self.checkpoints.paths()}
        compare_with_main(self.ranks, {"checkpoint": digests}, "one --out_dir, which all machines share")
        while True:
            newest = on_main(self.ranks, self.checkpoints.newest)
            if newest is None:
                say(
                    f"--from_resume 1: there is no checkpoint in {self.checkpoints.folder} yet (--out_dir), starting afresh"
                )
                return None
            # Machines may mount the shared disk at different paths.
            path = self.checkpoints.folder / newest.name
            state, problem = self._load(path)
            if min_over_ranks(self.ranks, float(not problem)):
                break
            say(f"{path}: cannot be read ({problem or 'on another rank'}); skipped")
            self.checkpoints.damaged.add(path)
        on_main(self.ranks, lambda: self._check(state, path))
        self.engine.load_weights(state["model"])
        self.engine.load_state_dict(state["engine"])
        progress = Progress(**state["progress"])
        if rows := self.job.length.rows_of_epoch:
            # Other flags change how many rows count as an epoch, but not the order of the rows.
            progress.epoch, progress.row = divmod(progress.rows, rows)
        self.best_weights = state["best"] if self.ranks.is_main else {}
        write_best = partial(self.write_best, state["best"], state["progress"])
        on_main(self.ranks, lambda: self.checkpoints.with_room(write_best))
        if self.job.length.clock is not None:
            self.job.length.clock.load_state_dict(state["job"]["clock"])
        # Last: building the model and the optimiser has drawn random numbers.
        self._restore_rank(state["ranks"])
        self._announce_changes(state)
        say(f"resumed from {path}: epoch {progress.epoch + 1}, row {progress.row}, update {progress.update}")
        return progress

    def _load(self, path: Path) -> tuple[Any, str]:
        """Returns (the state in a checkpoint that was intact a moment ago, ""), or (None, why it cannot be read now)."""
        try:
            # mapped: a rank reads only its part of a sharded model.
            return load_checkpoint(path, mapped=self.engine.is_sharded), ""
        except Exception as error:
            # Without memory an older one cannot be read either. Torch refuses one that was forged.
            if exhausted_line(error) or (type(error).__name__ == "UnpicklingError" and verified(path)):
                raise
            return None, one_line(error)[:LONGEST_REASON]

    def _check(self, state: dict[str, Any], path: Path) -> None:
        """Errors: UserError if it is the checkpoint of another run."""
        if state["format"] != FORMAT:
            raise UserError(
                f"{path}: of another version of this trainer; start without --from_resume, perhaps "
                "from the weights that the run has saved (--from_weight; encoders: --model_path)"
            )
        if self.job.length.clock is not None and not state["job"]:
            raise UserError(
                f"{path}: this run was started without --budget: continue without it, or start without --from_resume"
            )
        identity = self.job.identity
        before = flatten_facts(identity.defaults) | flatten_facts(state["identity"])
        now = flatten_facts(identity.entries)
        for what in [*now, *before]:
            if before.get(what) != now.get(what):
                flags = f" ({identity.flags_to_check[what]})" if what in identity.flags_to_check else ""
                raise UserError(
                    f"{path}: made with another {what}{flags}: {before.get(what)} there, {now.get(what)} in this run; use the "
                    "same one, or start without --from_resume"
                )

    def _restore_rank(self, before: list[dict[str, Any]]) -> None:
        """Restore this rank's random state and its sums for the log. On another world size rank 0 takes all sums."""
        rank = self.ranks.rank
        sums = self.engine.sums
        if rank < len(before):
            set_rng_state(before[rank]["rng"], self.engine.device)
        if len(before) == self.ranks.world_size:
            sums.copy_(torch.tensor(before[rank]["sums"], dtype=sums.dtype))
        elif rank == 0:
            sums.copy_(torch.tensor([of_rank["sums"] for of_rank in before], dtype=sums.dtype).sum(0))

    def _announce_changes(self, state: dict[str, Any]) -> None:
        """Report settings that differ from those of the checkpoint."""
        now = self.settings.values()
        # A flag that is newer than the checkpoint had its default.
        kind: Any = type(self.settings)
        before = {name: field_default(kind, name) for name in now} | state["settings"]
        for name in sorted((before.keys() | now.keys()) - {"from_resume", "local_rank"}):
            if before.get(name) == now.get(name):
                continue
            if name in self.job.identity.ignored_on_resume:
                self.reporter.say(
                    f"warning: --{name} {now.get(name)} has no effect: the run continues from its checkpoint and keeps "
                    f"{before.get(name)}"
                )
            else:
                self.reporter.say(f"--{name} is {now.get(name)}, was {before.get(name)} before the resume")
        rows_now = self.job.batching.rows
        # An older checkpoint does not tell.
        rows_before = state.get("update_rows", rows_now)
        if rows_before != rows_now:
            self.reporter.say(
                f"warning: an update now covers {counted(rows_now, 'row')}, before the resume it covered {rows_before}; "
                "no document is seen twice, but the curve will differ"
            )

    # ------------------------------------------------------------------------------------------ the best weights

    # `pretrain_512.best.pth` exists beside the weights of the last update once the validation loss has risen. It is written or deleted
    # with each checkpoint, which holds the best weights too, and at each resume: a killed run keeps none from the updates that it lost.

    def keep_best(self) -> None:
        """Copy the weights, whose validation loss is the lowest so far. A collective if the model is sharded."""
        if self.job.evaluation.save_best is None:
            return
        weights = self.engine.weights()
        if self.ranks.is_main:
            self.best_weights = weights_to_save(weights)

    def write_best(self, weights: Mapping[str, torch.Tensor], progress: Mapping[str, Any]) -> None:
        """On rank 0: write or delete the files, to match a checkpoint with these weights and this Progress. Errors: OSError."""
        save = self.job.evaluation.save_best
        if save is None:
            return
        stem = Path(f"{self.job.files.stem}.best")
        # true for NaN too
        if weights and progress["val_loss"] != progress["best_val_loss"]:
            save(stem, weights)
            return
        for ending in ("pth", "json"):
            Path(f"{stem}.{ending}").unlink(missing_ok=True)


class SaveTimer:
    """Micro-batches and seconds between two saves; 0: not used.

    A GPU does the default number of micro-batches in a second or two. So with --save_minutes auto, the default, a run on one
    is saved by time alone.

    Clocks differ between ranks. So only rank 0 reads its own, and requests a save from all ranks, as a signal does.
    """

    def __init__(self, settings: RunSettings, device_type: str) -> None:
        self.interval = settings.save_interval
        self.seconds = 0.0
        if settings.save_minutes != AUTO:
            self.seconds = 60 * float(settings.save_minutes)
        elif device_type == "cuda":
            self.interval = 0
            self.seconds = 60 * GPU_MINUTES
        self.restart()

    def restart(self) -> None:
        """Restart the timer: training starts, or a save is made."""
        self._last = time.monotonic()

    def take_request(self) -> bool:
        """True if a save is due; restarts the timer then, since on CUDA the ranks learn of it an update later."""
        if not self.seconds or time.monotonic() - self._last < self.seconds:
            return False
        self.restart()
        return True
