#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# the plan counts live bytes: segments that grow keep what the caching allocator reserves close to that (torch before 2.9: PYTORCH_CUDA_ALLOC_CONF)
export PYTORCH_ALLOC_CONF=expandable_segments:True
# one process a GPU: threads of the data loader and of the host code do not contend
export OMP_NUM_THREADS=1
# a link or peer that fails is named in the log
export NCCL_DEBUG=WARN
# PyTorch's flight recorder keeps the last collectives: when a node hangs, the dump says which rank never came (older torch: TORCH_NCCL_TRACE_BUFFER_SIZE)
export TORCH_FR_BUFFER_SIZE=2000

: "${HEAD_NODE:?set HEAD_NODE to the address of the first node and run this script on every node}"

torchrun \
  --nnodes 2 \
  --nproc-per-node 8 \
  --rdzv-id trainwright \
  --rdzv-backend c10d \
  --rdzv-endpoint "$HEAD_NODE:29500" \
  -m torchtitan.train \
  --module plan_config \
  --config plan \
  --training.local-batch-size 16 \
  --training.global-batch-size 64 \
  --training.seq-len 4096 \
  --training.steps 3815 \
  --training.dtype float32 \
  --training.mixed-precision-param bfloat16 \
  --training.mixed-precision-reduce float32 \
  --training.no-enable-cpu-offload \
  --training.max-norm 1.0 \
  --training.disable-cuda-graphs \
  --parallelism.data-parallel-replicate-degree 1 \
  --parallelism.data-parallel-shard-degree 4 \
  --parallelism.tensor-parallel-degree 2 \
  --parallelism.pipeline-parallel-degree 2 \
  --parallelism.context-parallel-degree 1 \
  --parallelism.expert-parallel-degree 1 \
  --parallelism.fsdp-reshard-after-forward always \
  --parallelism.pipeline-parallel-schedule 1F1B \
  --parallelism.pipeline-parallel-microbatch-size 1 \
  --parallelism.no-enable-sequence-parallel \
  --compile.no-enable \
  --optimizer.implementation fused \
  --checkpoint.enable \
  --checkpoint.interval 500 \
  --dump-folder outputs \
  activation-checkpoint:selective
