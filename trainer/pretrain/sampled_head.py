"""The head of the model for one update: a sample of the vocabulary in place of all of it.

A text of some thousand tokens holds a small part of the vocabulary, and the other ids share little probability: their sum can be
estimated from a few of them. So the softmax is computed over the targets of the update and some drawn ids (Bengio and Senécal
2008, importance sampling with a uniform proposal; Jean et al. 2015, arXiv 1412.2007).
"""

import math

import numpy as np
import torch

from dataset.arrays import Bools
from dataset.batches import Batch
from dataset.packing import permutation
from model.config import IGNORE
from model.loss import HeadSample


def target_mask(batch: Batch, vocab_size: int) -> Bools:
    """[vocab_size]: True for the ids that are targets in a batch of tensors or arrays."""
    targets = np.asarray(batch.targets)
    mask = np.zeros(vocab_size, dtype=bool)
    mask[targets[targets != IGNORE]] = True
    return mask


def sample_head(update: Batch, vocab_size: int, n_ids: int, seed: tuple[int, ...]) -> HeadSample | None:
    """`n_ids` ids for an update of all these rows. None: the whole head, where its targets leave none to draw, or n_ids are all."""
    is_target = target_mask(update, vocab_size)
    others = np.flatnonzero(~is_target)
    n_drawn = n_ids - (vocab_size - len(others))
    if not 0 < n_drawn < len(others):
        return None
    drawn = others[permutation(np.random.PCG64(seed), len(others))[:n_drawn]]
    is_used = is_target.copy()
    is_used[drawn] = True
    ids = np.flatnonzero(is_used)
    log_counts = np.where(is_target[ids], 0.0, math.log(len(others) / n_drawn)).astype(np.float32)
    positions = np.full(vocab_size, IGNORE)
    positions[ids] = np.arange(n_ids)
    return HeadSample(*map(torch.from_numpy, (ids, log_counts, positions)))
