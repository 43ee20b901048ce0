#!/bin/sh
# torchrun on several nodes that may be lost and come back. In the repository, on each node:
#
#     HEAD=node0:29400 NODES=2 sh launch/c10d.sh --data_path /shared/my.jsonl --out_dir /shared/out
#
# HEAD       a node and a free port of it: there the launchers find each other
# NODES      how many there are; 1:2 goes on with one of two, and with both again (add --rows_per_update)
# PROCESSES  on each node; default: its GPUs
# RESTARTS   how often lost processes are replaced; default: 3
# TRAINER    default: trainer/train_pretrain.py
set -eu
: "${HEAD:?is not set: see the first lines of launch/c10d.sh}"
: "${NODES:?is not set: see the first lines of launch/c10d.sh}"

# A store for each restart: in one that is kept, processes would read addresses of others that are gone, and wait for them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes "$NODES" --nproc_per_node "${PROCESSES:-gpu}" --max_restarts "${RESTARTS:-3}" \
    --rdzv_backend c10d --rdzv_endpoint "$HEAD" --rdzv_id minimind \
    "${TRAINER:-trainer/train_pretrain.py}" --from_resume 1 "$@"
