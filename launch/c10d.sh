#!/bin/sh
# torchrun on several nodes that may be lost and come back. In the repository, on each node:
#
#     HEAD=node0:29400 NODES=2 sh launch/c10d.sh --data_path /shared/my.jsonl --out_dir /shared/out
#
# HEAD       a node and a free port of it: there the launchers find each other
# NODES      how many there are; 1:2 goes on with one of two, and with both again (add --rows_per_update)
# PROCESSES  on each node; default: its GPUs
# RESTARTS   how often the processes of all nodes are started again, whichever of them was lost; default: 3
# RUN_ID     a name of the run, where two runs meet at one HEAD; default: minimind
# TRAINER    default: trainer/train_pretrain.py
set -eu
: "${HEAD:?is not set: see the first lines of launch/c10d.sh}"
: "${NODES:?is not set: see the first lines of launch/c10d.sh}"

# A store for each restart: in one that is kept, processes would read addresses of others that are gone, and wait for them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# How long torchrun waits for the save after a request to stop, in place of 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}"

exec torchrun --nnodes "$NODES" --nproc_per_node "${PROCESSES:-gpu}" --max_restarts "${RESTARTS:-3}" \
    --rdzv_backend c10d --rdzv_endpoint "$HEAD" --rdzv_id "${RUN_ID:-minimind}" \
    "${TRAINER:-trainer/train_pretrain.py}" --from_resume 1 "$@"
