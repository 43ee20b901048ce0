#!/usr/bin/env bash
# torch 2.13.0, torch.autocast
# One would guess: one autocast around the whole training loop does the same as one around each forward pass.
# What happens: autocast keeps the bf16 copy of each weight until the outermost region ends, even if that one is switched off by enabled=False.
# Every later forward pass takes the copy of the first one, so updates change nothing that is computed: the loss on a fixed batch stays the same
# to the last bit.
# In a run: with new batches the loss only jitters, as with a rate that is too low; the saved fp32 weights have moved all the same.
# Instead: one region for each forward pass and loss with none around it, closed before optimizer.step(), or cache_enabled=False.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile torch==2.13.0
env/bin/python - <<'END'
import contextlib

import torch


def losses(around_the_loop, **options):
    """Losses of 100 updates on one batch, each with its own region."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(64, 16), torch.randint(4, (64,))
    before = model[0].weight.detach().clone()
    found = []
    with around_the_loop:
        for _ in range(100):
            with torch.autocast("cpu", torch.bfloat16, **options):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert (model[0].weight - before).abs().mean() > 0.01
    return found


print("torch", torch.__version__)
region = torch.autocast("cpu", torch.bfloat16)
switched_off = torch.autocast("cpu", torch.bfloat16, enabled=False)
for around, found, learns in (
    ("nothing", losses(contextlib.nullcontext()), True),
    ("a region", losses(region), False),
    ("a region that is off", losses(switched_off), False),
    ("a region, cache_enabled=False", losses(region, cache_enabled=False), True),
):
    print(f"around the loop {around}: losses of updates 1, 2, 100: {found[0]:.4f} {found[1]:.4f} {found[-1]:.4f}")
    assert found[-1] < 0.1 * found[0] if learns else len(set(found)) == 1
END
