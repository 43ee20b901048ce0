"""What the course of the AUC on held-out examples tells of a run, and what has helped where it goes wrong."""

import math
from collections.abc import Mapping

from common.wording import counted
from trainer.electra.settings import ElectraSettings, warmup_of

# What an AUC of a discriminator that has learned nothing may have by chance; docs/experiments.md has the runs.
PLATEAU = 0.57
# Updates behind the warm-up in which runs that learned have left the plateau; of a shorter run half of those.
PATIENCE = 1500
# How far the AUC must be below its best to be called fallen, and what the generator's loss may have gained meanwhile (nats per
# token) without being the reason. Both are guesses. In docs/experiments.md ("ELECTRA with little text") the AUC of good runs fell by
# 0.03 to 0.09 while their generators gained 0.6 or more, so a small gain tells them apart. No run is noted there that had left the
# plateau and then gave up.
FALL = 0.04
GENERATOR_GAIN = 0.05
# What a resumed run must know of the AUC so far.
KEPT = ("best", "loss_at_best", "has_said_plateau", "has_said_fall", "has_said_collapse")


class AucAlarm:
    """Watches the AUC of held-out examples, and says what to change where it stays near 0.5 or falls: each of its lines once."""

    def __init__(self, settings: ElectraSettings) -> None:
        self.settings = settings
        self.best = 0.0
        # The generator's loss when the AUC was at its best.
        self.loss_at_best: float | None = None
        self.has_said_plateau = False
        # A fall with a generator that has learned, of which nothing is wrong; and one that tells of a run that goes wrong.
        self.has_said_fall = False
        self.has_said_collapse = False

    def kept(self) -> dict[str, float | None]:
        """What a resumed run goes on watching from."""
        return {name: getattr(self, name) for name in KEPT}

    def take_kept(self, kept: Mapping[str, float | None]) -> None:
        """Go on from what `kept` gave."""
        for name in KEPT:
            setattr(self, name, kept[name])

    def line(self, update: int, end: int, auc: float, generator_loss: float) -> str | None:
        """What to say of an evaluation after so many updates; None: nothing. end: the updates of the whole run, as far as it
        is known."""
        said = None
        if self.best >= PLATEAU and auc < self.best - FALL:
            said = self._after_fall(auc, generator_loss)
        elif auc < PLATEAU:
            # Also where one evaluation was a little above: that is no fall, and nothing was learned.
            said = self._on_plateau(update, end, auc)
        if auc > self.best:
            self.best = auc
            # One that is not finite could not be compared with, nor be kept in a checkpoint.
            self.loss_at_best = generator_loss if math.isfinite(generator_loss) else None
        return said

    def _on_plateau(self, update: int, end: int, auc: float) -> str | None:
        """The discriminator still calls every token an original."""
        if self.has_said_plateau or update < self.patient_until(end):
            return None
        self.has_said_plateau = True
        return (
            f"warning: after {counted(update, 'update')} the discriminator's AUC is {auc:.2f}: it tells nothing yet. "
            f"What has helped: {', '.join(remedies(self.settings))} (docs/electra.md)"
        )

    def patient_until(self, end: int) -> int:
        """The update up to which nothing is said of a plateau: while the rate rises there is little to see yet."""
        rises = warmup_of(self.settings)
        left = max(end - rises, 0)
        return rises + min(PATIENCE, left // 2)

    def _after_fall(self, auc: float, generator_loss: float) -> str | None:
        """It was better before. A generator that learns is harder to see through, and nothing is wrong then."""
        # Without a best AUC there is nothing to fall from.
        if self.loss_at_best is None:
            return None
        fell = f"the discriminator's AUC fell from {self.best:.2f} to {auc:.2f}"
        has_learned = generator_loss < self.loss_at_best - GENERATOR_GAIN
        # However well a generator writes, a discriminator that has learned tells something.
        if has_learned and auc >= PLATEAU:
            if self.has_said_fall:
                return None
            self.has_said_fall = True
            return (
                f"note: {fell} while the generator's loss fell from {self.loss_at_best:.2f} to {generator_loss:.2f}: what it "
                "writes is harder to tell. That is usual; a narrower generator (--generator_divisor) keeps the AUC higher"
            )
        if self.has_said_collapse:
            return None
        self.has_said_collapse = True
        why = ". It tells nothing any more" if has_learned else ", and the generator has not learned meanwhile"
        return (
            f"warning: {fell}{why}: the rate is too high. Go on from an earlier checkpoint, or start again, with "
            f"{lower_rate(self.settings)} or lower"
        )


def lower_rate(settings: ElectraSettings) -> str:
    """The flag that halves the rate of the layers."""
    name = "muon_lr" if settings.optimizer == "muon" else "learning_rate"
    # Ten digits: the half of what a user types, without the last bits of its binary form.
    return f"--{name} {getattr(settings, name) / 2:.10g}"


def remedies(settings: ElectraSettings) -> list[str]:
    """What brought discriminators off an AUC of 0.5 in docs/experiments.md, as far as this run does not have it."""
    found = []
    if settings.learning_rate >= 1e-3:
        found.append("a rate below 1e-3 (--learning_rate 7e-4)")
    # Else they come from a folder, or the files of the networks say how they are drawn.
    draws_weights = settings.model_path is None and settings.discriminator_config is None
    if draws_weights and settings.position_init == "normal":
        found.append("--position_init sinusoidal")
    if settings.optimizer == "muon" and settings.muon_lr > 0.01:
        found.append("a lower rate of Muon (--muon_lr 0.006)")
    if settings.optimizer != "muon":
        found.append("--optimizer muon --muon_lr 0.006")
    if draws_weights and settings.init_std == 0.02:
        found.append("--init_std of about 1 / sqrt(width), such as 0.1 for 128")
    if settings.max_seq_len > 32:
        found.append("--max_seq_len 32 first, and then --model_path with longer examples")
    found.append("more updates")
    return found
