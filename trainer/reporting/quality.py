"""How good a model is: its bits per byte of held-out text beside what was expected and what gzip and xz need for it."""

from typing import NamedTuple

import numpy as np

from trainer.reporting.log_lines import risen_validation
from trainer.reporting.records import RunRecords, is_number, trains_answers

# Text has 8 bits a byte before anything is compressed. What a file says beyond some times that is no such figure.
MOST_BITS = 100
# What --objective electra logs, and what --objective mlm does.
OF_ENCODERS = ("mlm_loss", "mlm_acc")


class Bar(NamedTuple):
    """One of the figures. percent: of the largest of them."""

    label: str
    value: float
    percent: float


def quality(run: RunRecords) -> list[Bar]:
    """The model first; none where it was not evaluated on text."""
    bits = run.last("bits_per_byte")
    if bits is None:
        return []
    figures = [("this model", bits), ("expected", expected_bits(run, bits)), *compressors(run)]
    known = [(label, value) for label, value in figures if value is not None and 0 < value <= MOST_BITS]
    largest = max((value for _, value in known), default=0.0)
    return [Bar(label, value, 100 * value / largest) for label, value in known]


def remarks(run: RunRecords) -> list[str]:
    """Sentences on how good a run's model is, beside its figures."""
    return [*on_overfitting(run), *without_bits(run)]


def on_overfitting(run: RunRecords) -> list[str]:
    """Whether the validation loss has risen again."""
    if "val_loss" not in run.curves:
        return []
    tokens, values = run.curves["val_loss"]
    lowest = int(values.argmin())
    # Every line has its update, and lines with the same number of tokens have the same one.
    line_tokens, updates = run.curves["update"]
    update = int(updates[np.searchsorted(line_tokens, tokens[lowest])])
    risen = risen_validation(float(values[lowest]), update, float(values[-1]))
    return [f"{risen[0].upper()}{risen[1:]}."] if risen else []


def without_bits(run: RunRecords) -> list[str]:
    """What can be said of a language model without bits per byte; of other runs nothing."""
    loss = run.last("loss")
    # An encoder's loss is that of no language model, and trainers of other kinds hold nothing out.
    if any(run.last(name) is not None for name in OF_ENCODERS):
        return []
    if loss is None or "val_fraction" not in run.settings or run.last("bits_per_byte") is not None:
        return []
    learns_answers = trains_answers(run)
    what = "answers" if learns_answers else "text"
    said = f"The loss on the {what} that it was trained on was {loss:.3f} nats per token at the end"
    expected = expected_at_end(run)
    sentences = [f"{said}; {expected:.3f} was to be expected." if expected is not None else f"{said}."]
    held_out = run.last("val_loss")
    if held_out is not None:
        sentences.append(f"On {what} that it was not trained on it was {held_out:.3f}.")
        return sentences
    gives = "the loss on answers" if learns_answers else "bits per byte, beside those of gzip and xz,"
    sentences.append(
        f"Nothing was held out, so this does not tell how good it is on other {what}. A run with --val_fraction 0.02 "
        f"does not train a fiftieth of the {'conversations' if learns_answers else 'documents'}, and shows {gives} here."
    )
    return sentences


def expected_at_end(run: RunRecords) -> float | None:
    """The end of the expected curve; None where there is none, or where it ends before the run does."""
    return run.last("expected_loss") if run.is_in_last_line("expected_loss") else None


def expected_bits(run: RunRecords, bits: float) -> float | None:
    """The end of the expected curve, which is in nats a token, in bits a byte; None where it is not known."""
    expected = expected_at_end(run)
    loss = run.last("val_loss")
    if expected is None or not loss:
        return None
    # The tokens of a byte, and the bits of a nat, are those of the evaluation itself.
    return expected * bits / loss


def compressors(run: RunRecords) -> list[tuple[str, float | None]]:
    """What the last start has noted of them."""
    noted = run.starts[-1]["data"].get("compressors") if run.starts else None
    if not isinstance(noted, dict):
        return []
    return [(name, noted[name]) for name in ("xz", "gzip") if is_number(noted.get(name))]
