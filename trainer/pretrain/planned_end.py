"""Where a run ends whose shares change over it: the shares end with it. See dataset/mixture.py."""

from dataclasses import replace

from common.errors import DataError
from dataset.corpus import Corpus
from dataset.mixture import Move
from trainer.budget.clock import Clock
from trainer.job import Progress
from trainer.machine.ranks import Ranks
from trainer.pretrain.settings import PretrainSettings
from trainer.updates import rows_of_update


class PlannedEnd:
    """Keeps the plan of a run of some updates in step with where the run ends.

    settings: with the final number of rows in an update. corpus: whose shares change.
    """

    def __init__(self, settings: PretrainSettings, ranks: Ranks, corpus: Corpus, clock: Clock | None) -> None:
        self.settings = settings
        self.ranks = ranks
        self.clock = clock
        assert corpus.mixture is not None
        self.mixture = corpus.mixture
        self.has_told_shortage = False

    def replan(self, progress: Progress) -> str | None:
        """As `Job.replan`."""
        # At its start a run has those of the plan.
        moves = [*(progress.moves or self.mixture.moves)]
        last = moves[-1]
        place = progress
        if progress.epoch:
            # The run was at its end. If it is given more updates, its one epoch goes on.
            place = replace(progress, epoch=0, row=last.end)
        move = self._move(place)
        # A resume finds the end where it was, unless there are other updates, or other rows in one. Within the fall, which has
        # no beginning any more, only the end matters.
        is_new = move.end != last.end or move.fall_row not in (last.fall_row, move.row)
        if is_new:
            moves.append(move)
            progress.epoch, progress.row = place.epoch, place.row
        progress.moves = moves
        self.mixture.replan(moves)
        shortage = self.mixture.shortage()
        line = ""
        if shortage is not None and not self.settings.has_budget and self.clock is None:
            raise DataError(shortage.told(self.settings.max_updates, progress.update))
        if shortage is not None and not self.has_told_shortage:
            # A clock moves the end as the time asks for it.
            self.has_told_shortage = True
            line = f"warning: with the end that the budget sets, {shortage.sources}"
        return line if line or is_new else None

    def _move(self, progress: Progress) -> Move:
        """What is left of the run, in rows."""
        settings, row = self.settings, progress.row
        rows = rows_of_update(settings, self.ranks)
        course = self.clock.moved if self.clock is not None else None
        if course is None:
            end = row + max(settings.max_updates - progress.update, 0) * rows
            return Move(row, end, 1.0, end)
        end = row + max(course.end - progress.update, 0) * rows
        fall_row = row + max(course.fall_from - progress.update, 0) * rows
        return Move(row, fall_row, 1 - settings.decay_share, end)
