"""The plain MiniMind loop, the reference that speed and learning are compared with: tokenise each item when it is asked
for, pad it to the full length, fp32 on the CPU, eager, AdamW, one forward with all logits.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from common.errors import UserError
from dataset.lm_dataset import PretrainDataset
from model.model_minimind import MiniMindForCausalLM
from trainer.optim.schedules import get_lr


def step_context(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context of one step's forward pass: bf16 on a GPU, fp32 elsewhere.

    One context around the whole loop would keep the half-precision copies of the weights that the first step made, and
    every later step would compute with the weights of the start.
    """
    if device.type == "cuda":
        return torch.autocast("cuda", torch.bfloat16)
    return contextlib.nullcontext()


def plain_steps(
    model: MiniMindForCausalLM,
    dataset: PretrainDataset,
    batch_size: int,
    updates: int,
    lr: float,
    seed: int = 42,
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[tuple[float, int]]:
    """Train `updates` micro-batches of `batch_size` padded rows; yields (loss, text tokens) of each.

    context: makes the context of a step's forward pass. Errors: UserError where the documents are less than a batch.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=False, foreach=False)
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(dataset, batch_size, shuffle=True, drop_last=True, generator=generator)
    if len(dataset) < batch_size:
        raise UserError(f"{len(dataset)} documents are less than a batch of {batch_size}: give more, or fewer rows")
    # As many epochs as it takes.
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, batch in zip(range(updates), batches, strict=False):
        inputs, targets, mask = (part.to(device) for part in batch)
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, updates, lr)
        with context():
            output = model(inputs)
            losses = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="none")
            loss = (losses * mask.flatten()).sum() / mask.sum() + output.aux_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item(), int(mask.sum())
