"""The loss of `--objective mlm` and what it logs."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from dataset.electra.electra_dataset import Batch, Totals
from model.electra.masked_lm import MaskedLanguageModel
from model.electra.masking import IGNORE
from model.electra.pretrainer import FilledIn, is_real

N_SUMS = 4


def masked_loss(model: MaskedLanguageModel, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
    """(a micro-batch's share of the update's loss, 0-d; what to add up, float32 [N_SUMS]).

    The sums: the loss, masked positions, those that are right, and positions without padding.
    """
    found = model(*batch)
    return found.loss / max(totals.masked, 1), sums_of(found, batch)


def sums_of(found: FilledIn, batch: Batch) -> torch.Tensor:
    """What is added up of a batch for `metrics`, float32 [N_SUMS]: see `masked_loss`."""
    with torch.no_grad():
        masked = (batch.labels != IGNORE).sum()
        real = is_real(batch.ids, batch.lengths).sum()
        return torch.stack((found.loss, masked, found.correct, real)).float()


def metrics(sums: Sequence[float]) -> tuple[dict[str, Any], float]:
    """(what to log, positions) of the sums of `masked_loss`. mlm_acc: how often the likeliest token is the right one."""
    loss, masked, correct, positions = sums
    # All updates since the last line were skipped.
    if not masked:
        return {"loss": math.nan}, positions
    return {"loss": loss / masked, "mlm_acc": correct / masked}, positions
