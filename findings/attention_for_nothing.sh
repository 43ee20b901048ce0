#!/usr/bin/env bash
# torch 2.13.0, FlopCounterMode on a CPU
# One would guess: the number of operations belongs to the model, so a laptop counts what the GPU will do.
# What happens: attention through scaled_dot_product_attention counts 0 on the CPU, forward and backward. The same call counts in full on the meta
# device and with the MATH backend. No warning: the table shows the layers, and attention is not among them.
# In a run: the cost of a longer context looks linear, and a utilisation computed from it is too low, the more the longer the texts are.
# Instead: count on the meta device, or within sdpa_kernel(SDPBackend.MATH). A causal mask is counted as if there was none in both.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile torch==2.13.0
env/bin/python - <<'END'
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

heads, length, width = 2, 128, 16
product = 2 * heads * length * length * width  # operations of one of the products of a head's matrices, all heads


def count(device, causal):
    """Operations of forward and backward pass, in products of matrices: 2 and 4 by definition."""
    queries, keys, values = (torch.randn(1, heads, length, width, device=device, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        scaled_dot_product_attention(queries, keys, values, is_causal=causal).sum().backward()
    return counter.get_total_flops() / product


print("torch", torch.__version__)
for causal in (False, True):
    on_cpu, on_meta = count("cpu", causal), count("meta", causal)
    with sdpa_kernel(SDPBackend.MATH):
        by_math = count("cpu", causal)
    print(f"causal {causal}: products of matrices counted on CPU {on_cpu}, on meta {on_meta}, with MATH {by_math}")
    assert (on_cpu, on_meta, by_math) == (0, 6, 6)
END
