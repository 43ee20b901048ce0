#!/bin/sh
# torchrun on several nodes with fixed numbers. Nothing restarts by itself: after a failure start it again on all nodes.
# In the repository, on each node:
#
#     HEAD=node0 PORT=29500 NODES=2 NODE=0 sh launch/static.sh --data_path /shared/my.jsonl --out_dir /shared/out
#
# HEAD, PORT  node 0 and a free port on it
# NODES       number of nodes
# NODE        number of this node, from 0
# PROCESSES   per node; default: its GPUs (needed without any)
# TRAINER     default: trainer/train_pretrain.py
set -eu
: "${HEAD:?is not set: see the first lines of launch/static.sh}"
: "${PORT:?is not set: see the first lines of launch/static.sh}"
: "${NODES:?is not set: see the first lines of launch/static.sh}"
: "${NODE:?is not set: see the first lines of launch/static.sh}"

# Seconds that torchrun waits for the save after a request to stop (its default: 30)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}"

exec torchrun --nnodes "$NODES" --node_rank "$NODE" --nproc_per_node "${PROCESSES:-gpu}" \
    --master_addr "$HEAD" --master_port "$PORT" \
    "${TRAINER:-trainer/train_pretrain.py}" --from_resume 1 "$@"
