#!/usr/bin/env bash
# torch 2.13.0, numbers of a weight or gradient under FSDP2 (fully_shard)
# One would guess: .item() of a number computed from a sharded tensor is the number of the whole tensor, or of the own part, for all functions alike.
# What happens: norm, max, sum and mean come back as tensors that are not yet reduced over the ranks, and .item() and float() read the own part of
# it. std is reduced before, pow(2).sum().sqrt() and the norm that clip_grad_norm_ returns are whole too.
# In a run: logged norms are too small (with two ranks by a third) and others on each rank; a step that is skipped beyond a threshold is skipped
# by some ranks only. On one process all is right.
# Instead: .full_tensor().item(), on all ranks.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > run.py <<'END'
import os

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def rank(number, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=number, world_size=2)
    torch.manual_seed(0)
    net = torch.nn.Linear(16, 8, bias=False)
    whole = net.weight.detach().clone()
    own = whole.chunk(2)[number]
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    weight = net.weight.detach()
    norm, deviation, root = weight.norm(), weight.std(), weight.pow(2).sum().sqrt()
    net(torch.ones(1, 16)).pow(2).sum().backward()
    clipped = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)
    print(f"rank {number}: norm().item() {norm.item():.4f}, whole {whole.norm():.4f}, own part {own.norm():.4f}; std {deviation.item():.4f}")
    print(f"rank {number}: clip_grad_norm_ {clipped.item():.4f}, full {clipped.full_tensor().item():.4f}")
    close = torch.testing.assert_close
    close(norm.item(), own.norm().item(), atol=1e-4, rtol=0)
    close(norm.full_tensor().item(), whole.norm().item(), atol=1e-4, rtol=0)
    close(deviation.item(), whole.std().item(), atol=1e-4, rtol=0)
    close(root.item(), whole.norm().item(), atol=1e-4, rtol=0)
    close(clipped.item(), clipped.full_tensor().item(), atol=1e-4, rtol=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    torch.multiprocessing.spawn(rank, args=(os.path.abspath("meet"),), nprocs=2)
END
env/bin/python run.py
