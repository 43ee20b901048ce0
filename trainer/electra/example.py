"""--example_interval: one example of the data, what the generator wrote into it, and what the discriminator makes of it."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from dataset.electra.electra_dataset import Batch
from model.electra.detection import usual_threshold
from model.electra.model_electra import ElectraPretrainer, Losses
from trainer.engine import Engine
from trainer.evaluation import undisturbed

# Of the generator's draws: at every look the same ones, so that what changes is the networks.
SEED = 0
LABELS = ("original", "replaced")


@torch.no_grad()
def look_at(
    engine: Engine,
    model: ElectraPretrainer,
    tokenizer: PreTrainedTokenizerBase,
    batch: Batch,
    threshold: float | None,
) -> tuple[str, str]:
    """(text of the batch's only example, the same and what the networks make of it). threshold: from which probability on a token
    is called replaced; None: it was not measured.

    All ranks compute it: where they have sharded the model they need each other.
    """
    batch = batch.to(engine.device)
    with undisturbed(engine):
        torch.manual_seed(SEED)
        with engine.autocast():
            found = model(*batch)
    original = str(tokenizer.decode(real_ids(batch)))
    return original, f"{original}\n{example_lines(tokenizer, batch, found, threshold)}"


def real_ids(batch: Batch) -> list[int]:
    """The ids of the first example, without padding."""
    ids: list[int] = batch.ids[0, : int(batch.lengths[0])].tolist()
    return ids


def example_lines(tokenizer: PreTrainedTokenizerBase, batch: Batch, found: Losses, threshold: float | None) -> str:
    """Lines on the first example: the generator's text, and of each token that was masked or is doubted the label and the
    prediction."""
    length = int(batch.lengths[0])
    originals = tokenizer.convert_ids_to_tokens(real_ids(batch))
    masked = {int(place) for place, label in zip(batch.positions[0], batch.labels[0], strict=True) if label >= 0}
    corrupted = found.corrupted[0, :length].tolist()
    written = tokenizer.convert_ids_to_tokens(corrupted)
    replaced = found.replaced[0, :length].tolist()
    probabilities = found.disc_logits[0, :length].float().sigmoid().tolist()
    if threshold is None:
        threshold = usual_threshold(probabilities)
    rows = [("position", "original", "generator", "label", "prediction", "probability")]
    right = 0
    for place in range(length):
        is_doubted = probabilities[place] >= threshold
        right += is_doubted == replaced[place]
        if place in masked or is_doubted:
            rows.append(
                (
                    str(place),
                    originals[place],
                    written[place] if place in masked else "",
                    LABELS[replaced[place]],
                    LABELS[is_doubted],
                    f"{probabilities[place]:.2f}",
                )
            )
    lines = [str(tokenizer.decode(corrupted)), *columns(rows)]
    lines.append(
        f"{sum(replaced)} of {length} tokens are replaced; the discriminator is right on {right} (replaced: from "
        f"{threshold:.2f} on)"
    )
    return "\n".join(lines)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of text, its columns as wide as their longest entry."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
