"""The masks in all their forms, against the rule for one query and one key."""

import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from model.config import ModelConfig
from model.masks import additive_mask, block_mask, dense_mask, first_keys


def test_every_form_is_the_rule_written_for_a_pair():
    """Bit for bit, and block for block against create_block_mask, which looks at all pairs: 15 random packings, with padding."""
    generator = torch.Generator().manual_seed(0)

    def below(n):
        return int(torch.randint(n, (), generator=generator))

    for packing in range(15):
        T = (64, 128, 511, 512, 2048)[packing] if packing < 5 else 763 - below(700)
        B = 1 + below(3)
        # From many short documents to one that fills the row
        boundary = torch.rand(B, T, generator=generator) < 0.5 ** (1 + below(12))
        document_ids = boundary.long().cumsum(1)
        document_ids[0, T - below(T) :] = -1
        first = first_keys(ModelConfig(), torch.arange(T), document_ids)
        mask = block_mask(first)

        def visible(b, head, query, key, ids=document_ids):
            return (query >= key) & (ids[b, query] == ids[b, key])

        reference = create_block_mask(visible, B, None, T, T, device="cpu")
        assert (mask.seq_lengths, mask.BLOCK_SIZE) == (reference.seq_lengths, reference.BLOCK_SIZE)
        assert sum(isinstance(value, torch.Tensor) for value in vars(reference).values()) == 8
        for name, value in vars(reference).items():
            if isinstance(value, torch.Tensor):
                ours = getattr(mask, name)
                assert torch.equal(ours, value) and ours.dtype == value.dtype, (packing, name)
        rule = create_mask(visible, B, None, T, T, device="cpu")
        assert torch.equal(create_mask(mask.mask_mod, B, None, T, T, device="cpu"), rule)
        assert torch.equal(dense_mask(first), rule)
        assert torch.equal(additive_mask(first, torch.float32), torch.zeros(rule.shape).masked_fill(~rule, -torch.inf))
