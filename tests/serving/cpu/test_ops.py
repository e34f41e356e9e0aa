"""The short forms of RMSNorm and rotary embedding equal SGLang's portable ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specstack_serving import sglang_compat as sgl
from specstack_serving.cpu.ops import forward_rms_norm, forward_rope, is_next_to

TOKENS = [1, 5, 64]


def make_norm(size: int) -> Any:
    norm = sgl.RMSNorm(size, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    return norm.requires_grad_(False)


def make_rope(**changes: Any) -> SimpleNamespace:
    """The attributes that both forms read; the real class needs a running engine."""
    angles = torch.rand(100, 8) * 6
    rope = SimpleNamespace(
        is_neox_style=True,
        rotary_dim=16,
        head_size=16,
        cos_sin_cache=torch.cat([angles.cos(), angles.sin()], dim=-1),
        _apply_rotary_emb_wrapped=sgl.apply_rotary_emb,
    )
    vars(rope).update(changes)
    rope.forward_native = lambda *args: sgl.RotaryEmbedding.forward_native(rope, *args)
    return rope


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_rms_norm(num_tokens: int) -> None:
    norm = make_norm(48)
    x, residual = torch.randn(num_tokens, 48), torch.randn(num_tokens, 48)
    torch.testing.assert_close(forward_rms_norm(norm, x), norm.forward_native(x))
    expected = norm.forward_native(x.clone(), residual.clone())
    torch.testing.assert_close(forward_rms_norm(norm, x, residual), expected)


def test_rms_norm_of_bfloat16_is_the_portable_one() -> None:
    norm = make_norm(48)
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    assert torch.equal(forward_rms_norm(norm, x), norm.forward_native(x))


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("adjacent", [True, False])
def test_rope(num_tokens: int, adjacent: bool) -> None:
    rope = make_rope()
    positions = torch.randint(100, (num_tokens,))
    projected = torch.randn(num_tokens, 16 * 7)
    query, key, _ = projected.split([64, 32, 16], dim=-1)
    if not adjacent:
        key = key.clone()
    assert is_next_to(query, key) == adjacent
    kept = projected.clone()
    expected = rope.forward_native(positions, query, key)
    torch.testing.assert_close(forward_rope(rope, positions, query, key), expected)
    assert torch.equal(projected, kept)


def test_rope_follows_a_grown_table() -> None:
    rope = make_rope()
    query, key = torch.randn(2, 32), torch.randn(2, 16)
    positions = torch.tensor([0, 99])
    forward_rope(rope, positions, query, key)
    rope.cos_sin_cache = torch.cat([rope.cos_sin_cache.flip(0), rope.cos_sin_cache])
    expected = rope.forward_native(positions + 60, query, key)
    torch.testing.assert_close(forward_rope(rope, positions + 60, query, key), expected)


def test_partial_and_interleaved_rotation_is_the_portable_one() -> None:
    query, key, positions = torch.randn(2, 64), torch.randn(2, 32), torch.tensor([3, 50])
    for rope in (make_rope(head_size=32), make_rope(is_neox_style=False)):
        expected = rope.forward_native(positions, query, key)
        for got, want in zip(forward_rope(rope, positions, query, key), expected, strict=True):
            assert torch.equal(got, want)
