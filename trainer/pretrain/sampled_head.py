"""The head of the model in training: for each row a sample of the vocabulary in place of all of it.

A row of some hundred tokens holds a small part of the vocabulary, and the other ids share little probability: their sum can be
estimated from a few of them. So the softmax is computed over the row's own targets and some drawn ids (Bengio and Senécal 2008,
importance sampling; Jean et al. 2015, arXiv 1412.2007). Frequent ids are drawn more often, by priority sampling, which gives a
fixed number of ids and the exact sum on average (Duffield, Lund and Thorup 2007, J. ACM 54(6)).
"""

import zlib

import numpy as np
import torch

from common.errors import UserError
from common.wording import announce
from dataset.arrays import Ints
from dataset.corpus import Corpus
from model.config import IGNORE
from model.loss import HeadSample

# Rows in which ids are counted, spread over the first pass
COUNTED_ROWS = 1000
# power of an id's frequency by which it is drawn
POWER = 0.5


def rows_targets(corpus: Corpus) -> Ints:
    """int64 [R, T]: targets of some rows of a corpus, the same in each run on it."""
    plan = corpus.plan(0)
    rows = np.linspace(0, plan.n_rows - 1, min(COUNTED_ROWS, plan.n_rows)).astype(np.int64)
    return np.asarray(corpus.assembler().arrays(plan.recipe(rows)).targets)


class HeadSampler:
    """Draws the ids of each row. A row always draws the same: micro-batches and ranks change nothing, and a resume draws as the run did.

    targets: of `rows_targets`. n_ids: of a row, its targets included. tells: of a row with too many targets, once. Errors: UserError.
    """

    def __init__(self, targets: Ints, vocab_size: int, n_ids: int, seed: int, tells: bool = False) -> None:
        if n_ids >= vocab_size:
            raise UserError(f"--sampled_softmax {n_ids}: the vocabulary has {vocab_size} ids; give fewer, or 0 for all")
        counts = np.bincount(targets[targets != IGNORE], minlength=vocab_size)
        self.weights = (counts + 1.0) ** POWER
        self.n_ids = n_ids
        self.seed = seed
        self.tells = tells

    def __call__(self, targets: torch.Tensor) -> HeadSample | None:
        """targets: of a micro-batch [B, T]. None: the whole head, where a row's targets leave no id to draw."""
        samples = [self._sample(row) for row in targets.cpu().numpy()]
        known = [sample for sample in samples if sample is not None]
        if len(known) < len(samples):
            if self.tells:
                self.tells = False
                announce(
                    f"warning: --sampled_softmax {self.n_ids} is too few for the targets of a row; its micro-batch computes all ids, as "
                    "will others like it; FLOP are counted as if it did not"
                )
            return None
        return HeadSample(*(torch.from_numpy(np.stack(each)).to(targets.device) for each in zip(*known, strict=True)))

    def _sample(self, targets: Ints) -> tuple[Ints, np.ndarray, Ints] | None:
        """targets [T] -> a row of each field of HeadSample."""
        has_target = targets != IGNORE
        own = targets[has_target]
        bits = np.random.PCG64((self.seed, zlib.crc32(targets.tobytes())))
        # in (0, 1]; raw bits, since numpy guarantees only these across versions
        uniform = ((bits.random_raw(len(self.weights)) >> 11) + 1.0) * 2.0**-53
        priorities = self.weights / uniform
        priorities[own] = np.inf
        order = np.argpartition(-priorities, self.n_ids)
        threshold = priorities[order[self.n_ids]]
        if priorities[order[: self.n_ids]].min() == np.inf:
            return None
        ids = np.sort(order[: self.n_ids])
        log_counts = np.log(np.maximum(threshold / self.weights[ids], 1.0)).astype(np.float32)
        positions = np.searchsorted(ids, targets)
        log_counts[positions[has_target]] = 0.0
        return ids, log_counts, np.where(has_target, positions, IGNORE)
