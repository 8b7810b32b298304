"""One small file a format, and what it must be understood to say."""

# ruff: noqa: E501  - the lines are those of the files

from __future__ import annotations

from typing import Any

# format: (file name, text, {field: value})
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepspeed": (
        "ds.json",
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": true},\n'
        ' "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "reduce_bucket_size": 5e8}, "gradient_clipping": 1.0}',
        {
            "strategy.framework": "deepspeed", "strategy.sharding": "zero3", "strategy.offload": "params-cpu", "training.precision": "bf16",
            "training.global_batch_size": 64, "strategy.micro_batch_size": 2, "training.accumulation": 4, "training.clip": 1.0,
        },
    ),
    "accelerate": (
        "config.yaml",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_machines: 2\nnum_processes: 16\nmixed_precision: bf16\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n  fsdp_offload_params: false\n  fsdp_activation_checkpointing: true\n",
        {
            "launch.nodes": 2, "launch.world_size": 16, "launch.gpus_per_node": 8, "strategy.framework": "fsdp2", "strategy.sharding": "zero3",
            "strategy.offload": "none", "strategy.recompute": "full", "training.precision": "bf16",
        },
    ),
    "trainer": (
        "args.yaml",
        "output_dir: out\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nlearning_rate: 2e-5\nbf16: true\nmax_steps: 500\n"
        "gradient_checkpointing: true\nsave_steps: 100\nddp_timeout: 1800\n",
        {
            "strategy.micro_batch_size": 4, "training.accumulation": 2, "training.learning_rate": 2e-5, "training.precision": "bf16",
            "training.steps": 500, "strategy.recompute": "full", "launch.timeout_s": 1800, "strategy.framework": "ddp",
        },
    ),
    "trl": (
        "sft.yaml",
        "model_name_or_path: meta-llama/Llama-3.1-8B\ntorch_dtype: bfloat16\nattn_implementation: flash_attention_2\nmax_length: 4096\npacking: true\n"
        "use_peft: true\nload_in_4bit: true\nlora_r: 32\nper_device_train_batch_size: 1\nlearning_rate: 1.0e-4\noutput_dir: out\nfsdp: full_shard auto_wrap\n",
        {
            "model.name": "meta-llama/Llama-3.1-8B", "training.seq_len": 4096, "training.packing": True, "training.method": "qlora",
            "training.lora_rank": 32, "strategy.attention": "flash", "strategy.framework": "fsdp1", "strategy.sharding": "zero3",
        },
    ),
    "megatron": (
        "run.sh",
        "torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --swiglu \\\n"
        "  --micro-batch-size 1 --global-batch-size 256 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 \\\n"
        "  --bf16 --use-distributed-optimizer --recompute-granularity full --recompute-num-layers 2 --distributed-timeout-minutes 30 --train-iters 1000\n",
        {
            "strategy.framework": "megatron", "strategy.tp": 2, "strategy.pp": 4, "strategy.virtual_stages": 2, "strategy.sharding": "zero1",
            "strategy.recompute": "full", "strategy.recompute_every": 2, "training.global_batch_size": 256, "training.seq_len": 4096,
            "training.precision": "bf16", "model.hidden_size": 4096, "launch.gpus_per_node": 8, "launch.nodes": 4, "launch.timeout_s": 1800,
        },
    ),
    "torchrun": ("run.sh", "torchrun --nnodes=2:4 --nproc-per-node=8 train.py\n", {"launch.nodes": 4, "launch.gpus_per_node": 8}),
    "slurm": (
        "job.sbatch", "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --gres=gpu:a100:8\n#SBATCH --constraint=a100\nexport CUDA_VISIBLE_DEVICES=0,1\nsrun python t.py --lr 1\n",
        {"launch.nodes": 4, "launch.gpus_per_node": 8, "cluster.constraint": "a100", "launch.visible_gpus": 2},
    ),
    "shell": ("run.sh", "#!/bin/bash\nexport CUDA_VISIBLE_DEVICES=0,1,2,3\n", {"launch.visible_gpus": 4}),
    "program": ("run.sh", "python mine.py --batch-size 4 --lr 3e-4 --model gpt2\n", {"training.learning_rate": 3e-4}),
    "openrlhf": (
        "run.sh", "deepspeed train_sft.py --pretrain mistralai/Mistral-7B-v0.1 --micro_train_batch_size 2 --train_batch_size 128 --zero_stage 2 --max_len 2048 --bf16\n",
        {"strategy.sharding": "zero2", "strategy.micro_batch_size": 2, "training.global_batch_size": 128, "training.seq_len": 2048, "training.precision": "bf16"},
    ),
    "torchtitan": (
        "train.toml",
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nseq_len = 8192\nsteps = 1000\nmax_norm = 1.0\n'
        '[parallelism]\ntensor_parallel_degree = 2\ndata_parallel_shard_degree = -1\n[activation_checkpoint]\nmode = "selective"\n[compile]\nenable = true\n',
        {
            "strategy.tp": 2, "strategy.micro_batch_size": 2, "training.seq_len": 8192, "training.steps": 1000, "strategy.recompute": "selective",
            "strategy.compile": True, "strategy.framework": "fsdp2", "model.flavor": "8B",
        },
    ),
    "kubernetes": (
        "job.yaml",
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: a}\nspec:\n  pytorchReplicaSpecs:\n    Master:\n      replicas: 1\n      template: &t\n        spec:\n"
        '          containers:\n          - name: pytorch\n            image: x\n            command: [torchrun, --nproc_per_node=8, train.py]\n            args: ["--lr", "1"]\n'
        "            resources: {limits: {nvidia.com/gpu: 8}}\n    Worker:\n      replicas: 3\n      template: *t\n",
        {"launch.nodes": 4, "launch.gpus_per_node": 8},
    ),
    "skypilot": (
        "task.yaml",
        "resources:\n  accelerators: H100:8\nnum_nodes: 2\nenvs:\n  LR: 2e-5\nrun: |\n  torchrun --nnodes=$SKYPILOT_NUM_NODES --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE \\\n"
        "    train.py --learning_rate $LR --output_dir out --per_device_train_batch_size 4\n",
        {"cluster.gpu": "H100", "launch.nodes": 2, "launch.gpus_per_node": 8, "training.learning_rate": 2e-5, "strategy.micro_batch_size": 4},
    ),
    "axolotl": (
        "lora.yml",
        "base_model: NousResearch/Llama-3.2-1B\nsequence_len: 2048\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\ndatasets:\n  - path: x\nadapter: qlora\nload_in_4bit: true\n"
        "lora_r: 16\noptimizer: adamw_bnb_8bit\nlearning_rate: 2e-4\nbf16: auto\nsample_packing: true\nfsdp_version: 2\nfsdp_config:\n  offload_params: true\n",
        {
            "strategy.micro_batch_size": 2, "training.accumulation": 4, "training.seq_len": 2048, "training.optimizer": "adam8bit", "training.method": "qlora",
            "training.learning_rate": 2e-4, "strategy.framework": "fsdp2", "strategy.offload": "params-cpu", "training.packing": True,
        },
    ),
    "llama_factory": (
        "sft.yaml",
        "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\ndo_train: true\nfinetuning_type: full\ndeepspeed: examples/deepspeed/ds_z3_config.json\ntemplate: qwen\ncutoff_len: 4096\n"
        "output_dir: out\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-5\nbf16: true\n",
        {
            "training.seq_len": 4096, "strategy.micro_batch_size": 1, "strategy.framework": "deepspeed", "strategy.sharding": "zero3", "strategy.recompute": "full",
            "model.name": "Qwen/Qwen2.5-7B",
        },
    ),
    "gpt_neox": (
        "6-7B.yml",
        '{\n  # sizes\n  "pipe-parallel-size": 2,\n  "model-parallel-size": 4,\n  "num-layers": 32,\n  "hidden-size": 4096,\n  "num-attention-heads": 32,\n  "seq-length": 2048,\n'
        '  "pos-emb": "rotary",\n  "no-weight-tying": true,\n  "train_micro_batch_size_per_gpu": 4,\n  "gradient_accumulation_steps": 2,\n  "zero_optimization": {"stage": 1},\n'
        '  "fp16": {"enabled": true, "loss_scale": 0},\n  "checkpoint-activations": true,\n  "attention-config": [[["flash"], 32]],\n}\n',
        {
            "strategy.pp": 2, "strategy.tp": 4, "model.num_hidden_layers": 32, "training.seq_len": 2048, "strategy.sharding": "zero1", "training.precision": "fp16",
            "strategy.recompute": "full", "strategy.attention": "flash", "training.accumulation": 2, "training.loss_scale": 0,
        },
    ),
    "nanotron": (
        "llama.yaml",
        "general: {project: p, run: r}\nmodel:\n  dtype: bfloat16\n  model_config: {hidden_size: 1024, num_hidden_layers: 24, num_attention_heads: 16, vocab_size: 50257}\n"
        "optimizer:\n  zero_stage: 1\n  clip_grad: 1.0\n  accumulate_grad_in_fp32: true\n  learning_rate_scheduler: {learning_rate: 3e-4, lr_warmup_steps: 100}\n"
        "parallelism: {dp: 4, tp: 2, pp: 1, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}\ntokens: {micro_batch_size: 2, batch_accumulation_per_replica: 8, sequence_length: 2048, train_steps: 10}\n",
        {
            "strategy.dp": 4, "strategy.tp": 2, "strategy.sequence_parallel": True, "strategy.sharding": "zero1", "strategy.micro_batch_size": 2,
            "training.learning_rate": 3e-4, "training.precision": "bf16", "model.hidden_size": 1024, "training.gradient_dtype": "fp32",
        },
    ),
    "nemo": (
        "gpt.yaml",
        "trainer:\n  devices: 8\n  num_nodes: 4\n  precision: bf16-mixed\n  max_steps: 1000\nmodel:\n  micro_batch_size: 1\n  global_batch_size: ${multiply:${trainer.num_nodes},64}\n"
        "  tensor_model_parallel_size: 2\n  pipeline_model_parallel_size: 2\n  encoder_seq_length: 4096\n  max_position_embeddings: ${.encoder_seq_length}\n  num_layers: 24\n"
        "  hidden_size: 2048\n  num_attention_heads: 16\n  optim:\n    name: distributed_fused_adam\n    lr: 1e-4\n    sched:\n      warmup_steps: 50\n      max_steps: ${trainer.max_steps}\n",
        {
            "launch.nodes": 4, "launch.gpus_per_node": 8, "training.global_batch_size": 256, "strategy.tp": 2, "strategy.pp": 2, "training.precision": "bf16",
            "model.max_position_embeddings": 4096, "training.decay_steps": 1000, "training.learning_rate": 1e-4, "strategy.sharding": "zero1",
        },
    ),
    "hyperpod": (
        "recipe.yaml",
        "defaults:\n  - /hydra_config/llmft/default\nrun: {name: a}\ntrainer:\n  num_nodes: 4\ntraining_config:\n  model_config: {model_name_or_path: meta-llama/Llama-3.1-8B}\n"
        "  training_args: {train_batch_size: 32}\n",
        {"launch.nodes": 4, "training.global_batch_size": 32, "model.name": "meta-llama/Llama-3.1-8B"},
    ),
    "automodel": (
        "sft.yaml",
        "step_scheduler:\n  global_batch_size: 64\n  local_batch_size: 8\n  max_steps: 100\ndist_env:\n  backend: nccl\n  timeout_minutes: 10\n"
        "model:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained\n  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B\n"
        "distributed:\n  strategy: fsdp2\n  tp_size: 2\n  cp_size: 1\n  sequence_parallel: true\noptimizer:\n  _target_: torch.optim.Adam\n  lr: 1.0e-5\n",
        {
            "training.global_batch_size": 64, "strategy.micro_batch_size": 8, "launch.timeout_s": 600, "strategy.tp": 2, "strategy.framework": "fsdp2",
            "training.optimizer": "adamw", "strategy.sequence_parallel": True,
        },
    ),
    "megatron_bridge": (
        "override.yaml",
        "model:\n  tensor_model_parallel_size: 4\n  seq_length: 8192\n  sequence_parallel: true\ntrain:\n  train_iters: 100\n  global_batch_size: 128\n  micro_batch_size: 1\n"
        "ddp:\n  use_distributed_optimizer: true\noptimizer:\n  lr: 3e-4\nscheduler:\n  lr_warmup_iters: 10\n",
        {"strategy.tp": 4, "training.seq_len": 8192, "training.global_batch_size": 128, "strategy.sharding": "zero1", "training.warmup_steps": 10},
    ),
    "primus": (
        "pretrain.yaml",
        "work_group: ${PRIMUS_TEAM:amd}\nmodules:\n  pre_trainer:\n    framework: megatron\n    config: pre_trainer.yaml\n    model: llama2_7B.yaml\n    overrides:\n"
        "      micro_batch_size: ${PRIMUS_MBS:10}\n      global_batch_size: 640\n      seq_length: 4096\n      tensor_model_parallel_size: ${PRIMUS_TP:1}\n      use_distributed_optimizer: true\n",
        {"strategy.micro_batch_size": 10, "training.global_batch_size": 640, "strategy.tp": 1, "training.seq_len": 4096, "strategy.sharding": "zero1"},
    ),
    "torchtune": (
        "full.yaml",
        "tokenizer:\n  _component_: torchtune.models.llama3.llama3_tokenizer\n  max_seq_len: 4096\nmodel:\n  _component_: torchtune.models.llama3_1.lora_llama3_1_8b\n  lora_rank: 8\n"
        "optimizer:\n  _component_: torch.optim.AdamW\n  lr: 3e-4\nbatch_size: 2\ngradient_accumulation_steps: 8\ndtype: bf16\nenable_activation_checkpointing: True\ncompile: False\n"
        "output_dir: /tmp/x\nmetric_logger:\n  log_dir: ${output_dir}/logs\n",
        {
            "strategy.micro_batch_size": 2, "training.accumulation": 8, "training.seq_len": 4096, "training.method": "lora", "training.lora_rank": 8,
            "training.learning_rate": 3e-4, "strategy.recompute": "full", "strategy.compile": False,
        },
    ),
    "llm_foundry": (
        "mpt-7b.yaml",
        "variables:\n  max_seq_len: 2048\nmax_seq_len: ${variables.max_seq_len}\nmodel: {name: mpt_causal_lm, d_model: 4096, n_heads: 32, n_layers: 32, vocab_size: 50368}\n"
        "train_loader: {name: text}\nmax_duration: 1000ba\nglobal_train_batch_size: 1024\ndevice_train_microbatch_size: 8\nprecision: amp_bf16\n"
        "fsdp_config:\n  sharding_strategy: FULL_SHARD\n  activation_checkpointing: true\n",
        {
            "training.seq_len": 2048, "model.hidden_size": 4096, "training.steps": 1000, "training.global_batch_size": 1024, "strategy.micro_batch_size": 8,
            "strategy.framework": "fsdp1", "strategy.sharding": "zero3", "strategy.recompute": "full", "training.precision": "bf16",
        },
    ),
    "run_spec": (
        "run.toml", 'model = "llama-3.1-8b"\ncluster = "16xH100"\n[training]\nseq_len = 4096\n[strategy]\nframework = "fsdp2"\nsharding = "zero3"\n',
        {"model.name": "llama-3.1-8b", "launch.nodes": 2, "launch.gpus_per_node": 8, "training.seq_len": 4096, "strategy.sharding": "zero3"},
    ),
    "hf_config": (
        "config.json", '{"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}',
        {"model.hidden_size": 2048, "model.num_key_value_heads": 8, "model.model_type": "llama"},
    ),
    "claim": ("claim.json", '{"model": "7B", "gpu": "H100", "gpus": 8, "tokens_per_s_total": 80000, "claimed_mfu": 0.43}', {}),
}  # fmt: skip
