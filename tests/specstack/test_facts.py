"""Facts of models from their configs, and of machines from their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specstack.facts import HostFacts, ModelFacts, model_facts
from specstack.locate import locate_target
from specstack.models.catalogue import CATALOGUE
from specstack_dsl import Pipeline, PlanError, loads

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def facts(**changes: Any) -> ModelFacts:
    return ModelFacts.from_config({**LLAMA, **changes})


def pipeline(model: str, **environ: str) -> Pipeline:
    return loads(f"version: 1\ntarget: {model}\n")


class TestConfig:
    def test_a_llama(self) -> None:
        found = facts()
        assert (found.num_layers, found.hidden_size, found.vocab_size) == (2, 64, 100)
        assert (found.num_heads, found.num_kv_heads, found.head_dim) == (8, 2, 8)
        assert found.dtype == "bfloat16"
        assert not any((found.is_mla, found.is_recurrent, found.sliding_window))

    def test_parameters_of_a_dense_decoder(self) -> None:
        per_layer = 64 * 64 + 2 * 64 * 16 + 64 * 64 + 3 * 64 * 128
        assert facts().num_parameters == 2 * per_layer + 2 * 100 * 64
        assert facts(tie_word_embeddings=True).num_parameters == 2 * per_layer + 100 * 64

    def test_parameters_of_a_mixture_are_not_guessed(self) -> None:
        assert facts(num_experts=8).num_parameters is None

    def test_parameters_of_the_packaged_model_are_nearly_those_of_its_catalogue(self) -> None:
        model = CATALOGUE["smollm2-135m-instruct"]
        found = ModelFacts.from_config(model.config).num_parameters
        assert found == pytest.approx(model.parameters, rel=1e-3)

    def test_kv_bytes_of_a_token(self) -> None:
        assert facts().kv_bytes_per_token("float32") == 2 * 2 * 2 * 8 * 4
        assert facts().kv_bytes_per_token("bfloat16") == 2 * 2 * 2 * 8 * 2

    def test_without_kv_heads_every_head_has_its_own(self) -> None:
        assert facts(num_key_value_heads=None).num_kv_heads == 8

    def test_a_head_dim_of_its_own(self) -> None:
        assert facts(head_dim=32).head_dim == 32

    def test_the_text_part_of_a_multimodal_config(self) -> None:
        config = {"architectures": ["VLM"], "dtype": "float16", "text_config": LLAMA}
        found = ModelFacts.from_config(config)
        assert (found.architecture, found.num_layers) == ("VLM", 2)

    def test_other_names_of_the_same_facts(self) -> None:
        gpt2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 9}
        found = ModelFacts.from_config(gpt2)
        assert (found.num_layers, found.head_dim, found.max_position_embeddings) == (12, 64, 9)
        assert found.num_parameters is None

    def test_latent_attention(self) -> None:
        assert facts(kv_lora_rank=512).is_mla

    @pytest.mark.parametrize(
        "changes",
        [
            {"model_type": "mamba2"},
            {"mamba_d_state": 16},
            {"layer_types": ["full_attention", "linear_attention"]},
            {"layer_types": ["conv", "full_attention"]},
            {"layers_block_type": ["attention", "mamba"]},
            {"attn_type_list": [1, 0]},
            {"linear_attn_config": {}},
            {"hybrid_override_pattern": "M-M*"},
        ],
        ids=str,
    )
    def test_a_recurrent_state(self, changes: dict[str, Any]) -> None:
        assert facts(**changes).is_recurrent

    def test_attention_in_every_layer_is_not_recurrent_whatever_else_is_stated(self) -> None:
        assert not facts(mamba_d_state=16, layer_types=["attention", "attention"]).is_recurrent

    @pytest.mark.parametrize(
        ("changes", "window"),
        [
            ({"sliding_window": 4096}, 4096),
            ({"sliding_window": 4096, "use_sliding_window": False}, None),
            ({"sliding_window": 4096, "layer_types": ["full_attention"] * 2}, None),
            ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}, 128),
            ({"sliding_window": None}, None),
        ],
        ids=str,
    )
    def test_a_window(self, changes: dict[str, Any], window: int | None) -> None:
        assert facts(**changes).sliding_window == window


class TestTarget:
    def write(self, folder: Path, text: str) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(text)
        return folder

    def test_a_folder(self, tmp_path: Path) -> None:
        folder = self.write(tmp_path / "m", json.dumps(LLAMA))
        assert model_facts(pipeline(str(folder))) == facts()
        assert locate_target(pipeline(str(folder))).path == str(folder)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("{", "cannot read"),
            ("[]", "config.json is not one of a model"),
            ("{}", "config.json has no 'num_hidden_layers'"),
            (json.dumps({**LLAMA, "vocab_size": "many"}), "config.json is not one of a model"),
        ],
    )
    def test_a_broken_config(self, tmp_path: Path, text: str, expected: str) -> None:
        folder = self.write(tmp_path / "m", text)
        with pytest.raises(PlanError, match=expected) as caught:
            model_facts(pipeline(str(folder)))
        assert str(caught.value).startswith("<text>:2:9: target.model: ")

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(PlanError, match="does not exist: name a model's folder"):
            model_facts(pipeline(str(tmp_path / "no")))

    def test_a_folder_without_a_config(self, tmp_path: Path) -> None:
        with pytest.raises(PlanError, match=r"has no config\.json"):
            model_facts(pipeline(str(tmp_path)))

    def test_a_packaged_model_needs_no_download(self, monkeypatch: pytest.MonkeyPatch,
                                                tmp_path: Path) -> None:  # fmt: skip
        monkeypatch.setenv("SPECSTACK_CACHE", str(tmp_path))
        target = pipeline("packaged:smollm2-135m-instruct")
        found = model_facts(target)
        assert found is not None
        assert found.num_layers == 30
        assert locate_target(target).path.startswith(str(tmp_path))

    def test_an_unknown_packaged_model(self) -> None:
        expected = "no packaged model 'smollm-135m-instruct'.*did you mean 'smollm2-135m-instruct'"
        with pytest.raises(PlanError, match=expected):
            model_facts(pipeline("packaged:smollm-135m-instruct"))

    def test_a_hub_id_that_was_never_downloaded_has_no_facts(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        target = pipeline("org/m")
        assert model_facts(target) is None
        assert locate_target(target).path == "org/m"
        assert "not in the local cache" in locate_target(target).note

    def test_a_hub_id_in_the_cache(self, tmp_path: Path) -> None:
        repository = tmp_path / "hub/models--org--m"
        self.write(repository / "snapshots/abc", json.dumps(LLAMA))
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text("abc")
        target = pipeline("org/m")
        found = locate_target(target, {"HF_HOME": str(tmp_path)})
        assert found.config_file == str(repository / "snapshots/abc/config.json")
        assert locate_target(target, {"HF_HUB_CACHE": str(tmp_path / "hub")}) == found


class TestHost:
    def host(self, root: Path, **environ: str) -> HostFacts:
        return HostFacts.detect(root, environ)

    def device(self, root: Path, name: str) -> None:
        file = root / "dev" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    def test_nothing(self, tmp_path: Path) -> None:
        host = self.host(tmp_path)
        assert (host.accelerator, host.num_accelerators, host.memory_bytes) == ("none", 0, None)
        assert not host.has_accelerator

    def test_nvidia(self, tmp_path: Path) -> None:
        for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
            self.device(tmp_path, name)
        host = self.host(tmp_path)
        assert (host.accelerator, host.num_accelerators) == ("nvidia", 2)

    @pytest.mark.parametrize(
        ("visible", "count"), [("0", 1), ("0,1", 2), ("", 0), ("-1", 0), ("0,1,2", 2)]
    )
    def test_visible_devices(self, tmp_path: Path, visible: str, count: int) -> None:
        for name in ("nvidia0", "nvidia1"):
            self.device(tmp_path, name)
        host = self.host(tmp_path, CUDA_VISIBLE_DEVICES=visible)
        assert host.num_accelerators == count
        assert host.has_accelerator == (count > 0)

    def test_amd(self, tmp_path: Path) -> None:
        self.device(tmp_path, "kfd")
        host = self.host(tmp_path)
        assert (host.accelerator, host.num_accelerators) == ("amd", None)

    def test_the_limit_of_a_container_counts(self, tmp_path: Path) -> None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/meminfo").write_text("MemTotal:       2048 kB\nMemFree: 1 kB\n")
        assert self.host(tmp_path).memory_bytes == 2048 * 1024
        limit = tmp_path / "sys/fs/cgroup/memory.max"
        limit.parent.mkdir(parents=True)
        limit.write_text("max\n")
        assert self.host(tmp_path).memory_bytes == 2048 * 1024
        limit.write_text("1024\n")
        assert self.host(tmp_path).memory_bytes == 1024

    def test_this_machine(self) -> None:
        host = HostFacts.detect()
        assert host.num_cpus is not None
        assert host.num_cpus >= 1
