"""The loss of train_electra.py and what it logs."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dataset.electra.electra_dataset import Batch, Totals
from model.electra.masking import IGNORE
from model.electra.model_electra import AUC_BINS, LARGEST_LOGIT, ElectraPretrainer, Losses
from model.electra.pretrainer import is_real

# Of the discriminator's loss beside the generator's, as published.
DISC_WEIGHT = 50.0
N_SUMS = 4 + 2 * AUC_BINS
# A threshold may call at most this many times as many tokens replaced as were. A guess: a discriminator that has learned something
# stays below it (1.3 times in docs/experiments.md, "What make electra reaches"), one that calls nearly all tokens far above.
MOST_CALLED = 2


class LossWeights(NamedTuple):
    """What the two losses are multiplied with."""

    generator: float = 1.0
    discriminator: float = DISC_WEIGHT


PUBLISHED = LossWeights()


def electra_loss(
    model: ElectraPretrainer, batch: Batch, totals: Totals, weights: LossWeights = PUBLISHED
) -> tuple[torch.Tensor, torch.Tensor]:
    """(a micro-batch's share of the update's loss, 0-d; what to add up, float32 [N_SUMS]).

    The sums: generator's and discriminator's loss, masked positions and those that the generator has right, and how
    many original and replaced tokens got which logit, in AUC_BINS bins each.
    """
    found = model(*batch)
    return shared_out(found, totals, weights), sums_of(found, batch)


def shared_out(found: Losses, totals: Totals, weights: LossWeights) -> torch.Tensor:
    """A micro-batch's share of the update's loss, 0-d."""
    of_generator = weights.generator * found.mlm / max(totals.masked, 1)
    of_discriminator = weights.discriminator * found.disc / max(totals.targets, 1)
    return of_generator + of_discriminator


def sums_of(found: Losses, batch: Batch) -> torch.Tensor:
    """What is added up of a batch for `metrics`, float32 [N_SUMS]: see `electra_loss`."""
    with torch.no_grad():
        real = is_real(batch.ids, batch.lengths)
        place = bins_of(found.disc_logits) + AUC_BINS * found.replaced
        counts = torch.zeros(2 * AUC_BINS, device=place.device)
        counts = counts.scatter_add(0, place.flatten(), real.flatten().float())
        masked = (batch.labels != IGNORE).sum()
        sums = torch.stack((found.mlm, found.disc, masked, found.correct))
        return torch.cat((sums, counts))


def bins_of(logits: torch.Tensor) -> torch.Tensor:
    """The number of the bin that each logit is in, int64. That of 0, a probability of 0.5, is the lower edge of the bin
    AUC_BINS / 2."""
    # bfloat16 would be coarser than the bins.
    logits = logits.float()
    # The engine skips an update with a NaN, but an index must exist before that.
    logits = logits.nan_to_num(-LARGEST_LOGIT).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    bins = ((logits + LARGEST_LOGIT) / (2 * LARGEST_LOGIT) * AUC_BINS).floor()
    return bins.clamp(max=AUC_BINS - 1).long()


def lower_edge(number: int) -> float:
    """The probability from which on a token is in the bin of this number."""
    # The first bin holds all that is below it too.
    if number == 0:
        return 0.0
    logit = 2 * LARGEST_LOGIT * number / AUC_BINS - LARGEST_LOGIT
    return 1 / (1 + math.exp(-logit))


def best_threshold(sums: Sequence[float]) -> float | None:
    """The probability from which on a token is best called replaced: that of the highest F1, by the sums of `electra_loss`.

    It calls at most MOST_CALLED times as many tokens replaced as were: of a discriminator that knows little the highest F1 is
    that of calling all of them so. None: no such probability finds any.
    """
    counts = sums[4:]
    original = torch.tensor(counts[:AUC_BINS], dtype=torch.float64)
    replaced = torch.tensor(counts[AUC_BINS:], dtype=torch.float64)
    # From the lower edge of each bin on
    found = replaced.flip(0).cumsum(0).flip(0)
    called = found + original.flip(0).cumsum(0).flip(0)
    n_replaced = replaced.sum()
    f1 = 2 * found / (called + n_replaced).clamp(min=1)
    f1[called > MOST_CALLED * n_replaced] = 0
    if not f1.any():
        return None
    # Of equal ones the highest: between them there is no token.
    best = AUC_BINS - 1 - int(f1.flip(0).argmax())
    return lower_edge(best)


def metrics(sums: Sequence[float], weights: LossWeights = PUBLISHED) -> tuple[dict[str, Any], float]:
    """(what to log, positions) of the sums of `electra_loss`.

    Precision and recall are those of finding replaced tokens.
    """
    mlm, disc, masked, correct = sums[:4]
    counts = sums[4:]
    original = torch.tensor(counts[:AUC_BINS], dtype=torch.float64)
    replaced = torch.tensor(counts[AUC_BINS:], dtype=torch.float64)
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
        "loss": weights.generator * mlm_loss + weights.discriminator * disc_loss,
        "mlm_loss": mlm_loss,
        "disc_loss": disc_loss,
        "gen_acc": correct / max(masked, 1),
        "disc_acc": (hits + n_original - false_alarms) / positions,
        "disc_precision": hits / max(hits + false_alarms, 1),
        "disc_recall": hits / max(n_replaced, 1),
        "disc_auc": auc,
    }
    return values, positions
