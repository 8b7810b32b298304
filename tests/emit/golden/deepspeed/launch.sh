#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# the plan counts live bytes: segments that grow keep what the caching allocator reserves close to that (torch before 2.9: PYTORCH_CUDA_ALLOC_CONF)
export PYTORCH_ALLOC_CONF=expandable_segments:True
# the optimizer steps on the CPU; torchrun's default of one thread would make it the slowest part
export OMP_NUM_THREADS=8
# a link or peer that fails is named in the log
export NCCL_DEBUG=WARN
# PyTorch's flight recorder keeps the last collectives: when a node hangs, the dump says which rank never came (older torch: TORCH_NCCL_TRACE_BUFFER_SIZE)
export TORCH_FR_BUFFER_SIZE=2000
# DeepSpeedCPUAdam is compiled on first use: a toolkit of another minor version than torch's would refuse
export DS_SKIP_CUDA_CHECK=1

: "${HEAD_NODE:?set HEAD_NODE to the address of the first node and run this script on every node}"

torchrun \
  --nnodes 2 \
  --nproc-per-node 8 \
  --rdzv-id trainwright \
  --rdzv-backend c10d \
  --rdzv-endpoint "$HEAD_NODE:29500" \
  train.py \
  --deepspeed \
  --deepspeed_config ds_config.json
