"""The frozen target: hidden states, keys and values, and the states that its lm_head reads.

Letters: B sequences, L tokens, n and m tapped layers (hidden, KV), D hidden size, G KV heads,
C head size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from specstack.models import packaged
from specstack.models.heads.config import ContextConfig, TargetShape
from specstack.models.heads.features import TargetFeatures
from specstack.models.heads.tables import TargetTables
from specstack.training.answers import Answer
from specstack.training.objective import Seen
from specstack.training.run_config import Target
from specstack.training.run_file import RunFile
from specstack_dsl.parts.target import PACKAGED_PREFIX, is_folder


def locate(file: RunFile) -> str:
    """Return the folder, or the Hugging Face id, of a run's target; a packaged one is prepared.

    Raises:
        SpecError: there is no such folder or packaged model.
        ModelError: a packaged model cannot be had.
    """
    model = file.run.target.model
    if model.startswith(PACKAGED_PREFIX):
        try:
            return str(packaged.ensure(model.removeprefix(PACKAGED_PREFIX)))
        except packaged.UnknownModelError as error:
            raise file.problem("target.model", str(error)) from None
    if not is_folder(model):
        return model
    folder = file.resolve("target.model", model)
    if not (folder / "config.json").is_file():
        raise file.problem("target.model", f"the folder {folder} has no config.json")
    return str(folder)


def read_shape(path: str, name: str) -> tuple[TargetShape, dict[str, Any]]:
    """The target's sizes and its whole config, without its weights."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path).to_dict()
    return TargetShape.from_hf(config, name=name), config


def tokeniser(path: str) -> Any:
    """A function from an answer without token ids to those of prompt and answer."""
    loaded: list[Any] = []

    def tokenise(answer: Answer) -> tuple[list[int], list[int]]:
        from transformers import AutoTokenizer

        if not loaded:
            loaded.append(AutoTokenizer.from_pretrained(path))
        tokens, prompt = loaded[0], list(answer.messages[:-1])
        ids = tokens.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        output = tokens(answer.messages[-1]["content"], add_special_tokens=False)["input_ids"]
        ended = answer.finish_reason == "stop" and tokens.eos_token_id is not None
        return list(ids), [*output, *([tokens.eos_token_id] if ended else [])]

    return tokenise


class FrozenTarget:
    """A transformers causal LM that nothing is trained in."""

    def __init__(self, path: str, options: Target, device: torch.device) -> None:
        """Load the weights."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        hide_bars: Any = logging.disable_progress_bar
        hide_bars()
        dtype = options.dtype
        if dtype == "auto":
            dtype = "float32" if device.type == "cpu" else "bfloat16"
        untyped: Any = AutoModelForCausalLM
        self.model: Any = untyped.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation=options.attention
        )
        self.model.to(device)
        self.model.requires_grad_(False).eval()
        self.dtype = dtype
        self.path = Path(path)
        self.tables = TargetTables.from_weights(self.model.state_dict())

    @torch.no_grad()
    def features(self, tokens: Int[Tensor, "B L"], context: ContextConfig) -> Seen:
        """Run the target over texts that are padded at their ends, which no token before sees."""
        taps: dict[int, Tensor] = {}
        layers: nn.ModuleList = self.model.model.layers
        handles = [
            layers[i].register_forward_hook(_keep_in(taps, i)) for i in context.target_layers
        ]
        try:
            output = self.model.model(tokens, use_cache=bool(context.kv_layers))
        finally:
            for handle in handles:
                handle.remove()
        hidden = [taps[i] for i in context.target_layers]
        kept = [output.past_key_values.layers[i] for i in context.kv_layers]
        features = TargetFeatures(
            torch.stack(hidden, dim=-2) if hidden else None,
            _by_token([layer.keys for layer in kept]),
            _by_token([layer.values for layer in kept]),
        )
        return Seen(features, output.last_hidden_state)

    @torch.no_grad()
    def stream_rms(self, tokens: Int[Tensor, "B L"], layer: int) -> float:
        """Median RMS of the residual stream before a layer. Host sync."""
        taps: dict[int, Tensor] = {}

        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            taps[layer] = args[0] if args else kwargs["hidden_states"]

        handle = self.model.model.layers[layer].register_forward_pre_hook(keep, with_kwargs=True)
        try:
            self.model.model(tokens, use_cache=False)
        finally:
            handle.remove()
        return float(taps[layer].float().pow(2).mean(-1).sqrt().median())


def _keep_in(taps: dict[int, Tensor], layer: int) -> Any:
    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        taps[layer] = output[0] if isinstance(output, tuple) else output

    return keep


def _by_token(layers: list[Tensor]) -> Tensor | None:
    """m tensors [B, G, L, C] to [B, L, m, G, C]."""
    return torch.stack(layers, dim=1).permute(0, 3, 1, 2, 4) if layers else None
