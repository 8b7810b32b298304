"""Adapters on one GPU against LitGPT's own modules, and what a loop around FSDP1 keeps of gradients."""

from __future__ import annotations

import pytest

import trainwright as tw

# Peaks of litgpt 26857050 (`lora.GPT`, pieces of 128 tokens at the head, dropout 0.05) with torch 2.13.0 on fake tensors, bf16: 4 and 5 layers extrapolated;
# dropout's masks counted as on a GPU, one byte an element.
LITGPT = {
    ("llama-2-7b", 1, 1304, 8): 21_042_203_304,
    ("llama-2-7b", 4, 1304, 8): 43_693_453_656,
    ("phi-1.5", 4, 1044, 8): 9_684_699_364,
    ("llama-2-7b", 2, 512, 32): 19_468_279_562,
    ("llama-3-8b", 1, 512, 32): 19_272_321_290,
    ("mistral-7b-v0.1", 2, 512, 32): 20_383_162_122,
}


def spec(model: str, batch: int, seq_len: int, rank: int, gpus: int = 1, **strategy: object) -> dict:
    return {
        "model": model,
        "cluster": {"gpu": "A100-SXM-80GB", "nodes": 1, "gpus_per_node": gpus},
        "training": {"seq_len": seq_len, "global_batch_size": batch * gpus, "precision": "bf16", "master_weights": "none"}
        | {"gradient_dtype": "bf16", "method": "lora", "lora_rank": rank, "lora_targets": ["q_proj", "v_proj"]},
        "strategy": {"framework": "ddp", "sharding": "none", "micro_batch_size": batch, **strategy},
    }


def live(document: dict) -> int:
    memory = tw.estimate(document).to_dict()["memory"]
    return memory["peak_bytes"] - memory["breakdown"]["framework"]


@pytest.mark.parametrize("case", LITGPT, ids=str)
def test_one_gpu_holds_what_litgpts_modules_hold(case: tuple[str, int, int, int]) -> None:
    assert live(spec(*case)) == pytest.approx(LITGPT[case], rel=0.004)


def test_it_is_the_joined_product_that_costs() -> None:
    """On several GPUs, with recomputation or with other targets, adapters sit on products of their own, as before."""
    case = ("llama-2-7b", 1, 1304, 8)
    joined = live(spec(*case))
    assert live(spec(*case, gpus=2)) < joined
    assert live(spec(*case, recompute="full")) < joined / 1.4
    wider = spec(*case)
    wider["training"]["lora_targets"] = ["q_proj", "v_proj", "o_proj"]
    assert live(wider) < joined


def accumulating(model: str, **options: bool) -> int:
    document = spec(model, 4, 512, 0, gpus=4, framework="fsdp1", sharding="zero3", recompute="full", options=options)
    document["training"] |= {"method": "full", "global_batch_size": 64}
    del document["training"]["lora_rank"], document["training"]["lora_targets"]
    return live(document)


def test_a_loop_around_fsdp1_keeps_whole_gradients_while_it_accumulates() -> None:
    """Lightning's and Accelerate's loops accumulate inside ``no_sync()``; Composer, which trains MPT, does not."""
    default, put_off, each = (accumulating("llama-2-7b", **o) for o in ({}, {"no_sync": True}, {"no_sync": False}))
    assert default == put_off
    assert 0.7 < (put_off - each) / (2 * 6.74e9) < 0.8  # 16-bit gradients of all parameters instead of a quarter
    assert accumulating("mpt-7b") == accumulating("mpt-7b", no_sync=False)


def adapted(model: str, gpu: str, method: str, framework: str, **training: object) -> dict:
    spec = {"model": model, "cluster": {"gpu": gpu, "nodes": 1, "gpus_per_node": 1}}
    spec["training"] = {"method": method, "seq_len": 2048, "global_batch_size": 1, **training}
    spec["strategy"] = {"framework": framework, "recompute": "full", "micro_batch_size": 1}
    return tw.estimate(spec).memory_dict()


def test_a_quantized_base_has_no_copies_in_16_bits() -> None:
    """bitsandbytes' packed weights are bytes, which autocast leaves alone: 70B takes 51 GiB under DDP, as under FSDP2, not 180."""
    ddp, fsdp2 = (adapted("llama-3.1-70b", "H100", "qlora", framework)["peak_bytes"] for framework in ("ddp", "fsdp2"))
    assert ddp == pytest.approx(fsdp2, rel=0.05)
    cast = adapted("llama-3.1-70b", "H100", "qlora", "fsdp2", autocast=True)["peak_bytes"]
    assert cast < 1.25 * fsdp2  # the stream and the ends are fp32


def test_copies_of_a_frozen_base_are_not_cached() -> None:
    """`cached_cast` keeps copies of leaves that want gradients alone; what a checkpoint runs again makes them anew."""
    held = adapted("llama-3.1-8b", "A100-40GB", "lora", "ddp")
    assert held["breakdown"]["communication_buffers"] < 2 * 1.5e9  # the head's and a layer's, not all of 16 GB
    assert held["device_bytes"] < 40 * 2**30
