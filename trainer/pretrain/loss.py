"""The loss of train_pretrain.py and its sums to log; docs/design.md has the formula."""

from typing import TypeVar

import torch

from dataset.batches import Batch
from dataset.packing import Totals
from model.config import ModelConfig
from model.model_minimind import MiniMindLM
from trainer.pretrain.sampled_head import HeadSampler

Count = TypeVar("Count", int, torch.Tensor)


def pretrain_loss(
    model: MiniMindLM, batch: Batch, totals: Totals, head_sampler: HeadSampler | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(a micro-batch's share of the update's loss, 0-d; sums to log, float32 [n_sums(config)]).

    The sums: cross-entropy, auxiliary loss times documents, targets, documents, and the tokens that each expert of each
    layer got. The counts of batch and totals are numbers, or 0-d tensors when CUDA graphs read them.
    head_sampler: None computes all ids of the head.
    """
    sample = None if head_sampler is None else head_sampler(batch.targets)
    cross_entropy, aux_loss = model.training_losses(
        batch.input_ids, batch.targets, batch.document_ids, batch.position_ids, sample
    )
    share_of_documents = batch.n_documents / at_least_one(totals.documents)
    loss = cross_entropy / at_least_one(totals.targets) + aux_loss * share_of_documents
    targets = filled_as(cross_entropy, batch.n_targets)
    documents = filled_as(cross_entropy, batch.n_documents)
    sums = torch.stack((cross_entropy, aux_loss * documents, targets, documents)).detach()
    if model.config.use_moe:
        sums = torch.cat((sums, model.expert_slots().flatten()))
    return loss, sums


def n_sums(config: ModelConfig) -> int:
    """Length of the sums of `pretrain_loss`."""
    if not config.use_moe:
        return 4
    return 4 + config.num_hidden_layers * config.num_experts


# ------------------------------------------------------- counts that are numbers, or tensors when CUDA graphs read them


def at_least_one(count: Count) -> Count:
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)


def filled_as(tensor: torch.Tensor, count: Count) -> torch.Tensor:
    """The count as a tensor like this one. Filled, not copied from the host, which would wait for the device."""
    return count if isinstance(count, torch.Tensor) else torch.full_like(tensor, count)
