"""torchtitan 0.3.0 on a machine without a GPU: every rank imports this first (as `sitecustomize`), everything after it is torchtitan's own.

Three things have no CPU in it: the device (tools/utils.py takes "cuda" where torch finds no accelerator), its memory meter (components/metrics.py), and
FlexAttention, whose backward PyTorch refuses on a CPU: here the same mask goes to `scaled_dot_product_attention`. The flavor "1B" is a tiny one.
"""

import os
import types

if "RANK" in os.environ:
    import torch

    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.current_device = lambda: 0
    torch.cpu.get_device_name = lambda device: "CPU"
    torch.cpu.get_device_properties = lambda device: types.SimpleNamespace(total_memory=1 << 30)
    torch.cpu.memory_stats = lambda device: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None

    from torch.nn.attention.flex_attention import create_block_mask, create_mask
    from torchtitan.models import llama3
    from torchtitan.models.common import attention

    def dense(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
        assert score_mod is None
        mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        return out, types.SimpleNamespace(lse=None)

    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda timeout, group: torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)

    divide = torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor

    def divide_with_sums(module, factor):
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor = divide_with_sums
    attention.FlexAttention._compiled_flex_attn = staticmethod(dense)
    attention._compiled_create_block_mask = create_block_mask
    llama3.llama3_configs["1B"] = llama3.llama3_configs["debugmodel"]
