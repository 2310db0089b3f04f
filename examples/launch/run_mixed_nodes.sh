#!/usr/bin/env bash
# One training over nodes with different numbers of devices. Run it on every node, with the node's rank and the number
# of its devices ("gpu": all of them), and the same address and port of node 0 everywhere:
#
#   node 0, 8 GPUs:  MASTER_ADDR=node0 examples/launch/run_mixed_nodes.sh 0 gpu train.py
#   node 1, 4 GPUs:  MASTER_ADDR=node0 examples/launch/run_mixed_nodes.sh 1 gpu train.py
#
# In train.py leave the Trainer's devices and num_nodes out: the ranks are those that torchrun starts.
# On one machine without GPUs, as two emulated nodes (in two terminals, or the first with & at its end):
#
#   examples/launch/run_mixed_nodes.sh 0 2 examples/vit_digits.py --cluster examples/launch/two_and_one.yaml
#   examples/launch/run_mixed_nodes.sh 1 1 examples/vit_digits.py --cluster examples/launch/two_and_one.yaml
set -euo pipefail

if (($# < 3)); then
  echo "usage: [NODES=2] [MASTER_ADDR=host] [MASTER_PORT=29500] $0 NODE_RANK PROCESSES SCRIPT [ARGUMENT...]" >&2
  exit 2
fi
node_rank=$1 processes=$2
shift 2
# static: who is node 0 is said, not found out; torchrun adds up the nodes' processes, however many each has
exec "${PYTHON:-python}" -m torch.distributed.run \
  --rdzv-backend static \
  --nnodes "${NODES:-2}" --node-rank "$node_rank" --nproc-per-node "$processes" \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
  "$@"
