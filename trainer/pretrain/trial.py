"""One micro-batch that is computed and thrown away, to find out whether it fits a GPU."""

import torch

from dataset.loader import Batch
from dataset.packing import Totals
from model.model_minimind import MiniMindForCausalLM
from trainer.machine.devices import autocast
from trainer.machine.limits import is_out_of_memory
from trainer.pretrain.loss import pretrain_loss


def fits(
    model: MiniMindForCausalLM,
    batch: Batch,
    totals: Totals,
    device: torch.device,
    dtype: torch.dtype,
    optimizer_states: int,
) -> bool:
    """Whether a GPU has the memory for a micro-batch in the midst of an update. Nothing of it is left.

    It is computed by the plain code, which takes no less than the compiled one: what fits here fits the run. That is so by
    the formula of memory.py (test_plain_code_takes_no_less_than_compiled_code), and the formula was measured for both
    (test_the_estimate_is_within_a_fifth_of_the_measured_peak); both tests are in tests/trainer/pretrain/test_memory.py.
    optimizer_states: bytes that the optimiser will keep. Errors: whatever goes wrong, but for an allocation that fails.
    """
    fitted = True
    with torch.random.fork_rng(devices=[device]):
        try:
            _compute(model, batch, totals, device, dtype, optimizer_states)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fitted = False
    # Behind the block: within it the error holds the tensors that filled the memory.
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    # What the log tells as the peak is that of the run.
    torch.cuda.reset_peak_memory_stats(device)
    return fitted


def _compute(
    model: MiniMindForCausalLM,
    batch: Batch,
    totals: Totals,
    device: torch.device,
    dtype: torch.dtype,
    optimizer_states: int,
) -> None:
    """Forward and backward pass, beside what is there at a later micro-batch of a later update."""
    states = torch.empty(optimizer_states, dtype=torch.uint8, device=device)
    # The first micro-batch of an update makes the gradients, each when its layer's activations are freed already. From the
    # second on they stand beside all activations, which takes more. Made here, they do in this one.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with autocast(device, dtype):
        loss, _ = pretrain_loss(model, batch.to(device), totals)
    loss.backward()
    del states
