"""K20, K23: FSDP's two versions, and checkpoints that other layouts and tools can read."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Check, Example, Finding
from ..setup import Setup
from ..view import View, as_number, truthy
from ._tools import ERROR, NOTE, WARNING, drop, put, said
from .zero import stage_of

# FSDP1's keys that fully_shard has no counterpart for (Accelerate docs, fsdp1_vs_fsdp2).
ONLY_ONE = ("fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params",
    "sharding_strategy", "use_orig_params",
            "sync_module_states", "forward_prefetch", "backward_prefetch")  # fmt: skip


def version(view: View) -> int | None:
    found = as_number(view.value("fsdp_version", "fsdp_config.version"))
    return None if found is None else int(found)


def versions(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen("accelerate", "axolotl", "trainer", "trl", "llama_factory"):
        if version(view) == 2:
            for name in ONLY_ONE:
                key = view.get(name)
                if key is not None and key.value is not None:
                    strategy = "sharding_strategy" in name
                    yield said(
                        view, key, "K20", WARNING if strategy else NOTE, f"{key.path[-1]} is FSDP1's; under version 2 it is "
                            f"ignored" + (" and reshard_after_forward decides." if strategy else "."),
                        "Say fsdp_reshard_after_forward." if strategy else "Remove it.", drop(view, key),
                    )  # fmt: skip
            key = view.get("fsdp_reshard_after_forward", "fsdp_config.reshard_after_forward")
            if key is not None and isinstance(key.value, str) and key.value.upper() in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"):
                yield said(
                    view, key, "K20", ERROR, f"fsdp_reshard_after_forward is true or false under version 2, not {key.value}.", f"Set it to "
                        f"{str(key.value.upper() != 'SHARD_GRAD_OP').lower()}.",
                    put(view, key, key.value.upper() != "SHARD_GRAD_OP"),
                )  # fmt: skip
        elif _unsaid(view):
            yield said(
                view, view.get("fsdp_config"), "K20", WARNING, "No fsdp_sharding_strategy is given: FULL_SHARD is assumed.",
                "Say FULL_SHARD or SHARD_GRAD_OP.",
            )  # fmt: skip


def _unsaid(view: View) -> bool:
    """Accelerate's FSDP without a word about what is sharded."""
    block, kind = view.get("fsdp_config"), str(view.value("distributed_type")).upper()
    strategy = view.get("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
    return view.format == "accelerate" and kind == "FSDP" and version(view) is None and block is not None and strategy is None


def checkpoints(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen():
        key = view.get("fsdp_state_dict_type", "fsdp_config.state_dict_type")
        if key is not None and str(key.value).upper() in ("SHARDED_STATE_DICT", "LOCAL_STATE_DICT"):
            local = str(key.value).upper().startswith("LOCAL")
            yield said(
                view, key, "K23", WARNING if local else NOTE,
                f"{key.value}: checkpoints are pieces" + (" that load on the same number of ranks only." if local else ", which "
                "from_pretrained and other tools do not read until they are merged (accelerate merge-weights)."),
                "FULL_STATE_DICT for the last save.", put(view, key, "FULL_STATE_DICT"),
            )  # fmt: skip
        if view.format == "deepspeed" and stage_of(view) == 3:
            gather = view.get(
                "stage3_gather_16bit_weights_on_model_save",
                "gather_16bit_weights_on_model_save",
                "stage3_gather_fp16_weights_on_model_save",
            )
            if gather is None or not truthy(gather.value):
                yield said(
                    view, gather or view.get("zero_optimization"), "K23", NOTE, "At stage 3 a saved model holds this rank's pieces only: "
                        "save_pretrained writes placeholders, zero_to_fp32.py makes the whole.",
                    "stage3_gather_16bit_weights_on_model_save: true.", *((put(view, gather, True),) if gather else ()),
                )  # fmt: skip
        elif view.format == "accelerate" and stage_of(view) == 3:
            save = view.get("zero3_save_16bit_model")
            if save is not None and not truthy(save.value) and view.value("deepspeed_config_file") in (None, ""):
                yield said(
                    view,
                    save,
                    "K23",
                    NOTE,
                    "zero3_save_16bit_model is off: a saved model holds this rank's pieces only.",
                    "Set it to true.",
                    put(view, save, True),
                )
        yield from _adapters(view)


def _adapters(view: View) -> Iterator[Finding]:
    """New rows of the embedding that an adapter does not save."""
    added = view.get("added_tokens_overrides", "tokens", "add_tokens", "new_special_tokens", "add_special_tokens")
    method = str(view.value("adapter", "finetuning_type") or "").lower()
    kept = view.get("lora_modules_to_save", "modules_to_save", "additional_target", "resize_vocab", "fix_untrained_tokens")
    if (
        added is not None
        and added.value
        and method in ("lora", "qlora")
        and kept is None
        and view.format in ("axolotl", "llama_factory")
        and not isinstance(added.value, bool)
    ):
        yield said(
            view,
            added,
            "K23",
            WARNING,
            "Tokens are added, and the adapter saves neither their embedding nor their head row.",
            "lora_modules_to_save: [embed_tokens, lm_head].",
        )


_FSDP = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n{}machine_rank: 0\nmain_training_function: main\n"
    "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"
)
CHECK = (
    Check(
        "K20", "FSDP1's keys under version 2", versions,
        Example({"fsdp.yaml": _FSDP.format("  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n")}),
        "error for a strategy name where true or false is read; warning for a strategy that is ignored; note for the rest", "an old strategy "
        "name where the file says version 1",
    ),
    Check(
        "K23", "checkpoints load elsewhere", checkpoints,
        Example({"fsdp.yaml": _FSDP.format("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_sharding_strategy: FULL_SHARD\n  "
            "fsdp_state_dict_type: SHARDED_STATE_DICT\n")}),
        "note; warning for pieces that need the same number of ranks and for tokens that an adapter loses",
    ),
)  # fmt: skip
