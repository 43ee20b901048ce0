"""How good a model is: its bits per byte of held-out text beside what was expected and what gzip and xz need for it."""

from typing import NamedTuple

from trainer.reporting.records import RunRecords, is_number

# Text has 8 bits a byte before anything is compressed. What a file says beyond some times that is no such figure.
MOST_BITS = 100


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


def expected_bits(run: RunRecords, bits: float) -> float | None:
    """The end of the expected curve, which is in nats a token, in bits a byte; None where there is no such curve."""
    expected = run.last("expected_loss")
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
