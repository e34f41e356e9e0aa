"""What the adapters rely on in the installed FlashInfer: names, defaults, bits, a few lines.

Nothing here runs on a GPU. The packing and the reading of masks are FlashInfer's own lines,
compiled for the CPU (`host_kernels`); what its kernels do beside them is read, not run.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from specstack_kernels import ops

flashinfer = pytest.importorskip("flashinfer")

from flashinfer import sampling  # noqa: E402
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper  # noqa: E402
from flashinfer.quantization import segment_packbits  # noqa: E402

HEADERS = Path(flashinfer.__file__).parent / "data" / "include" / "flashinfer"

POSITIONAL = [
    (BatchPrefillWithPagedKVCacheWrapper.__init__, "self float_workspace_buffer kv_layout"),
    (
        BatchPrefillWithPagedKVCacheWrapper.plan,
        "self qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads "
        "num_kv_heads head_dim_qk page_size",
    ),
    (BatchPrefillWithPagedKVCacheWrapper.run, "self q paged_kv_cache"),
    (sampling.softmax, "logits temperature"),
    (sampling.top_k_renorm_probs, "probs top_k"),
    (sampling.top_p_renorm_probs, "probs top_p"),
    (sampling.sampling_from_probs, "probs"),
    (sampling.min_p_sampling_from_probs, "probs min_p"),
    (sampling.top_k_top_p_sampling_from_probs, "probs top_k top_p"),
    (segment_packbits, "x indptr bitorder"),
]
"""Parameters that are passed by place, in their order."""

DEFAULTS = [
    (
        BatchPrefillWithPagedKVCacheWrapper.__init__,
        {
            "use_cuda_graph": False, "qo_indptr_buf": None, "paged_kv_indptr_buf": None,
            "paged_kv_indices_buf": None, "paged_kv_last_page_len_buf": None,
            "custom_mask_buf": None, "mask_indptr_buf": None, "backend": "auto", "jit_args": None,
            "variant_owns_mask": False,
        },
    ),
    (
        BatchPrefillWithPagedKVCacheWrapper.plan,
        {
            "head_dim_vo": None, "custom_mask": None, "packed_custom_mask": None, "causal": False,
            "pos_encoding_mode": "NONE", "use_fp16_qk_reduction": False, "sm_scale": None,
            "window_left": -1, "logits_soft_cap": None, "q_data_type": "float16",
            "kv_data_type": None, "o_data_type": None, "non_blocking": True, "prefix_len_ptr": None,
            "seq_lens": None, "fixed_split_size": None, "disable_split_kv": False,
        },
    ),
    (
        BatchPrefillWithPagedKVCacheWrapper.run,
        {"q_scale": None, "k_scale": None, "v_scale": None, "out": None, "return_lse": False,
         "window_left": None, "sinks": None},
    ),
    (sampling.top_k_renorm_probs, {"is_deterministic": False}),
    (sampling.top_p_renorm_probs, {"is_deterministic": False}),
    (
        sampling.sampling_from_probs,
        {"indices": None, "deterministic": True, "seed": None, "offset": None,
         "return_valid": False},
    ),
    (
        sampling.min_p_sampling_from_probs,
        {"indices": None, "deterministic": True, "seed": None, "offset": None,
         "return_valid": False},
    ),
    (
        sampling.top_k_top_p_sampling_from_probs,
        {"indices": None, "filter_apply_order": "top_k_first", "deterministic": True,
         "seed": None, "offset": None, "return_valid": False},
    ),
    (segment_packbits, {"bitorder": "big"}),
]  # fmt: skip
"""Parameters that are passed by name or left alone, and what they are when left alone."""


def name_of(parameter) -> str:
    return getattr(parameter, "__name__", "")


def positional_faults(function, names: str) -> list[str]:
    found = list(inspect.signature(function).parameters)[: len(names.split())]
    return [] if found == names.split() else [f"{function.__qualname__}: {found}"]


def default_faults(function, expected: dict) -> list[str]:
    parameters = inspect.signature(function).parameters
    found = {name: parameters[name].default for name in expected if name in parameters}
    return [
        f"{function.__qualname__}: {name} is {found.get(name, 'missing')}, not {value!r}"
        for name, value in expected.items()
        if name not in found or found[name] != value
    ]


@pytest.mark.parametrize(("function", "names"), POSITIONAL, ids=name_of)
def test_places_of_parameters(function, names):
    assert positional_faults(function, names) == []


@pytest.mark.parametrize(("function", "expected"), DEFAULTS, ids=name_of)
def test_names_and_defaults_of_parameters(function, expected):
    assert default_faults(function, expected) == []


def test_a_renamed_parameter_is_caught():
    def renamed(probs, k, deterministic=False): ...

    def other_default(probs, top_k, is_deterministic=True): ...

    assert positional_faults(renamed, "probs top_k") != []
    assert default_faults(renamed, {"is_deterministic": False}) != []
    assert default_faults(other_default, {"is_deterministic": False}) != []


def test_the_mask_decides_the_backend():
    """fa3 does not take a custom mask, so the adapter names fa2."""
    from flashinfer.utils import is_fa3_backend_supported

    arguments = (0, False, True, torch.bfloat16, torch.bfloat16)
    assert not is_fa3_backend_supported(*arguments)
    assert is_fa3_backend_supported(0, False, False, *arguments[3:])


def test_importing_the_adapters_imports_no_flashinfer():
    code = (
        "import sys; import specstack_kernels.ops, specstack_kernels.flashinfer.sampling, "
        "specstack_kernels.flashinfer.tree_attention; "
        "sys.exit(any(name.split('.')[0] == 'flashinfer' for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def flags(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    return torch.rand(int(offsets[-1]), generator=random) < 0.5, offsets


@pytest.mark.parametrize(
    "lengths",
    [[1], [8], [7, 9, 16], [5, 0, 3], [2048, 2049, 4097], [64 * (100 + 64), 64 * 65]],
    ids=str,
)
@pytest.mark.usefixtures("flashinfer_on_host")
def test_bits_are_those_of_flashinfer_and_numpy(lengths):
    """Its `segment_packbits` runs on the CPU, down to the lines of its kernel."""
    full, offsets = flags(lengths)
    num_bytes = sum((length + 7) // 8 for length in lengths)
    packed, byte_offsets = ops.pack_bits(full, offsets, num_bytes=num_bytes)
    theirs, their_offsets = segment_packbits(full, offsets, bitorder="little")
    assert torch.equal(packed, theirs)
    assert byte_offsets.tolist() == their_offsets.tolist()
    segments = [full[offsets[b] : offsets[b + 1]].numpy() for b in range(len(lengths))]
    numpy = np.concatenate([np.packbits(segment, bitorder="little") for segment in segments])
    assert packed.tolist() == numpy.tolist()


@pytest.mark.usefixtures("flashinfer_on_host")
def test_another_bit_order_is_another_mask():
    full, offsets = flags([16, 24])
    packed, _ = ops.pack_bits(full, offsets, num_bytes=5)
    theirs, _ = segment_packbits(full, offsets, bitorder="big")
    assert not torch.equal(packed, theirs)


@pytest.mark.parametrize("nodes", [1, 3, 8, 17])
def test_its_attention_reads_our_masks(host_kernels, nodes):
    """Every bit of every request, by the class that its attention kernels mask with."""
    seq_lens = torch.tensor([0, 5, 12, 1])
    random = torch.Generator().manual_seed(nodes)
    tree_mask = torch.rand((4, nodes, nodes), generator=random) < 0.5
    tree = ops.pack_tree_mask(tree_mask, seq_lens, num_tokens=18)
    num_bytes = sum((nodes * (length + nodes) + 7) // 8 for length in seq_lens.tolist())
    packed, byte_offsets = ops.pack_bits(tree.full, tree.offsets, num_bytes=num_bytes)
    for b, length in enumerate(seq_lens.tolist()):
        sees = host_kernels.read_mask(packed, byte_offsets.int(), b, nodes, length + nodes)
        assert sees[:, :length].all()
        assert torch.equal(sees[:, length:], tree_mask[b])


def test_a_row_that_sees_nothing_is_zero(host_kernels):
    assert host_kernels.transform_output(3.0, float("-inf"), 1.0) == 0
    assert host_kernels.transform_output(3.0, 0.0, 2.0) == 1.5


LINES = [
    ("topk.cuh", "(val >= pivot) ? DType(float(val) * normalizer) : DType(0);"),
    ("air_top_p.cuh", "if (pass == 0) currentSum = blockSum * counter->p;"),
    ("air_top_p.cuh", "if ((prev + histPtr[i]) >= currentSum) break;"),
    ("air_top_p.cuh", "if (val >= threshold) threadSum += static_cast<float>(val);"),
    ("sampling.cuh", "if (aggregate_gt_pivot_0 < top_p) {"),
    (
        "sampling.cuh",
        "if (aggregate_gt_pivot_0.count < k && aggregate_gt_pivot_0.value < p) {",
    ),
    ("sampling.cuh", "float pivot = max_val * p;"),
    ("sampling.cuh", "[&](float x) { return x >= pivot; }, u, probs_vec"),
]
"""What `flashinfer/sampling.py` says of ties and borders follows from these."""


@pytest.mark.parametrize(("header", "line"), LINES)
def test_lines_that_decide_ties_and_borders(header, line):
    text = " ".join((HEADERS / header).read_text().split())
    assert line in text
