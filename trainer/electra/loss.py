"""The loss of train_electra.py and what it logs."""

import math

import torch

from model.electra.model_electra import AUC_BINS, IGNORE

DISC_WEIGHT = 50.0  # of the discriminator's loss beside the generator's
N_SUMS = 4 + 2 * AUC_BINS


def objective(model):
    """The loss for the engine. Its sums: generator's and discriminator's loss, masked positions and those that the
    generator has right, and how many original and replaced tokens got which probability, in AUC_BINS bins each."""

    def losses(batch, totals):
        found = model(*batch)
        loss = found.mlm / max(totals.masked, 1) + DISC_WEIGHT * found.disc / max(totals.targets, 1)
        with torch.no_grad():
            real = torch.arange(batch.ids.shape[1], device=batch.ids.device) < batch.lengths[:, None]
            probability = found.disc_logits.sigmoid().nan_to_num(
                0.0
            )  # the engine skips the update; an index must exist
            bins = (probability * AUC_BINS).long().clamp(max=AUC_BINS - 1) + AUC_BINS * found.replaced
            counts = torch.zeros(2 * AUC_BINS, device=bins.device).scatter_add(
                0, bins.flatten(), real.flatten().float()
            )
            masked = (batch.labels != IGNORE).sum()
            sums = torch.stack((found.mlm, found.disc, masked, found.correct))
        return loss, torch.cat((sums, counts))

    return losses


def metrics(sums):
    """(what to log, positions) of the sums of `objective`. Precision and recall are those of finding replaced tokens."""
    mlm, disc, masked, correct = sums[:4]
    original, replaced = (
        torch.tensor(part, dtype=torch.float64) for part in (sums[4:][:AUC_BINS], sums[4:][AUC_BINS:])
    )
    n_original, n_replaced = float(original.sum()), float(replaced.sum())
    positions = n_original + n_replaced
    if not positions:  # all updates since the last line were skipped
        return {"loss": math.nan}, 0
    hits, false_alarms = (float(part[AUC_BINS // 2 :].sum()) for part in (replaced, original))  # probability >= 0.5
    below = original.cumsum(0) - original / 2  # the area under the curve: how often a replaced token is rated higher
    mlm_loss, disc_loss = mlm / max(masked, 1), disc / positions
    return {
        "loss": mlm_loss + DISC_WEIGHT * disc_loss,
        "mlm_loss": mlm_loss,
        "disc_loss": disc_loss,
        "gen_acc": correct / max(masked, 1),
        "disc_acc": (hits + n_original - false_alarms) / positions,
        "disc_precision": hits / max(hits + false_alarms, 1),
        "disc_recall": hits / max(n_replaced, 1),
        "disc_auc": float((replaced * below).sum()) / (n_original * n_replaced)
        if n_original and n_replaced
        else math.nan,
    }, positions
