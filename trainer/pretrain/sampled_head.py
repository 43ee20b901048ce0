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

# Rows in which ids are counted, spread over the first pass; fewer if they are longer than 2,048 positions, for less memory
COUNTED_ROWS, COUNTED_POSITIONS = 1000, 2**21
# power of an id's frequency by which it is drawn
POWER = 0.5


def rows_targets(corpus: Corpus) -> Ints:
    """int64 [R, T]: targets of some rows of a corpus, the same in each run on it."""
    plan = corpus.plan(0)
    n_rows = min(COUNTED_ROWS, plan.n_rows, max(1, COUNTED_POSITIONS // plan.T))
    rows = np.linspace(0, plan.n_rows - 1, n_rows).astype(np.int64)
    return np.asarray(corpus.assembler().arrays(plan.recipe(rows)).targets)


class HeadSampler:
    """Draws the ids of each row. A row always draws the same: micro-batches and ranks change nothing, and a resume draws as the run did.

    targets: of `rows_targets`. n_ids: of a row, its targets included; one with as many targets takes more. tells: of such a row, once. Errors: UserError.
    """

    def __init__(self, targets: Ints, vocab_size: int, n_ids: int, seed: int, tells: bool = False) -> None:
        if n_ids >= vocab_size:
            raise UserError(f"--sampled_softmax {n_ids}: the vocabulary has {vocab_size} ids; give fewer, or 0 for all")
        counts = np.bincount(targets[targets != IGNORE], minlength=vocab_size)
        self.weights = (counts + 1.0) ** POWER
        # A row looks only at the ids of large priorities, in a trial half as many again as it takes: it takes longer to divide and to
        # order all entries of a large vocabulary than to draw their numbers.
        priorities = self.weights / (np.random.default_rng(seed).random(vocab_size) + 2.0**-53)
        least = np.sort(priorities)[-min(vocab_size, n_ids + n_ids // 2)]
        self.highest = np.minimum(self.weights / least * 2.0**64, np.nextafter(2.0**64, 0)).astype(np.uint64)
        self.n_ids = n_ids
        self.seed = seed
        self.tells = tells

    def __call__(self, targets: torch.Tensor) -> HeadSample:
        """targets: of a micro-batch [B, T]."""
        samples = [self._sample(row) for row in targets.cpu().numpy()]
        sizes = [len(ids) for ids, _, _ in samples]
        if self.tells and max(sizes) > self.n_ids:
            self.tells = False
            announce(
                f"warning: --sampled_softmax {self.n_ids} is too few for the targets of a row, which takes {max(sizes):,} ids; FLOP are counted without"
            )
        flat = [torch.from_numpy(np.concatenate(each)).to(targets.device) for each in zip(*samples, strict=True)]
        return HeadSample(flat[0], flat[1], flat[2].view(targets.shape), sizes)

    def _sample(self, targets: Ints) -> tuple[Ints, np.ndarray, Ints]:
        """targets [T] -> a row of each field of HeadSample."""
        has_target = targets != IGNORE
        own = np.unique(targets[has_target])
        # Where the targets leave no id to draw, as many again are drawn.
        n_ids = self.n_ids if len(own) < self.n_ids else 2 * len(own)
        if n_ids >= len(self.weights):
            return np.arange(len(self.weights)), np.zeros(len(self.weights), np.float32), targets
        bits = np.random.PCG64((self.seed, zlib.crc32(targets.tobytes())))
        # raw bits, since numpy guarantees only these across versions
        numbers = bits.random_raw(len(self.weights))
        may_be_drawn = numbers <= self.highest
        may_be_drawn[own] = True
        some = np.flatnonzero(may_be_drawn)
        if len(some) <= n_ids:
            some = np.arange(len(self.weights))
        # divided by numbers in (0, 1]
        priorities = self.weights[some] / (((numbers[some] >> 11) + 1.0) * 2.0**-53)
        priorities[np.searchsorted(some, own)] = np.inf
        order = np.argpartition(-priorities, n_ids)
        threshold = priorities[order[n_ids]]
        ids = some[np.sort(order[:n_ids])]
        log_counts = np.log(np.maximum(threshold / self.weights[ids], 1.0)).astype(np.float32)
        positions = np.searchsorted(ids, targets)
        log_counts[positions[has_target]] = 0.0
        return ids, log_counts, np.where(has_target, positions, IGNORE)
