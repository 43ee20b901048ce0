"""Drawing the tokens that the generator writes.

Shapes. M: masked positions of a batch, V: vocabulary.
"""

from collections.abc import Callable

import torch

# Tokens whose probabilities are added up first, before one of these sums is chosen.
CHUNK = 256

# logits -> (sums, highest), see add_up_chunks
AddsUpChunks = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def add_up_chunks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 sums of exp(logits - highest), each of CHUNK tokens or what is left of them; highest [M, 1]). logits: [M, V]."""
    logits = logits.float()
    highest = logits.amax(-1, keepdim=True)
    exps = (logits - highest).exp()
    M, V = logits.shape
    whole = V // CHUNK * CHUNK
    sums = exps[:, :whole].reshape(M, -1, CHUNK).sum(-1)
    return torch.cat((sums, exps[:, whole:].sum(-1, keepdim=True)), dim=1), highest


def sample(logits: torch.Tensor, how: str = "multinomial", add_up: AddsUpChunks = add_up_chunks) -> torch.Tensor:
    """One token id from softmax(logits) of each row: [M, V] -> int64 [M]. Uses torch's global random numbers.

    multinomial: by one uniform number a row and the cumulative probabilities. fp32_gumbel: the same distribution as argmax of
    logits + Gumbel noise in float32, with a random number for each token. fp16_gumbel: noise in half precision, as public
    trainers have it; it favours likely tokens (p = 0.98 is drawn as 0.9993) and is here to compare with. add_up:
    add_up_chunks, or its compiled form.
    """
    if how == "multinomial":
        return by_cumulative_sums(logits, add_up)
    dtype = torch.float16 if how == "fp16_gumbel" else torch.float32
    uniform = torch.rand(logits.shape, device=logits.device).to(dtype)
    finest = torch.finfo(dtype)
    # Neither 0 nor 1: the noise would be infinite.
    noise = -torch.log(-torch.log(uniform.clamp(finest.tiny, 1 - finest.eps / 2)))
    return (logits.to(dtype) + noise).argmax(-1)


def by_cumulative_sums(logits: torch.Tensor, add_up: AddsUpChunks) -> torch.Tensor:
    """`sample`: a place in the sum of all probabilities is drawn, then its chunk found, then its token.

    Cumulative sums are of float64, since tokens may be a million times less likely than others; so they are made of few
    numbers: of the chunks, and of the tokens of one chunk. Within its chunk a token has exactly its share. A chunk has its own
    to about 1e-7, since what is added up in it is float32.
    """
    # MPS has no float64.
    exact = torch.float32 if logits.device.type == "mps" else torch.float64
    sums, highest = add_up(logits)
    ends = running_sums(sums.to(exact))
    place = torch.rand(len(logits), 1, device=logits.device, dtype=exact) * ends[:, -1:]
    chunk = first_beyond(ends, place)
    in_chunk = sums.to(exact).gather(1, chunk)
    # From 0 to 1
    place_in_chunk = 1 - (ends.gather(1, chunk) - place) / in_chunk

    ids = chunk * CHUNK + torch.arange(CHUNK, device=logits.device)
    is_token = ids < logits.shape[1]
    exps = (logits.gather(1, ids.where(is_token, 0)).float() - highest).exp()
    inner = running_sums(torch.where(is_token, exps, 0.0).to(exact))
    return (chunk * CHUNK + first_beyond(inner, place_in_chunk * inner[:, -1:])).squeeze(1)


def running_sums(numbers: torch.Tensor) -> torch.Tensor:
    """Of each row the sums up to each place: [M, n] -> [M, n]. None is smaller than the one before it, where no number is below 0."""
    if not torch.are_deterministic_algorithms_enabled():
        return numbers.cumsum(-1)
    # On a GPU earlier versions of torch refuse theirs here, and 2.13 still lists it as refused, since it may add up in any order. A product
    # with ones up to each place adds up all columns in one order, and adds a 0 where another column adds a number.
    n = numbers.shape[-1]
    return numbers @ torch.ones(n, n, dtype=numbers.dtype, device=numbers.device).triu()


def first_beyond(cumulative: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Index of the first cumulative sum above `place`. If rounding leaves none: the last index at which the sum grew, so a token of
    probability 0 is never drawn. cumulative: [M, n]; place: [M, 1] -> int64 [M, 1]."""
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, place, right=True), last)
