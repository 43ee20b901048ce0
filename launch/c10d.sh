#!/bin/sh
# torchrun on several nodes that may fail and return. In the repository, on each node:
#
#     HEAD=node0:29400 NODES=2 sh launch/c10d.sh --data_path /shared/my.jsonl --out_dir /shared/out
#
# HEAD       rendezvous: a node and a free port on it
# NODES      number of nodes; 1:2 continues with one of two, and with both again (add --rows_per_update)
# PROCESSES  per node; default: its GPUs (needed without any)
# RESTARTS   maximum restarts of the processes of all nodes; default: 3
# RUN_ID     name of the run, needed if two runs share a HEAD; default: minimind
# TRAINER    default: trainer/train_pretrain.py
set -eu
: "${HEAD:?is not set: see the first lines of launch/c10d.sh}"
: "${NODES:?is not set: see the first lines of launch/c10d.sh}"

# A new store for each restart: in a shared one, processes would read addresses of lost ones and wait for them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# Seconds that torchrun waits for the save after a request to stop (its default: 30)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}"

exec torchrun --nnodes "$NODES" --nproc_per_node "${PROCESSES:-gpu}" --max_restarts "${RESTARTS:-3}" \
    --rdzv_backend c10d --rdzv_endpoint "$HEAD" --rdzv_id "${RUN_ID:-minimind}" \
    "${TRAINER:-trainer/train_pretrain.py}" --from_resume 1 "$@"
