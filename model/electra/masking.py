"""Choosing and masking tokens for ELECTRA's generator.

Shapes. R: rows (examples) of a batch, T: positions of a row, K: masked positions of a row at most.
"""

from typing import NamedTuple

import numpy as np

# The label of a place in [R, K] that holds no masked position.
IGNORE = -100


def mask_count(lengths: np.ndarray | int, share: float) -> np.ndarray:
    """Positions to mask in examples of the given lengths (CLS and SEP included): max(1, round(share · length))."""
    counts: np.ndarray = np.maximum(1, np.rint(share * np.asarray(lengths)))
    return counts.astype(np.int64)


def unit_interval(bits: np.ndarray) -> np.ndarray:
    """Random bits, uint64, as numbers in [0, 1), float64: the upper 53 bits, as many as a float64 holds."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Masked(NamedTuple):
    """int64 arrays: what the generator reads [R, T], the masked positions [R, K] in rising order and the tokens that
    stood there [R, K]; places that are not used have position 0 and label -100."""

    ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


def mask_tokens(
    ids: np.ndarray,
    lengths: np.ndarray,
    candidates: np.ndarray,
    share: float,
    style: str,
    mask_id: int,
    ordinary_ids: np.ndarray,
    random: np.ndarray,
    K: int,
) -> Masked:
    """Choose and mask tokens; a Masked.

    ids: int [R, T]; lengths: int [R]; candidates: bool [R, T], where a token may be masked (no special, no padding);
    of a row with fewer of them than `mask_count` all are masked. style: "electra" writes [MASK] at 85 % of the masked
    positions and leaves the rest, "bert" writes [MASK] at 80 %, one of `ordinary_ids` at 10 %. random: uint64
    [R, T + 2 K] of random bits, so that the caller decides what they depend on.
    """
    R, T = ids.shape
    counts = np.minimum(mask_count(lengths, share), candidates.sum(1))
    # Each position gets a random key, one that is no candidate the largest there is: the smallest keys are chosen. Their
    # upper bit is cleared first, so that a candidate's key is always smaller.
    keys = np.where(candidates, random[:, :T] >> np.uint64(1), ~np.uint64(0))
    chosen = np.argpartition(keys, np.arange(min(K, T)), axis=1)[:, :K]
    is_used = np.arange(K) < counts[:, None]
    # In rising order, with the places that are not used behind them.
    positions = np.sort(np.where(is_used, chosen, T), axis=1)
    positions[~is_used] = 0
    rows = np.arange(R)[:, None]
    tokens = ids[rows, positions]
    labels = np.where(is_used, tokens, IGNORE)

    unit = unit_interval(random[:, T : T + K])
    if style == "electra":
        written = np.where(unit < 0.85, mask_id, tokens)
    else:
        ordinary = ordinary_ids[random[:, T + K : T + 2 * K] % np.uint64(len(ordinary_ids))]
        written = np.where(unit < 0.8, mask_id, np.where(unit < 0.9, ordinary, tokens))
    masked = ids.copy()
    masked[np.broadcast_to(rows, is_used.shape)[is_used], positions[is_used]] = written[is_used]
    return Masked(masked, positions, labels)
