#!/usr/bin/env bash
# torch 2.13.0, torch.set_flush_denormal on a CPU, Linux
# One would guess: it disables denormal (subnormal) numbers on the CPU, in all operations from then on.
# What happens: it holds for the thread that calls it and for worker threads that start later. Once an operation has used several threads,
# a large tensor times a number has zeros in some parts and subnormal numbers in others; if it is called first, zeros everywhere.
# In a run: the results of an element depend on where in a tensor it stands, and with N threads N - 1 stay as slow as before. That is what
# the call was for: sharp attention scores leave many subnormal probabilities, and the backward pass of attention is several times slower.
# Instead: call it before the first operation of the process.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile torch==2.13.0 numpy
for order in "before the first operation" "after the first operation"; do
    OMP_NUM_THREADS=2 env/bin/python - "$order" <<'END'
import sys

import torch

is_late = sys.argv[1].startswith("after")
torch.set_num_threads(2)
if is_late:
    torch.ones(1 << 22).sum()
assert torch.set_flush_denormal(True)
products = torch.full((1 << 22,), 2e-38) * 0.1
zeros = (products == 0).float().mean().item()
print(f"torch {torch.__version__}, two threads, set {sys.argv[1]}: {zeros:.0%} of the products are 0")
assert 0.2 < zeros < 0.9 if is_late else zeros == 1
END
done
