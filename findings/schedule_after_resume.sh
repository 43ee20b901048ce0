#!/usr/bin/env bash
# torch 2.13.0, SequentialLR (warm-up, then cosine) in a resumed run
# One would guess: once optimizer and schedule have their saved states back, the run goes on with its rate, in whatever order they got them.
# What happens: building SequentialLR sets the rate of the optimizer to the first one of the warm-up, and the schedule's saved state does
# not set it back. If the optimizer got its state before the schedule was built, the run starts at the warm-up's rate; the cosine
# is computed from the last rate, so all others are too low by the same factor.
# In a run: a resume at half of the way with a warm-up from a tenth trains the rest at a sixth of its rate. The loss looks calm.
# Instead: build optimizer and schedule first, then load both; or compare the rate before and after.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile torch==2.13.0
env/bin/python - <<'END'
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR


def make_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def make_schedule(optimizer):
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=10)
    return SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, T_max=90)], milestones=[10])


def rates(optimizer, schedule, updates):
    found = []
    for _ in range(updates):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


optimizer = make_optimizer()
schedule = make_schedule(optimizer)
rates(optimizer, schedule, 50)
saved = optimizer.state_dict(), schedule.state_dict()
saved = {"optimizer": saved[0], "schedule": dict(saved[1])}
torch.save(saved, "state.pt")
uninterrupted = rates(optimizer, schedule, 50)

saved = torch.load("state.pt", weights_only=False)
late = make_optimizer()
late_schedule = make_schedule(late)
late.load_state_dict(saved["optimizer"])
late_schedule.load_state_dict(saved["schedule"])

saved = torch.load("state.pt", weights_only=False)
early = make_optimizer()
early.load_state_dict(saved["optimizer"])
early_schedule = make_schedule(early)
early_schedule.load_state_dict(saved["schedule"])

both_built_first, loaded_first = rates(late, late_schedule, 50), rates(early, early_schedule, 50)
print("torch", torch.__version__, "rates of updates 51, 52, 75")
for name, found in ("uninterrupted", uninterrupted), ("built, then loaded", both_built_first), ("loaded before built", loaded_first):
    print(name, *(f"{found[i]:.4f}" for i in (0, 1, 24)))
assert both_built_first == uninterrupted
assert all(abs(low / rate - 0.1 / uninterrupted[0]) < 1e-6 for low, rate in zip(loaded_first, uninterrupted))
END
