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
    expected = expected_at_end(run)
    loss = run.last("val_loss")
    if expected is not None and loss:
        # From nats a token to bits a byte by the evaluation's own ratio.
        bars.append(("expected", expected * bits / loss))
    compressors = run.noted("data").get("compressors", {})
    return bars + [(name, compressors[name]) for name in ("xz", "gzip") if name in compressors]


def expected_at_end(run: RunRecords) -> float | None:
    """The end of the expected curve; None where there is none, or where it ends before the run does."""
    if "expected_loss" not in run.curves or "loss" not in run.curves:
        return None
    ends_with_run = run.curves["expected_loss"][0][-1] == run.curves["loss"][0][-1]
    return run.last("expected_loss") if ends_with_run else None


def risen_validation(lowest: float, update: int, last: float) -> str | None:
    """A sentence for a run whose validation loss was lower, after `update`, than it is at the end; None: it was not."""
    if not lowest < last:
        return None
    line = f"the validation loss was lowest after update {update:,}: {lowest:.3f}; that of the saved weights is {last:.3f}"
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
    loss = run.last("loss")
    answers = trains_answers(run)
    is_language_model = answers or "bytes_per_token" in run.noted("data")
    if loss is None or not is_language_model or run.last("bits_per_byte") is not None:
        return sentences
    text = "answers" if answers else "text"
    line = f"The loss on the {text} that it was trained on was {loss:.3f} nats per token at the end"
    expected = expected_at_end(run)
    sentences.append(f"{line}; {expected:.3f} was to be expected." if expected is not None else f"{line}.")
    held_out = run.last("val_loss")
    if held_out is not None:
        sentences.append(f"On {text} that it was not trained on it was {held_out:.3f}.")
    else:
        gives = "the loss on answers" if answers else "bits per byte, beside those of gzip and xz,"
        sentences.append(
            f"Nothing was held out, so this does not tell how good it is on other {text}: --val_fraction 0.02 does not "
            f"train a fiftieth of the {'conversations' if answers else 'documents'}, and shows {gives} here."
        )
    return sentences
