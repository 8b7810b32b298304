"""Keys that an engine once read, and what it reads now. {format: {old: (new or "", since)}}.

That a key went is from the histories of public configurations (LLaMA-Factory, nanotron, torchtitan, TRL, axolotl) and from the engines' own warnings
(transformers, Accelerate, Megatron). The versions were not all looked up: they order the entries and are shown to nobody. "" = never a key of this format.
"""

from __future__ import annotations

from collections.abc import Mapping

Table = Mapping[str, tuple[str, str]]

# Ignored in silence or refused: the key does nothing any more. K01.
REMOVED: Mapping[str, Table] = {
    "llama_factory": {
        "num_layer_trainable": ("freeze_trainable_layers", "0.8"), "name_module_trainable": ("freeze_trainable_modules", "0.8"),
        "checkpoint_dir": ("adapter_name_or_path", "0.4"), "dpo_beta": ("pref_beta", "0.8"), "dpo_loss": ("pref_loss", "0.8"),
        "dpo_ftx": ("pref_ftx", "0.8"), "orpo_beta": ("pref_beta", "0.8"), "kto_beta": ("pref_beta", "0.8"), "kto_ftx": ("pref_ftx", "0.8"),
        "dpo_ref_model": ("ref_model", "0.6"), "image_resolution": ("image_max_pixels", "0.9.2"), "video_resolution": ("video_max_pixels", "0.9.2"),
        "image_dir": ("media_dir", "0.9.2"), "layernorm_dtype": ("upcast_layernorm", "0.2"), "lora_bf16_mode": ("pure_bf16", "0.6"),
        "lora_lr_ratio": ("loraplus_lr_ratio", "0.6"), "max_source_length": ("cutoff_len", "0.2"), "max_target_length": ("cutoff_len", "0.2"),
        "placement_strategy": ("", "0.9.5"), "ray_run_name": ("", "0.9.5"), "ray_storage_path": ("", "0.9.5"),
        "ray_storage_filesystem": ("", "0.9.5"), "resources_per_worker": ("", "0.9.5"), "reserved_label_len": ("", "0.9"),
        "resume_lora_training": ("create_new_adapter", "0.5"), "reward_model_checkpoint": ("reward_model", "0.4"),
        "sft_packing": ("packing", "0.5"), "split": ("", "0.9"), "train_mm_proj_only": ("freeze_vision_tower", "0.9.2"),
        "tune_mm_proj": ("freeze_multi_modal_projector", "0.9.2"), "use_adammini": ("use_adam_mini", "0.8.3"), "visual_inputs": ("", "0.9"),
        "vllm_dtype": ("infer_dtype", "0.9"), "use_kernels": ("use_v1_kernels", "0.9.4"),
        "export_legacy_format": ("", "0.9.4"), "switch_mode": ("badam_switch_mode", "0.7"), "loftq_init": ("", "0.7"),
        "prompt_template": ("template", "0.1"), "new_special_tokens": ("add_special_tokens", "0.9.3"),
    },
    "trl": {
        "max_prompt_length": ("", "TRL 0.27"), "max_target_length": ("", "TRL 0.24"), "dataset_batch_size": ("", "TRL 0.16"),
        "gradient_checkpointing_use_reentrant": ("gradient_checkpointing_kwargs", "TRL 0.24"), "use_liger": ("use_liger_kernel", "TRL 0.16"),
        "use_liger_loss": ("use_liger_kernel", "TRL 0.25"), "vllm_device": ("", "TRL 0.18"), "vllm_dtype": ("", "TRL 0.18"),
        "vllm_max_model_len": ("vllm_max_model_length", "TRL 0.18"), "num_updates": ("", "TRL 0.12"), "rloo_k": ("num_generations", "TRL 0.22"),
        "rpo_alpha": ("loss_weights", "TRL 0.27"), "label_pad_token_id": ("", "TRL 0.24"), "is_encoder_decoder": ("", "TRL 0.27"),
            "reference_free": ("", "TRL 0.27"), "ref_model_init_kwargs": ("model_init_kwargs", "TRL 0.27"),
    },
    "trainer": {
        "sharded_ddp": ("fsdp", "transformers 4.34"), "no_cuda": ("use_cpu", "transformers 5.0"),
        "per_gpu_train_batch_size": ("per_device_train_batch_size", "transformers 5.0"),
        "per_gpu_eval_batch_size": ("per_device_eval_batch_size", "transformers 5.0"), "fp16_backend": ("", "transformers 5.0"),
        "half_precision_backend": ("", "transformers 5.0"), "use_mps_device": ("", "transformers 5.0"), "jit_mode_eval": ("", "transformers 5.0"),
        "fsdp_min_num_params": ("fsdp_config.min_num_params", "transformers 5.0"), "push_to_hub_model_id": ("hub_model_id", "transformers 5.0"),
        "push_to_hub_organization": ("hub_model_id", "transformers 5.0"), "push_to_hub_token": ("hub_token", "transformers 5.0"),
        "tpu_metrics_debug": ("", "transformers 5.0"), "past_index": ("", "transformers 5.0"), "save_safetensors": ("", "transformers 5.0"),
        "ray_scope": ("", "transformers 5.0"), "xpu_backend": ("ddp_backend", "transformers 4.41"),
    },
    "megatron": {
        "async_tensor_model_parallel_allreduce": ("", "Megatron-Core 0.16"), "model_parallel_size": ("tensor_model_parallel_size", "Megatron-LM 2.2"),
        "warmup": ("lr_warmup_fraction", "Megatron-LM 2.2"), "batch_size": ("micro_batch_size", "Megatron-LM 2.2"),
        "expert_parallel": ("expert_model_parallel_size", "Megatron-Core 0.5"), "moe_extended_tp": ("expert_tensor_parallel_size", "Megatron-Core 0.10"),
        "fp8_e4m3": ("fp8_format", "Megatron-Core 0.3"), "fp8_hybrid": ("fp8_format", "Megatron-Core 0.3"),
        "use_checkpoint_lr_scheduler": ("use_checkpoint_opt_param_scheduler", "Megatron-LM 3.0"), "moe_layer_recompute": ("recompute_modules",
            "Megatron-Core 0.13"),
        "encoder_tensor_model_parallel_size": ("tensor_model_parallel_size", "Megatron-Core 0.14"),
        "encoder_pipeline_model_parallel_size": ("pipeline_model_parallel_size", "Megatron-Core 0.14"),
        "pipeline_model_parallel_split_rank": ("", "Megatron-Core 0.12"), "use_custom_fsdp": ("use_megatron_fsdp", "Megatron-Core 0.13"),
        "standalone_embedding_stage": ("account_for_embedding_in_pipeline_split", "Megatron-Core 0.13"),
    },
    "nanotron": {
        "recompute_granularity": ("recompute_layer", "nanotron 0.4"), "kill_switch_path": ("", "nanotron 0.5"),
        "interleaved_rotary": ("rope_interleaved", "nanotron 0.4"), "push_to_hub_interval": ("", "nanotron 0.5"),
    },
    "torchtitan": {
        "data_parallel_degree": ("data_parallel_shard_degree", "0.0.3"), "data_parallel_type": ("", "0.0.3"),
            "pipeline_parallel_split_points": ("module_fqns_per_model_part", "0.1.1"),
        "tokenizer_path": ("hf_assets_path", "0.1.1"), "enable_first_step_checkpoint": ("", "0.2"), "enable_fp8_linear": ("converters", "0.0.3"),
        "enable_float8_linear": ("converters", "0.1"), "early_step_in_backward": ("name", "0.2"), "norm_type": ("", "0.1"), "interval_type": ("", "0.1"),
        "lr_min": ("min_lr_factor", "0.1.1"), "model_weights_only": ("last_save_model_only", "0.1.1"), "enable_checkpoint": ("enable", "0.2"),
        "profile_every_x_iter": ("profile_freq", "0.0.2"), "fp8_linear": ("converters", "0.0.3"),
    },
    "axolotl": {
        "lora_rank": ("lora_r", ""), "wandb_run_id": ("wandb_name", "0.4"), "batch_size": ("micro_batch_size", "0.4"),
            "noisy_embedding_alpha": ("neftune_noise_alpha", "0.4"), "sharegpt_simple": ("", "0.5"), "flash_attn_fuse_qkv": ("", "0.13"),
                "dpo_beta": ("rl_beta", "0.6"), "vllm_device": ("vllm", "0.9"),
        "load_in_16bit": ("", "0.4"), "peft_adapter": ("adapter", "0.3"),
    },
    "accelerate": {
        "fsdp_backward_prefetch_policy": ("fsdp_backward_prefetch", "Accelerate 0.27"),
        "fsdp_sharding_policy": ("fsdp_sharding_strategy", ""),
    },
    "deepspeed": {
        "stage3_param_persitence_threshold": ("stage3_param_persistence_threshold", ""), "cpu_offload_params": ("offload_param", "0.4"),
        "cpu_offload_pin_memory": ("offload_optimizer.pin_memory", ""), "opt_level": ("", "0.15"), "fp16_opt_level": ("", "0.17"),
        "disable_allgather": ("", "0.3"),
    },
}  # fmt: skip

# Old names that are still mapped to the new ones, with a warning. K32.
DEPRECATED: Mapping[str, Table] = {
    "trainer": {
        "evaluation_strategy": ("eval_strategy", "transformers 4.46"), "torch_dtype": ("dtype", "transformers 4.56"),
        "adafactor": ("optim", "transformers 4.20"),
        "fsdp_transformer_layer_cls_to_wrap": ("fsdp_config.transformer_layer_cls_to_wrap", "transformers 4.27"),
        "group_by_length": ("train_sampling_strategy", "transformers 5.0"), "use_auth_token": ("token", "transformers 4.35"),
    },
    "deepspeed": {
        "cpu_offload": ("offload_optimizer", "0.3.16"), "cpu_offload_param": ("offload_param", "0.3.16"),
        "cpu_offload_use_pin_memory": ("offload_optimizer.pin_memory", "0.3.16"), "bfloat16": ("bf16", "0.6"),
        "stage3_gather_fp16_weights_on_model_save": ("stage3_gather_16bit_weights_on_model_save", "0.5.9"),
    },
    "megatron": {
        "checkpoint_activations": ("recompute_activations", "Megatron-LM 3.0"),
        "activations_checkpoint_method": ("recompute_method", "Megatron-LM 3.0"), "activations_checkpoint_num_layers": ("recompute_num_layers",
            "Megatron-LM 3.0"),
        "distribute_checkpointed_activations": ("distribute_saved_activations", "Megatron-LM 3.0"), "no_async_tensor_model_parallel_allreduce": ("",
            "Megatron-Core 0.16"),
        "data_impl": ("", "Megatron-LM 3.0"),
    },
        "llama_factory": {"evaluation_strategy": ("eval_strategy", "transformers 4.46"),},
    "axolotl": {
        "evaluation_strategy": ("eval_strategy", "0.5"), "flash_attention": ("attn_implementation", "0.13"),
            "fsdp_final_state_dict_type": ("fsdp_config.final_state_dict_type", "0.11"),
    },
}  # fmt: skip
