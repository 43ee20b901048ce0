"""How train_glue.py keeps padding out of what an encoder computes: rows of different lengths share a batch.

Encoders differ in the mask that they take, and some mix neighbouring or all positions whatever the mask says. A mask of
the wrong kind raises no error: it is added to the scores as 0 and 1, and padding is attended. So an encoder whose
attention is not known is tried once, and gets the quickest of the three ways that leaves its outputs as they are
without padding.

Shape letters: R rows, T positions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from common.errors import UserError
from dataset.glue.glue_dataset import Batch

# Those whose attention takes a ready bool mask, and gives what it gives with their own: a test goes through them.
KNOWN = frozenset({"albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"})
# The implementations of it that do.
ATTENTION = ("sdpa", "compiled_on_cpu")

# Relative: padding of another content leaves outputs as they are to the last bits.
SAME_SHAPE = 1e-6
# Relative: batches of other shapes are rounded otherwise, the more the deeper an encoder is.
OTHER_SHAPE = 1e-3
# Of the examples that are tried.
LENGTHS = (24, 13, 5)

# (model, batch) -> logits [R, outputs].
Way = Callable[[Any, Batch], torch.Tensor]


def has_segments(model: Any) -> bool:
    return (getattr(model.config, "type_vocab_size", 0) or 0) >= 2


def is_known(model: Any) -> bool:
    """Whether the encoder's attention is known, and with it that its layers may be compiled."""
    config = model.config
    return config.model_type in KNOWN and config._attn_implementation in ATTENTION


def inputs_of(model: Any, batch: Batch, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": batch.ids, "attention_mask": mask}
    if has_segments(model):
        inputs["token_type_ids"] = batch.types
    return inputs


# ---------------------------------------------------------------------------------------------- the three ways


def with_ready_mask(model: Any, batch: Batch) -> torch.Tensor:
    """A bool mask for every query, which transformers takes as it is. Into one of [R, T] it looks, and leaves it out
    where nothing is padded, which waits for the device and gives a compiled layer two forms."""
    R, T = batch.ids.shape
    visible = batch.mask.bool()[:, None, None, :].expand(R, 1, T, T)
    return model(**inputs_of(model, batch, visible)).logits


def with_own_mask(model: Any, batch: Batch) -> torch.Tensor:
    """The encoder makes what it needs of 1 for a token and 0 for padding, [R, T]."""
    return model(**inputs_of(model, batch, batch.mask)).logits


def cut(batch: Batch, rows: torch.Tensor, length: int) -> Batch:
    """Some rows of a batch, int [r], and their first positions; the labels stay those of the batch."""
    return Batch(batch.ids[rows, :length], batch.mask[rows, :length], batch.types[rows, :length], batch.labels)


def without_padding(model: Any, batch: Batch) -> torch.Tensor:
    """Rows of one length are computed together, and none is padded. Takes longer: a batch has several lengths."""
    lengths = batch.mask.sum(1)
    parts = []
    places = []
    for length in sorted(set(lengths.tolist())):
        rows = (lengths == length).nonzero().flatten()
        parts.append(with_own_mask(model, cut(batch, rows, length)))
        places.append(rows)
    return torch.cat(parts)[torch.cat(places).argsort()]


# ------------------------------------------------------------------------------------------- which one it gets


def way_of(model: Any) -> Way:
    """What `choose_way` found, or the ready mask."""
    return getattr(model, "padding_way", with_ready_mask)


@torch.no_grad()
def choose_way(model: Any, what: str, longest: int) -> None:
    """Find out how the model is to be called, by examples of at most `longest` positions.

    what: names the model for the user. Errors: UserError where it cannot compute one row, or where rows that share a
    batch change one another's outputs.
    """
    if is_known(model):
        model.padding_way = with_ready_mask
        return
    was_training = model.training
    model.eval()
    try:
        reference = torch.cat([with_own_mask(model, row) for row in single_rows(model, longest)]).float()
        for way in (with_own_mask, without_padding):
            if leaves_padding_out(model, way, reference, longest):
                model.padding_way = way
                return
    except Exception as error:
        # Each encoder raises its own kinds.
        raise UserError(
            f"{what}: {type(model).__name__} cannot compute examples of {min(longest, max(LENGTHS))} tokens and less "
            f"({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        ) from error
    finally:
        model.train(was_training)
    raise UserError(f"{what}: in {type(model).__name__} the rows of a batch change one another's outputs")


def leaves_padding_out(model: Any, way: Way, reference: torch.Tensor, longest: int) -> bool:
    """Whether rows that share a batch give what each gives alone, and whatever stands in the padding."""
    plain = padded_batch(model, longest, filled=False)
    try:
        found = watched(model, way, plain)
        filled = watched(model, way, padded_batch(model, longest, filled=True))
    except Exception:
        # It wants rows of another form; the next way may give it one.
        return False
    if found.logits.shape != reference.shape or not found.logits.isfinite().all():
        return False
    if not close(found.logits, reference, OTHER_SHAPE):
        return False
    same = [close(filled.logits, found.logits, SAME_SHAPE)]
    # The logits see little of what only a row's end has read, so the last layer is looked at too, where it is shown.
    if way is with_own_mask and found.hidden.shape[:2] == plain.mask.shape:
        real = plain.mask.bool()
        same.append(close(filled.hidden[real], found.hidden[real], SAME_SHAPE))
    return all(same)


class Outputs(NamedTuple):
    logits: torch.Tensor  # [R, outputs]
    # What the encoder gives below the head, most often [R, T, H].
    hidden: torch.Tensor


def watched(model: Any, way: Way, batch: Batch) -> Outputs:
    hidden: list[torch.Tensor] = []
    handle = model.base_model.register_forward_hook(lambda _, inputs, output: hidden.append(output[0]))
    try:
        logits = way(model, batch).float()
    finally:
        handle.remove()
    return Outputs(logits, hidden[-1].float())


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def padded_batch(model: Any, longest: int, filled: bool) -> Batch:
    """A Batch of made-up rows of LENGTHS. filled: other tokens stand where the padding is."""
    T = min(longest, max(LENGTHS))
    lengths = torch.tensor(LENGTHS).clamp(max=T)
    mask = (torch.arange(T) < lengths[:, None]).long()
    pad_id = getattr(model.config, "pad_token_id", None) or 0
    ids = (7 * torch.arange(mask.numel()).view_as(mask) + 11) % model.config.vocab_size
    # Some encoders take positions from where the id of the padding stands.
    ids = torch.where(ids == pad_id, (pad_id + 1) % model.config.vocab_size, ids)
    if not filled:
        ids = ids.masked_fill(mask == 0, pad_id)
    types = torch.zeros_like(ids)
    types[:, T // 2 :] = 1
    return Batch(ids, mask, types * mask, torch.empty(0))


def single_rows(model: Any, longest: int) -> list[Batch]:
    """Each row of `padded_batch` by itself, without its padding."""
    batch = padded_batch(model, longest, filled=False)
    rows = []
    for r, length in enumerate(batch.mask.sum(1).tolist()):
        rows.append(cut(batch, torch.tensor([r]), length))
    return rows


@torch.no_grad()
def computes_in(model: Any, dtype: torch.dtype, longest: int) -> bool:
    """Whether an encoder on the CPU gives finite outputs with products in `dtype`: some write a float32's lowest value
    into scores of half precision, which is an error."""
    if dtype is torch.float32 or is_known(model):
        return True
    was_training = model.training
    model.eval()
    try:
        with torch.autocast("cpu", dtype):
            found = way_of(model)(model, padded_batch(model, longest, filled=False))
    except RuntimeError:
        return False
    finally:
        model.train(was_training)
    return bool(found.isfinite().all())


def notice(model: Any) -> str | None:
    """A line for the user where rows cannot be padded, or None."""
    if way_of(model) is not without_padding:
        return None
    return (
        f"{type(model).__name__} lets padding into its outputs, whatever the mask says: examples of one length are "
        "computed together, without padding, which takes longer"
    )
