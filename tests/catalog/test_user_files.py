"""A user's own catalogue file adds and overrides; a wrong one is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainwright.catalog.load import build_cluster, default_price, list_gpus, list_models, list_prices, load_gpu, load_model
from trainwright.errors import SpecError
from trainwright.spec.run import ClusterSection

OWN = """
[[gpu]]
id = "H100-cloud"
base = "H100-SXM-80GB"
aliases = ["ch100"]
nic_default_gbps = 200
source = "contract"

[[gpu]]
id = "A100-SXM-80GB"
tdp_w = 300

[[gpu]]
id = "N1"
bf16 = 500
mem_label_gb = 64
mem_bw_gbs = 2000

[[price]]
gpu = "ch100"
usd_per_gpu_hour = 2.1
source = "contract of 2026-03"

[[model]]
id = "ours"
aliases = ["our-model"]
path = "ours/config.json"

[[model]]
id = "inline"
config = {model_type = "llama", hidden_size = 64, intermediate_size = 128, num_attention_heads = 4, num_hidden_layers = 2, vocab_size = 100}
"""


@pytest.fixture
def own(tmp_path: Path) -> tuple[str]:
    (tmp_path / "ours").mkdir()
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config))
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    return (str(file),)


def test_gpus_are_added_and_overridden(own: tuple[str]) -> None:
    assert load_gpu("ch100", own).nic_default_gbps == 200
    assert load_gpu("a100", own).tdp_w == 300
    assert load_gpu("a100", own).peak("bf16") == 312e12
    assert load_gpu("N1", own).hbm_bytes_per_s == 2e12
    assert load_gpu("h100", own) == load_gpu("h100")
    with pytest.raises(SpecError, match="unknown GPU 'ch100'"):
        load_gpu("ch100")


def test_prices_are_overridden(own: tuple[str]) -> None:
    assert default_price("H100-cloud", own) == (2.1, "contract of 2026-03")
    assert default_price("H100-SXM-80GB", own) == default_price("H100-SXM-80GB")
    assert build_cluster(ClusterSection(gpu="ch100", nodes=1), own).usd_per_gpu_hour == 2.1


def test_models_are_added(own: tuple[str]) -> None:
    assert load_model("our-model", catalog_files=own).family == "gpt2"
    assert load_model("inline", catalog_files=own).hidden == 64


def test_tables_list_them(own: tuple[str]) -> None:
    assert {"H100-cloud", "N1"} <= {row["id"] for row in list_gpus(own)}
    assert {"ours", "inline"} <= {row["id"] for row in list_models(own)}
    assert list_prices(own)[0]["source"] == "contract of 2026-03"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("gpu = 3", "gpu is no list of tables"), ("[[gpus]]\nid = 'x'", r"unknown table 'gpus' \(nearest: gpu"),
        ("[[gpu]]\nbf16 = 3", r"a \[\[gpu\]\] without id"),
        ("[[gpu", "is not valid TOML"), ("[[gpu]]\nid = 'x'", "gpu 'x': has no dense peak"), ("[[gpu]]\nid = 'h100'\nbf1 = 3", "unknown key 'bf1'"),
        ("[[price]]\ngpu = 'h100'", "usd_per_gpu_hour is missing"), ("[[price]]\ngpu = 'h1'\nusd_per_gpu_hour = 1", "unknown GPU 'h1'"),
        ("[[price]]\ngpu = 'h100'\nusd_per_gpu_hour = -1", "is not between"), ("[[price]]\ngpu = 'h100'\nusd = 1", "unknown key 'usd'"),
        ("[[model]]\nid = 'm'", "needs either path or config"), ("[[model]]\nid = 'm'\npath = 'nothing.json'", "no such file"),
        ("[[model]]\nid = 'm'\nconfig = 3", "config is no table"), ("[[model]]\nid = 'm'\nfile = 3", "unknown key 'file'"),
        ("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, content: str, line: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(content)

    def read_all() -> None:
        load_gpu("h100", (str(file),))
        default_price("H100-SXM-80GB", (str(file),))
        load_model("m", catalog_files=(str(file),))

    with pytest.raises(SpecError, match=line) as caught:
        read_all()
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        load_gpu("h100", (str(tmp_path / "nothing.toml"),))
    with pytest.raises(SpecError, match="is a directory"):
        load_gpu("h100", (str(tmp_path),))
