"""How train_glue.py keeps padding out of what an encoder computes: rows of different lengths share a batch.

Encoders differ in the mask that they take, and some mix neighbouring or all positions whatever the mask says. A mask of
the wrong kind raises no error: it is added to the scores as 0 and 1, and padding is attended. So an encoder whose
attention is not known is tried once, and gets the quickest of the four ways that leaves its outputs as they are
without padding.

Shape letters: R rows, T positions, n outputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from common.errors import UserError
from dataset.glue.glue_dataset import Batch
from model.electra.compiled_encoder import QUICK_ON_CPU, ready_mask, uses_graphs

# Those whose attention takes a ready bool mask, and gives what it gives with their own: a test goes through them.
KNOWN = frozenset({"albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"})
# The implementations of it that do.
ATTENTION = ("sdpa", QUICK_ON_CPU)

# Relative: padding of another content leaves outputs as they are to the last bits.
SAME_SHAPE = 1e-6
# Relative: batches of other shapes are rounded otherwise, the more the deeper an encoder is.
OTHER_SHAPE = 1e-3
# Of the examples that are tried. Two are alike: some encoders take rows of one length alone, and some no two rows.
LENGTHS = (24, 13, 5, 13)
# Their tokens are below it, where an encoder says of no number that it is too large.
SOME_ENTRIES = 1000

# (model, batch) -> logits [R, n], or [R, T, n] where every position has its own.
Way = Callable[[Any, Batch], torch.Tensor]


def has_segments(model: Any) -> bool:
    return (getattr(model.config, "type_vocab_size", 0) or 0) >= 2


def entries_of(config: Any) -> int | None:
    """How many tokens an encoder has embeddings for. None: it has no such table, as CANINE, which hashes characters."""
    entries: int | None = getattr(config, "vocab_size", None)
    return entries


def is_known(model: Any) -> bool:
    """Whether the encoder's attention is known, and with it that its layers may be compiled."""
    config = model.config
    return config.model_type in KNOWN and config._attn_implementation in ATTENTION


def inputs_of(model: Any, batch: Batch, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": batch.ids, "attention_mask": mask}
    if has_segments(model):
        inputs["token_type_ids"] = batch.types
    return inputs


def logits_of(output: Any) -> torch.Tensor:
    """The logits in what a model of transformers gives; an answer's are how well it begins and ends at a position."""
    if "start_logits" in output:
        return torch.stack((output.start_logits, output.end_logits), dim=-1)
    logits: torch.Tensor = output.logits
    return logits


# ----------------------------------------------------------------------------------------------- the four ways


def with_ready_mask(model: Any, batch: Batch) -> torch.Tensor:
    """A mask for every query, which transformers takes as it is. transformers inspects a mask of [R, T] and drops it if nothing
    is padded. That waits for the device, and makes the compiler build two versions of a layer."""
    mask = ready_mask(batch.mask.bool(), uses_graphs(model, batch.ids.shape))
    return logits_of(model(**inputs_of(model, batch, mask)))


def with_own_mask(model: Any, batch: Batch) -> torch.Tensor:
    """The encoder makes what it needs of 1 for a token and 0 for padding, [R, T]."""
    fit_attention(model, batch.ids.shape[1])
    return logits_of(model(**inputs_of(model, batch, batch.mask)))


def fit_attention(model: Any, length: int) -> None:
    """Give a BigBird the attention that rows of `length` positions have: in blocks, but full in rows that are too short for
    them. By itself it changes to full attention at the first of these and never goes back."""
    if attends_in_blocks(model):
        set_attention(model.base_model, in_blocks=length > too_short_for_blocks(model))


def set_attention(module: Any, in_blocks: bool) -> None:
    """Change a BigBird, or the attention of one of its layers."""
    # The new modules take over the matrices of the former ones, so none is to be drawn.
    with torch.device("meta"):
        module.set_attention_type("block_sparse" if in_blocks else "original_full")


def keep_attention(model: Any) -> None:
    """Let each layer attend as its own inputs want it. With --gradient_checkpointing a layer is computed again when rows of
    another length were computed meanwhile."""

    def as_wanted(attention: Any, _: tuple[Any, ...], named: dict[str, Any]) -> None:
        set_attention(attention, in_blocks=named["band_mask"] is not None)

    for layer in model.base_model.encoder.layer:
        layer.attention.register_forward_pre_hook(as_wanted, with_kwargs=True)


def attends_in_blocks(model: Any) -> bool:
    return model.config.model_type == "big_bird" and model.config.attention_type == "block_sparse"


def too_short_for_blocks(model: Any) -> int:
    """The most positions in which a BigBird attends fully: two global and three sliding blocks, and the random ones twice."""
    most: int = (5 + 2 * model.config.num_random_blocks) * model.config.block_size
    return most


def cut(batch: Batch, rows: torch.Tensor, length: int) -> Batch:
    """Some rows of a batch, int [r], and their first positions; the labels stay those of the batch."""
    return Batch(batch.ids[rows, :length], batch.mask[rows, :length], batch.types[rows, :length], batch.labels)


def in_parts(model: Any, batch: Batch, bounds: torch.Tensor) -> torch.Tensor:
    """Rows of one bound are computed together, and cut to it. bounds: int [R], at least the rows' lengths."""
    T = batch.ids.shape[1]
    parts = []
    places = []
    for bound in sorted(set(bounds.tolist())):
        length = min(bound, T)
        rows = (bounds == bound).nonzero().flatten()
        part = with_own_mask(model, cut(batch, rows, length))
        if part.dim() == 3:
            # [r, length, n] -> [r, T, n]
            part = F.pad(part, (0, 0, 0, T - length))
        parts.append(part)
        places.append(rows)
    return torch.cat(parts)[torch.cat(places).argsort()]


def without_padding(model: Any, batch: Batch) -> torch.Tensor:
    """Rows of one length are computed together, and none is padded. Takes longer: a batch has several lengths."""
    # CANINE makes one position of several characters, and cannot compute fewer.
    least = getattr(model.config, "downsampling_rate", 1)
    return in_parts(model, batch, batch.mask.sum(1).clamp(min=least))


def with_equal_blocks(model: Any, batch: Batch) -> torch.Tensor:
    """Rows of as many blocks are computed together, and all those that are too short for them: every token sees the last
    block, so padding must not add one."""
    lengths = batch.mask.sum(1)
    block = model.config.block_size
    too_short = too_short_for_blocks(model)
    in_blocks = (lengths + block - 1) // block * block
    return in_parts(model, batch, torch.where(lengths <= too_short, too_short, in_blocks))


# ------------------------------------------------------------------------------------------- which one it gets


def way_of(model: Any) -> Way:
    """What `choose_way` found, or the ready mask."""
    return getattr(model, "padding_way", with_ready_mask)


@torch.no_grad()
def choose_way(model: Any, what: str, longest: int, trains: bool = True) -> None:
    """Find out how the model is to be called, by examples of at most `longest` positions.

    what: names the model for the user. Errors: UserError where it cannot compute one row, or several together, or where
    rows that share a batch change one another's outputs; and where it `trains` and cannot.
    """
    if is_known(model):
        model.padding_way = with_ready_mask
        return
    if attends_in_blocks(model):
        keep_attention(model)
    was_training = model.training
    examples = f"examples of {min(longest, max(LENGTHS))} tokens and less"
    try:
        model.eval()
        model.padding_way = find_way(model, what, examples, longest)
        if trains:
            model.train()
            check_training(model, what, examples, longest)
    finally:
        model.train(was_training)
        # The examples were short.
        fit_attention(model, longest)


def find_way(model: Any, what: str, examples: str, longest: int) -> Way:
    """The quickest way that leaves padding out. Errors: UserError; `what` and `examples` are named in it."""
    name = type(model).__name__
    try:
        rows = [real_outputs(with_own_mask(model, row), row) for row in single_rows(model, longest)]
    except Exception as error:
        # Each encoder raises its own kinds.
        raise UserError(f"{what}: {name} cannot compute {examples} ({short_reason(error)})") from error
    reference = torch.cat(rows).float()
    failure: Exception | None = None
    is_blocked = attends_in_blocks(model) and longest > too_short_for_blocks(model)
    for way in (with_equal_blocks if is_blocked else with_own_mask, without_padding):
        try:
            if leaves_padding_out(model, way, reference, longest):
                return way
        except Exception as error:
            # It wants rows of another form; the next way may give it one.
            failure = error
    if failure is not None:
        raise UserError(f"{what}: {name} cannot compute several {examples} together ({short_reason(failure)})")
    raise UserError(f"{what}: in {name} the rows of a batch change one another's outputs")


def check_training(model: Any, what: str, examples: str, longest: int) -> None:
    """Errors: UserError for a model that computes examples, but not while it trains."""
    try:
        way_of(model)(model, padded_batch(model, longest, filled=False))
    except Exception as error:
        # Each encoder raises its own kinds.
        raise UserError(f"{what}: {type(model).__name__} cannot train on {examples} ({short_reason(error)})") from error


def short_reason(error: Exception) -> str:
    """Why an encoder failed, in a part of a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def real_outputs(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The logits that are no padding's: [R, n], or [tokens, n] where every position has its own."""
    return logits if logits.dim() == 2 else logits[batch.mask.bool()]


def leaves_padding_out(model: Any, way: Way, reference: torch.Tensor, longest: int) -> bool:
    """Whether rows that share a batch give what each gives alone, and whatever stands in the padding."""
    plain = padded_batch(model, longest, filled=False)
    found = watched(model, way, plain)
    filled = watched(model, way, padded_batch(model, longest, filled=True))
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
    # As `real_outputs` gives them.
    logits: torch.Tensor
    # What the encoder gives below the head, most often [R, T, H].
    hidden: torch.Tensor


def watched(model: Any, way: Way, batch: Batch) -> Outputs:
    hidden: list[torch.Tensor] = []
    handle = model.base_model.register_forward_hook(lambda _, inputs, output: hidden.append(output[0]))
    try:
        logits = real_outputs(way(model, batch), batch).float()
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
    entries = entries_of(model.config) or SOME_ENTRIES
    ids = (7 * torch.arange(mask.numel()).view_as(mask) + 11) % entries
    # Some encoders take positions from where the id of the padding stands.
    ids = torch.where(ids == pad_id, (pad_id + 1) % entries, ids)
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
            batch = padded_batch(model, longest, filled=False)
            found = real_outputs(way_of(model)(model, batch), batch)
    except RuntimeError:
        return False
    finally:
        model.train(was_training)
        fit_attention(model, longest)
    return bool(found.isfinite().all())


def is_in_parts(model: Any) -> bool:
    """Whether a batch may take several calls of the model."""
    return way_of(model) in (with_equal_blocks, without_padding)


def notice(model: Any) -> str | None:
    """A line for the user where rows cannot be padded as usual, or None."""
    name = type(model).__name__
    if way_of(model) is with_equal_blocks:
        return (
            f"{name} attends in blocks of {model.config.block_size} tokens where an example has more than "
            f"{too_short_for_blocks(model):,}: examples of as many blocks are computed together"
        )
    if way_of(model) is without_padding:
        return (
            f"{name} lets padding into its outputs, whatever the mask says: examples of one length are "
            "computed together, without padding, which takes longer"
        )
    return None
