"""Four ranks that save and load in many layouts, for test_checkpoint.py."""

from __future__ import annotations

import resource
import traceback
from pathlib import Path
from typing import Any

import layouts
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainwright.errors import TrainwrightError
from trainwright.train.checkpoint import Checkpoints, export_model
from trainwright.train.whole import step_folders

WIDTH = 12
ABOUT = {"model": {"width": WIDTH}, "optimizer": "adamw"}


def network(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Sequential(nn.GELU(), nn.Linear(width, 5, bias=False)), nn.LayerNorm(5))


def trained(model: nn.Module, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    weights, states = get_state_dict(model, optimizer)
    out = {f"model.{k}": v for k, v in weights.items()}
    return out | {f"optimizer.{p}.{k}": v for p, s in states["state"].items() for k, v in s.items() if isinstance(v, torch.Tensor)}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def zeroed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for tensor in state.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor.data).detach().zero_()
    return state


def zero3(mesh: DeviceMesh, steps: int = 2) -> dict[str, torch.Tensor]:
    model = network()
    for child in model:
        fully_shard(child, mesh=mesh)
    return flat(*trained(fully_shard(model, mesh=mesh), steps))


def tensor_parallel(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    model = network()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1.1": RowwiseParallel()})
    return flat(*trained(model))


def one_device(names: str = "") -> dict[str, torch.Tensor]:
    """All tensors, or those of one pipeline stage (names that contain `names`)."""
    return {k: v for k, v in flat(*trained(network())).items() if names in k}


def same(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(whole(v), wanted[k]) for k, v in state.items())


ZERO3 = {"dp": 4, "sharding": "zero3"}
MOVES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "zero3 to ddp": ("llama", ZERO3, {"dp": 4, "framework": "ddp"}, {}),
    "zero3 to the same": ("llama", ZERO3, ZERO3, {}),
    "tp2 dp2 to pp2 dp2": ("llama", {"tp": 2, "dp": 2, "sequence_parallel": True}, {"pp": 2, "dp": 2, "sharding": "none"}, {}),
    "pp4 to hsdp": ("gpt", {"pp": 4, "sharding": "none"}, {"dp": 4, "dp_shard": 2, "sharding": "zero3"}, {}),
    "tied pp2 dp2 to zero3": ("tied", {"pp": 2, "dp": 2, "sharding": "none"}, ZERO3, {}),
    "tied zero3 to pp2 dp2": ("tied", ZERO3, {"pp": 2, "dp": 2, "sharding": "none"}, {}),
    "zero1 to zero3": ("llama", {"dp": 4, "framework": "ddp", "sharding": "zero1"}, ZERO3, {}),
    "ep2 to zero3": ("moe", {"dp": 4, "sharding": "zero3", "ep": 2}, ZERO3, {}),
    "interleaved to zb-v": ("llama", {"pp": 2, "dp": 2, "virtual_stages": 2, "schedule": "interleaved-1f1b", "sharding": "none"},
                            {"pp": 2, "dp": 2, "virtual_stages": 2, "schedule": "zb-v", "sharding": "none"}, {}),
    "fewer experts than shards to ddp": ("few experts", ZERO3, {"dp": 4, "framework": "ddp"}, {}),
    "muon": ("llama", ZERO3, {"dp": 4, "sharding": "none"}, {"optimizer": "muon"}),
    "masters": ("llama", {"dp": 4, "framework": "ddp"}, {"dp": 4, "framework": "ddp"}, {"precision": "bf16", "master_weights": "fp32"}),
}  # fmt: skip


class Cases:
    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, dist.get_rank()
        self.four = init_device_mesh("cpu", (4,))
        self.pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pair"))
        self.group = dist.new_group(backend="gloo")
        self.halves = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3], backend="gloo")]

    def checkpoints(self, name: str, group: Any = None, **more: Any) -> Checkpoints:
        return Checkpoints(self.folder / name, {**ABOUT, **more}, keep=2, group=group or self.group)

    def saved(self, name: str, state: dict[str, torch.Tensor], steps: tuple[int, ...] = (1,)) -> Checkpoints:
        out = self.checkpoints(name)
        out.clean()
        for step in steps:
            out.save(step, state, {"consumed": 10 * step})
        out.wait()
        return out

    def zero3_on_four_ranks_to_every_other_layout(self) -> dict[str, Any]:
        state = zero3(self.four)
        wanted = {k: whole(v) for k, v in state.items()}
        self.saved("zero3", state, (7,))
        found = {}
        targets = {
            "ddp": (one_device(), None),
            "hsdp 2x2": (zero3(self.pairs), None),
            "zero3 on two ranks": (zero3(self.pairs["pair"]), self.halves[self.rank // 2]),
            "tp2": (tensor_parallel(self.pairs["pair"]), self.halves[self.rank // 2]),
            "pp2": (one_device("0." if self.rank % 2 == 0 else "1.1"), self.halves[self.rank // 2]),
        }
        for name, (target, group) in targets.items():
            zeroed(target)
            loaded = self.checkpoints("zero3", group).load(target)
            found[name] = (loaded is not None and (loaded.step, loaded.extra)) == (7, {"consumed": 70}) and same(target, wanted)
        return found

    def tp2_to_pp2(self) -> bool:
        state = tensor_parallel(self.pairs["pair"])
        wanted = {k: whole(v) for k, v in state.items()}
        self.saved("tp2", state)
        target = zeroed(one_device("0." if self.rank % 2 == 0 else "1.1"))
        self.checkpoints("tp2").load(target)
        return same(target, wanted)

    def a_save_holds_the_state_of_its_step_although_training_goes_on(self) -> bool:
        state = one_device()
        wanted = {k: v.clone() for k, v in state.items()}
        checkpoints = self.checkpoints("async")
        checkpoints.clean()
        checkpoints.save(1, state, {})
        zeroed(state)
        checkpoints.wait()
        checkpoints.load(state)
        return same(state, wanted)

    def the_last_two_are_kept_and_latest_names_the_newest(self) -> Any:
        self.saved("keep", one_device(), (1, 2, 3, 4))
        dist.barrier()
        folder = self.folder / "keep"
        return sorted(p.name for p in folder.iterdir()), (folder / "latest").read_text().strip()

    def damage_falls_back_and_names_what_is_damaged(self) -> Any:
        state = one_device()
        self.saved("damage", state, (1, 2))
        newest = self.folder / "damage" / "step-00000002"
        found: dict[str, Any] = {}
        for how in ("flipped", "cut", "no manifest", "all"):
            if self.rank == 0:
                {"flipped": flip, "cut": cut, "no manifest": without_manifest, "all": cut_all}[how](newest)
            dist.barrier()
            try:
                loaded = self.checkpoints("damage").load(zeroed(dict(state)))
                found[how] = loaded and (loaded.step, list(loaded.skipped))
            except TrainwrightError as error:
                found[how] = f"{type(error).__name__}: {error}"
            dist.barrier()
        return found

    def another_model_is_refused_by_every_rank(self) -> Any:
        self.saved("model", one_device())
        found = {}
        wider = {f"model.{k}": v for k, v in network(16).state_dict().items()}
        for name, about, state in (
            ("width", {"model": {"width": 16}}, wider),
            ("shape", {}, wider),
            ("name", {}, {"model.other": torch.zeros(1)}),
            ("optimizer", {"optimizer": "sgd"}, one_device()),
        ):
            try:
                found[name] = str(self.checkpoints("model", **about).load(state))
            except TrainwrightError as error:
                found[name] = str(error)
        return found

    def a_full_disk_on_one_rank_leaves_the_last_checkpoint(self) -> Any:
        checkpoints = self.saved("full", one_device())
        state = {**one_device(), "model.large": torch.zeros(300_000)}
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limit[1]))  # a write beyond fails as on a full disk
        try:
            checkpoints.save(2, state, {})
            checkpoints.wait()
            said = "written"
        except TrainwrightError as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        dist.barrier()
        loaded = checkpoints.load(zeroed(one_device()))
        return said, loaded and loaded.step, sorted(p.name for p in (self.folder / "full").iterdir())

    def half_written_folders_are_removed_and_never_read(self) -> Any:
        checkpoints = self.saved("half", one_device())
        if self.rank == 0:
            (self.folder / "half" / "step-00000009.tmp").mkdir()
            (self.folder / "half" / "step-00000009.tmp" / "rank-00000.safetensors").write_bytes(b"x")
        dist.barrier()
        loaded = checkpoints.load(one_device())
        checkpoints.clean()
        return loaded and loaded.step, sorted(p.name for p in (self.folder / "half").iterdir())

    def moved(self, name: str, model: str, before: dict[str, Any], after: dict[str, Any], training: dict[str, Any]) -> Any:
        """Two steps in one layout, saved; then the third step there and, loaded, in the other: (loss, loss, gradient norms, steps)."""
        first = layouts.trainer(model, before, training)
        for step in range(2):
            first.step(layouts.batch(step, *first.ranks.replica))
        about = {"model": {"name": model}}
        checkpoints = Checkpoints(self.folder / name, about, group=self.group)
        checkpoints.clean()
        checkpoints.save(2, first.state(), first.progress())
        checkpoints.wait()
        wanted = first.step(layouts.batch(2, *first.ranks.replica))
        second = layouts.trainer(model, after, training)
        second.expect()
        loaded = Checkpoints(self.folder / name, about, group=self.group).load(second.state())
        assert loaded is not None
        second.loaded(loaded.extra)
        got = second.step(layouts.batch(2, *second.ranks.replica))
        return wanted.loss, got.loss, wanted.gradient_norm, got.gradient_norm, second.steps

    def nothing_to_load_is_none(self) -> bool:
        return self.checkpoints("nothing").load(one_device()) is None

    def a_file_where_the_folder_should_be_is_said(self) -> str:
        if self.rank == 0:
            (self.folder / "blocked").write_text("")
        dist.barrier()
        try:
            self.checkpoints("blocked").clean()
        except TrainwrightError as error:
            return str(error)
        return "made"

    def export_puts_shards_together(self) -> Any:
        if self.rank:
            return True
        from safetensors.torch import load_file

        target = self.folder / "export" / "model.safetensors"
        size = export_model(step_folders(self.folder / "zero3")[0], target, {"0.weight": "first.weight"})
        found = load_file(str(target))
        wanted = one_device()
        closest = max(
            float((found[k if k != "0.weight" else "first.weight"] - wanted[f"model.{k}"]).abs().max()) for k in network().state_dict()
        )
        return sorted(found), size, closest


def flip(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def cut(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_all(folder: Path) -> None:
    older = folder.with_name("step-00000001") / "manifest.json"
    older.write_bytes(older.read_bytes()[:100])


def every_case(folder: str) -> dict[str, Any]:
    """What each case says on this rank."""
    cases, answers = Cases(Path(folder)), {}
    for name in [n for n in vars(Cases) if not n.startswith("_") and n not in ("checkpoints", "saved", "moved")]:
        try:
            answers[name] = getattr(cases, name)()
        except Exception:
            answers[name] = traceback.format_exc()
        dist.barrier()
    return answers


def moved(folder: str, name: str) -> Any:
    return Cases(Path(folder)).moved(name.replace(" ", "-"), *MOVES[name])
