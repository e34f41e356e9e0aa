"""FlashInfer's sampling kernels, and how they differ from `reference.filter_probs`.

- Ties: FlashInfer keeps by value, so all tokens that tie at a cut stay; the reference ranks ties by
  token id and keeps exactly top_k. With distinct probabilities both keep the same tokens.
- The border of top-p: a token stays while the mass above it is below top_p; at most, in the
  reference. They differ only where a partial sum equals top_p.
- top_p = 1: FlashInfer's kernel compares rounded sums and may drop a tail; here, as in the
  reference, such a row is not cut.
- Order: chained renormalisation lets top-p see what top-k left ("top_k_first", what SGLang's GPU
  sampler does where a request has a min-p); the reference cuts the same unfiltered probabilities
  with both ("joint", SGLang otherwise). `filter_probs` here is joint.
- Random numbers: the samplers draw their own (Philox, by seed, offset and row), where ours take
  uniforms. The law is the same, the tokens are not those of `invert_cdf`, and the token of a seed
  depends on the row of the batch.

A verify rule is lossless with respect to the law that it is given: plain decoding must use the same
filter, these differences included. FlashInfer is imported, and its kernels are built, on first use.
`chain_speculative_sampling` has no adapter: its `output_accepted_token_num` counts positions one by
one, and its randomness is its own. Letters: B requests, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def _sampling() -> Any:
    import flashinfer.sampling

    return flashinfer.sampling


def softmax(logits: Float[Tensor, "B V"], temperature: Float[Tensor, " B"]) -> Float[Tensor, "B V"]:
    """Probabilities at each request's temperature, float32. Host sync: none."""
    probs: Tensor = _sampling().softmax(logits, temperature)
    return probs


def top_k_renorm_probs(
    probs: Float[Tensor, "B V"], top_k: Int[Tensor, " B"]
) -> Float[Tensor, "B V"]:
    """Keep probabilities down to the top_k-th largest, ties included. Host sync: none.

    The sums do not depend on the order in which blocks finish: equal inputs give equal bits.
    """
    kept: Tensor = _sampling().top_k_renorm_probs(probs, top_k, is_deterministic=True)
    return kept


def top_p_renorm_probs(
    probs: Float[Tensor, "B V"], top_p: Float[Tensor, " B"]
) -> Float[Tensor, "B V"]:
    """Keep the largest probabilities while the mass above them is below top_p, ties included.

    A row with top_p = 1 stays as it is. Deterministic as `top_k_renorm_probs`. Host sync: none.
    """
    kept: Tensor = _sampling().top_p_renorm_probs(probs, top_p, is_deterministic=True)
    return torch.where(top_p[:, None] < 1, kept, probs)


def min_p_renorm_probs(
    probs: Float[Tensor, "B V"], min_p: Float[Tensor, " B"]
) -> Float[Tensor, "B V"]:
    """Keep what is at least min_p times the largest: torch's, as FlashInfer only samples so.

    Host sync: none.
    """
    kept = probs.masked_fill(probs < probs.amax(dim=-1, keepdim=True) * min_p[:, None], 0)
    return kept / kept.sum(dim=-1, keepdim=True)


def filter_probs(
    logits: Float[Tensor, "B V"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    min_p: Float[Tensor, " B"],
    *,
    use_top_k_top_p: bool = True,
) -> Float[Tensor, "B V"]:
    """As `reference.filter_probs`, but for ties and the border of top-p. Host sync: none.

    Both cuts look at the unfiltered probabilities: a token stays if each keeps it.
    """
    probs = softmax(logits, temperature)
    if use_top_k_top_p:
        is_kept = (top_k_renorm_probs(probs, top_k) > 0) & (top_p_renorm_probs(probs, top_p) > 0)
        probs = probs.masked_fill(~is_kept, 0)
    return min_p_renorm_probs(probs, min_p)


def sample_from_probs(
    probs: Float[Tensor, "B V"], seed: Int[Tensor, " B"], offset: Int[Tensor, " B"]
) -> Int[Tensor, " B"]:
    """Draw one token of each row, int64. Host sync: none.

    Args:
        seed: of the Philox generator; tensors, so that a CUDA graph reads them anew.
        offset: to be raised by at least 4 between draws of a row.
    """
    tokens: Tensor = _sampling().sampling_from_probs(probs, seed=seed, offset=offset)
    return tokens.to(torch.int64)


def sample_top_k_top_p(
    probs: Float[Tensor, "B V"],
    top_k: Int[Tensor, " B"],
    top_p: Float[Tensor, " B"],
    seed: Int[Tensor, " B"],
    offset: Int[Tensor, " B"],
) -> Int[Tensor, " B"]:
    """Draw from the joint cut by rejection, without sorting or renormalising. Host sync: none.

    Args:
        offset: as in `sample_from_probs`; FlashInfer itself reserves 32 per draw.
    """
    tokens: Tensor = _sampling().top_k_top_p_sampling_from_probs(
        probs, top_k, top_p, filter_apply_order="joint", seed=seed, offset=offset
    )
    return tokens.to(torch.int64)


def sample_min_p(
    probs: Float[Tensor, "B V"],
    min_p: Float[Tensor, " B"],
    seed: Int[Tensor, " B"],
    offset: Int[Tensor, " B"],
) -> Int[Tensor, " B"]:
    """Draw from what is at least min_p times the largest. Host sync: none."""
    tokens: Tensor = _sampling().min_p_sampling_from_probs(probs, min_p, seed=seed, offset=offset)
    return tokens.to(torch.int64)
