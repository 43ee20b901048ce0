"""The loss of train_electra.py and what it logs."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from dataset.electra.electra_dataset import Batch, Totals
from model.electra.masking import IGNORE
from model.electra.model_electra import ElectraPretrainer, Losses, is_real

# What the generator's and the discriminator's loss are multiplied with, as published.
WEIGHTS = (1.0, 50.0)
# Equal bins of the discriminator's logit from -LARGEST_LOGIT to LARGEST_LOGIT; the first and the last one also hold what is
# beyond. Not of its probability: few tokens are replaced, so most probabilities are near 0, where bins of a logit are small.
AUC_BINS = 200
LARGEST_LOGIT = 10.0
N_SUMS = 4 + 2 * AUC_BINS


def electra_loss(
    model: ElectraPretrainer, batch: Batch, totals: Totals, weights: tuple[float, float] = WEIGHTS
) -> tuple[torch.Tensor, torch.Tensor]:
    """(a micro-batch's share of the update's loss, 0-d; what to add up, see `sums_of`)."""
    found = model(*batch)
    of_generator = weights[0] * found.mlm / max(totals.masked, 1)
    of_discriminator = weights[1] * found.disc / max(totals.targets, 1)
    return of_generator + of_discriminator, sums_of(found, batch)


@torch.no_grad()
def sums_of(found: Losses, batch: Batch) -> torch.Tensor:
    """What is added up of a batch for `metrics`, float32 [N_SUMS]: generator's and discriminator's loss, masked positions and
    those that the generator has right, and how many original and replaced tokens got which logit, in AUC_BINS bins each."""
    real = is_real(batch.ids, batch.lengths)
    # bfloat16 would be coarser than the bins. The engine skips an update with a NaN, but an index must exist before that.
    logits = found.disc_logits.float().nan_to_num(-LARGEST_LOGIT).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    bins = ((logits + LARGEST_LOGIT) / (2 * LARGEST_LOGIT) * AUC_BINS).floor().clamp(max=AUC_BINS - 1).long()
    place = bins + AUC_BINS * found.replaced
    counts = torch.zeros(2 * AUC_BINS, device=place.device)
    counts = counts.scatter_add(0, place.flatten(), real.flatten().float())
    masked = (batch.labels != IGNORE).sum()
    return torch.cat((torch.stack((found.mlm, found.disc, masked, found.correct)), counts))


def metrics(sums: Sequence[float], weights: tuple[float, float] = WEIGHTS) -> tuple[dict[str, Any], float]:
    """(what to log, positions) of the sums of `electra_loss`. Precision and recall are those of finding replaced tokens."""
    mlm, disc, masked, correct = sums[:4]
    original, replaced = torch.tensor(sums[4:], dtype=torch.float64).view(2, AUC_BINS)
    n_original = float(original.sum())
    n_replaced = float(replaced.sum())
    positions = n_original + n_replaced
    # All updates since the last line were skipped.
    if not positions:
        return {"loss": math.nan}, 0
    # A token counts as found where its probability is 0.5 or more.
    hits = float(replaced[AUC_BINS // 2 :].sum())
    false_alarms = float(original[AUC_BINS // 2 :].sum())
    mlm_loss = mlm / max(masked, 1)
    disc_loss = disc / positions
    auc = math.nan
    if n_original and n_replaced:
        # The area under the curve is how often a replaced token is rated higher than an original one; equal ones, which
        # share a bin, count half.
        below = original.cumsum(0) - original / 2
        auc = float((replaced * below).sum()) / (n_original * n_replaced)
    values = {
        "loss": weights[0] * mlm_loss + weights[1] * disc_loss,
        "mlm_loss": mlm_loss,
        "disc_loss": disc_loss,
        "gen_acc": correct / max(masked, 1),
        "disc_acc": (hits + n_original - false_alarms) / positions,
        "disc_precision": hits / max(hits + false_alarms, 1),
        "disc_recall": hits / max(n_replaced, 1),
        "disc_auc": auc,
    }
    return values, positions
