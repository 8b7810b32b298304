#!/usr/bin/env bash
set -euo pipefail
# to be run in the folder of the engine's own checkout

# the plan counts live bytes: segments that grow keep what the caching allocator reserves close to that (torch before 2.9: PYTORCH_CUDA_ALLOC_CONF)
export PYTORCH_ALLOC_CONF=expandable_segments:True
# one process a GPU: threads of the data loader and of the host code do not contend
export OMP_NUM_THREADS=1
# a link or peer that fails is named in the log
export NCCL_DEBUG=WARN
# PyTorch's flight recorder keeps the last collectives: when a node hangs, the dump says which rank never came (older torch: TORCH_NCCL_TRACE_BUFFER_SIZE)
export TORCH_FR_BUFFER_SIZE=2000
# one hardware queue: a collective is launched before the product that hides it (Megatron-Core demands it below Blackwell)
export CUDA_DEVICE_MAX_CONNECTIONS=1

: "${HEAD_NODE:?set HEAD_NODE to the address of the first node and run this script on every node}"

torchrun \
  --nnodes 2 \
  --nproc-per-node 8 \
  --rdzv-id trainwright \
  --rdzv-backend c10d \
  --rdzv-endpoint "$HEAD_NODE:29500" \
  pretrain_gpt.py \
  --num-layers 32 \
  --hidden-size 4096 \
  --ffn-hidden-size 14336 \
  --num-attention-heads 32 \
  --seq-length 4096 \
  --max-position-embeddings 131072 \
  --tokenizer-type NullTokenizer \
  --vocab-size 128256 \
  --position-embedding-type rope \
  --normalization RMSNorm \
  --swiglu \
  --disable-bias-linear \
  --rotary-base 500000 \
  --use-rope-scaling \
  --rope-scaling-factor 8.0 \
  --untie-embeddings-and-output-weights \
  --kv-channels 128 \
  --group-query-attention \
  --num-query-groups 8 \
  --tensor-model-parallel-size 4 \
  --pipeline-model-parallel-size 2 \
  --context-parallel-size 1 \
  --micro-batch-size 1 \
  --global-batch-size 64 \
  --sequence-parallel \
  --use-distributed-optimizer \
  --overlap-grad-reduce \
  --overlap-param-gather \
  --recompute-granularity selective \
  --recompute-modules core_attn \
  --attention-backend flash \
  --transformer-impl transformer_engine \
  --bf16 \
  --accumulate-allreduce-grads-in-fp32 \
  --attention-dropout 0.0 \
  --hidden-dropout 0.0 \
  --train-iters 3815 \
  --optimizer adam \
  --lr 0.0003 \
  --min-lr 3e-05 \
  --lr-decay-style cosine \
  --lr-warmup-iters 38 \
  --weight-decay 0.1 \
  --clip-grad 1.0 \
  --mock-data \
  --split 99,1,0 \
  --save outputs \
  --load outputs \
  --save-interval 500 \
  --ckpt-format torch_dist \
  --exit-signal-handler \
  --log-interval 10 \
  --log-throughput \
  --eval-iters 0 \
  --distributed-timeout-minutes 30 \
  --adam-beta1 0.9 \
  --adam-beta2 0.95
