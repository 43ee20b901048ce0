"""The compiled form of what `training_losses` computes, for micro-batches of one shape.

Everything else stays with the plain code: micro-batches of another shape (the last of an epoch: compiling for it takes
longer than the batch), evaluation, generation. The results agree to rounding.
"""

import torch

from model.attention import additive_mask, block_attention, document_mask, flex_attend, flex_mask, flex_works
from model.loss import logit_gradients
from model.products import compute_dtype


class FastPath:
    """Compiled pieces for a MiniMindForCausalLM and micro-batches [rows, positions]. One compilation serves all blocks.

    shape: (rows, positions), or None: of the first micro-batch that comes.
    """

    def __init__(self, model, shape=None):
        config, device = model.config, next(model.parameters()).device
        self.shape = shape
        self.compute = torch.compile(type(model.model.layers[0]).compute, dynamic=False)
        self.logit_gradients = torch.compile(logit_gradients, dynamic=False)
        self.attend = None  # PyTorch's SDPA
        if device.type == "cpu" and not config.dropout:
            self.attend = block_attention
        elif device.type == "cuda" and not config.dropout and flex_works(config, device):
            self.attend = flex_attend

    def serves(self, model, x):
        """Whether x, the embeddings [B, T, H], is a micro-batch to train in the shape that this was made for."""
        if not (model.training and torch.is_grad_enabled()):
            return False
        if self.shape is None:
            self.shape = tuple(x.shape[:2])
        return x.shape[:2] == self.shape

    def mask(self, x, document_ids):
        """What `attend` takes as its mask, from document_ids [B, T]."""
        if self.attend is flex_attend:
            return flex_mask(document_ids)
        visible = document_mask(document_ids)
        return additive_mask(visible, compute_dtype(x)) if self.attend is block_attention else visible
