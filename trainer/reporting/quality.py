"""How good a model is: its bits per byte of held-out text beside what was expected and what gzip and xz need for it."""

import numpy as np

from trainer.reporting.records import RunRecords, trains_answers

# A validation loss that rises by more than this factor does so by no chance.
OVERFITTED = 1.01


def quality(run: RunRecords) -> list[tuple[str, float]]:
    """[(whose, bits per byte)], the model first; nothing where it was not evaluated on text."""
    bits = run.last("bits_per_byte")
    if bits is None:
        return []
    bars = [("this model", bits)]
    expected, loss = run.last("expected_loss"), run.last("val_loss")
    # Text that is read many times has no expectation any more in the end.
    is_known = expected is not None and run.curves["expected_loss"][0][-1] == run.curves["loss"][0][-1]
    if is_known and expected and loss:
        # From nats a token to bits a byte by the evaluation's own ratio
        bars.append(("expected", expected * bits / loss))
    compressors = run.noted("data").get("compressors", {})
    return bars + [(name, compressors[name]) for name in ("xz", "gzip") if name in compressors]


def risen_validation(lowest: float, update: int, last: float) -> str | None:
    """A sentence for a run whose validation loss was lower, after `update`, than it is at the end; None: it was not."""
    if not lowest < last:
        return None
    line = (
        f"the validation loss was lowest after update {update:,}: {lowest:.3f}; that of the saved weights is {last:.3f}"
    )
    if last > OVERFITTED * lowest:
        line += ", so the model has begun to learn its training data by heart (fewer epochs or more data help)"
    return line


def remarks(run: RunRecords) -> list[str]:
    """Sentences on how good a run's model is, beside its figures."""
    sentences = []
    if "val_loss" in run.curves:
        tokens, values = run.curves["val_loss"]
        lowest = int(values.argmin())
        # Every line has its update, and lines with the same number of tokens have the same one.
        line_tokens, updates = run.curves["update"]
        update = int(updates[np.searchsorted(line_tokens, tokens[lowest])])
        risen = risen_validation(float(values[lowest]), update, float(values[-1]))
        if risen:
            sentences.append(f"{risen[0].upper()}{risen[1:]}.")
    answers = trains_answers(run)
    if (answers or "bytes_per_token" in run.noted("data")) and "val_loss" not in run.curves:
        gives = "the loss on other answers" if answers else "bits per byte, beside those of gzip and xz,"
        sentences.append(
            f"Nothing was held out, so this run does not tell. --val_fraction 0.02 holds out a fiftieth of the "
            f"{'conversations' if answers else 'documents'}, and shows {gives} here."
        )
    return sentences
