"""Which keys a query sees, and attention in plain PyTorch. Faster forms with the same result are in model/fast.

Shape letters: B rows, T positions, S keys (cached ones included), D head dimension, N query heads, G key/value heads.
"""

import torch
import torch.nn.functional as F


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """document_ids [B, T] -> bool [B, 1, T, T], True where a position sees another one: an earlier one of its document.

    Padding has the id -1 and sees earlier padding, so no row of the mask is empty.
    """
    T = document_ids.shape[1]
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    earlier = torch.ones(T, T, dtype=torch.bool, device=document_ids.device).tril()
    return (same & earlier).unsqueeze(1)


def visible_keys(
    padding: torch.Tensor | None, T: int, S: int, past: int | torch.Tensor, device: torch.device
) -> torch.Tensor | None:
    """padding [B, <=S] (0: padding) or None -> mask [B or 1, 1, T, S], or None where it is the plain causal one.

    Query i stands at position past + i and sees the keys up to there.
    """
    if padding is None and isinstance(past, int) and past == 0 and S == T:
        return None
    keys = torch.arange(S, device=device)
    queries = (torch.arange(T, device=device) + past).unsqueeze(1)
    mask = (keys <= queries).unsqueeze(0)
    if padding is not None:
        # A mask of the text so far is shorter than a cache of fixed size.
        missing = S - min(S, padding.shape[1])
        is_text = F.pad(padding[:, :S].bool(), (0, missing))
        # A padded query sees itself: softmax over a row without any key could give NaN.
        mask = (mask & is_text.unsqueeze(1)) | (keys == queries)
    return mask.unsqueeze(1)


def scaled_dot_product_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> torch.Tensor:
    """q [B, N, T, D], k and v [B, G, S, D] -> [B, N, T, D]; N/G query heads share one key/value head.

    mask: bool (True: visible) or additive, [B, 1, T, S]; None: plain causal.
    """
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)  # [B, N, S, D]
    v = v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)
