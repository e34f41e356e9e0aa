"""FlashInfer without a GPU: its own Python, and the lines of its kernels that pack and read masks.

`host_kernels` compiles, with g++, the text of the installed package that packs a mask to bits and
the class that reads it, with the threads of a block run one after the other. `flashinfer_on_host`
lets the installed wrapper plan and run on the CPU: its launch of the attention kernel ends in a
stand-in, written here, that takes the kernel's arguments and reads the mask through that class.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SHIM = r"""
#include <climits>
#include <cstdint>
#include <limits>
#define __global__
#define __shared__
#define __device__
#define __host__
#define __forceinline__ inline
struct { int64_t x; } blockIdx, threadIdx, blockDim{256};
namespace cub {
enum BlockLoadAlgorithm { BLOCK_LOAD_VECTORIZE };
template <typename T, int THREADS, int ITEMS, BlockLoadAlgorithm>
struct BlockLoad {
  struct TempStorage {};
  BlockLoad(TempStorage&) {}
  void Load(const T* block, T (&items)[ITEMS], int64_t count, T other) {
    for (int i = 0; i < ITEMS; ++i) {
      int64_t place = threadIdx.x * ITEMS + i;
      items[i] = place < count ? block[place] : other;
    }
  }
};
}  // namespace cub
namespace math {
constexpr float inf = std::numeric_limits<float>::infinity(), log2e = 1.44269504f;
inline float ptx_rcp(float x) { return 1 / x; }
inline float tanh(float x) { return x; }
}  // namespace math
#define DEFINE_HAS_MEMBER(member)                                             \
  template <typename T, typename = void> constexpr bool has_##member##_v = false; \
  template <typename T>                                                       \
  constexpr bool has_##member##_v<T, decltype((void)((T*)0)->member)> = true;
"""
ENTRIES = r"""
struct Params {
  uint8_t* maybe_custom_mask;
  int32_t* maybe_mask_indptr;
  uint32_t qo_len, kv_len;
  float sm_scale = 1, logits_soft_cap = 0;
  float* maybe_alibi_slopes = nullptr;
  int window_left = -1;
  uint32_t get_qo_len(uint32_t) const { return qo_len; }
  uint32_t get_kv_len(uint32_t) const { return kv_len; }
};
extern "C" void segment_pack(bool* input, uint8_t* output, int32_t* input_indptr,
                             int32_t* output_indptr, int batch, bool is_little) {
  auto kernel = is_little ? SegmentPackBitsKernel<BitOrder::kLittle, int32_t>
                          : SegmentPackBitsKernel<BitOrder::kBig, int32_t>;
  for (blockIdx.x = 0; blockIdx.x < batch; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
      kernel(input, output, input_indptr, output_indptr);
}
extern "C" void read_mask(uint8_t* mask, int32_t* indptr, int request, int qo_len, int kv_len,
                          bool* sees) {
  Params params{mask, indptr, uint32_t(qo_len), uint32_t(kv_len)};
  DefaultAttention<true, false, false, false> variant(params, request, nullptr);
  for (int q = 0; q < qo_len; ++q)
    for (int k = 0; k < kv_len; ++k)
      sees[q * kv_len + k] = variant.LogitsMask(params, request, q, k, 0, 0);
}
extern "C" float transform_output(float output, float highest, float total) {
  uint8_t mask = 0;
  int32_t indptr[2] = {0, 1};
  Params params{&mask, indptr, 1, 1};
  DefaultAttention<true, false, false, false> variant(params, 0, nullptr);
  return variant.OutputTransform(params, output, 0, 0, 0, highest, total, 1.0f);
}
"""


def _between(text: str, start: str, end: str) -> str:
    assert text.count(start) == 1, f"FlashInfer has changed: {text.count(start)} of {start!r}"
    rest = text[text.index(start) :]
    return rest[: rest.index(end)]


def _host_source(headers: Path) -> str:
    """FlashInfer's lines between our shims."""
    packing = (headers / "quantization.cuh").read_text()
    variants = (headers / "attention" / "variants.cuh").read_text()
    helpers = (headers / "attention" / "variant_helper.cuh").read_text()
    parts = [
        SHIM,
        _between(packing, "enum class BitOrder", "cudaError_t PackBits("),
        _between(helpers, "DEFINE_HAS_MEMBER(v_scale)", "}  // namespace flashinfer"),
        _between(variants, "DEFINE_HAS_MEMBER(maybe_mask_indptr)", "};  // namespace flashinfer"),
        ENTRIES,
    ]
    return "\n".join(parts)


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


class HostKernels:
    """FlashInfer's packing and reading of masks, on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.transform_output.restype = ctypes.c_float

    def segment_packbits(self, x, input_indptr, output_indptr, bitorder, y) -> None:
        """As `flashinfer::segment_packbits`: fills `y`."""
        assert input_indptr.dtype == output_indptr.dtype == torch.int32
        assert x.dtype == torch.bool
        self._library.segment_pack(
            _address(x), _address(y), _address(input_indptr), _address(output_indptr),
            len(input_indptr) - 1, ctypes.c_bool(bitorder == "little"),
        )  # fmt: skip

    def read_mask(self, mask, indptr, request, qo_len, kv_len) -> torch.Tensor:
        """What `DefaultAttention::LogitsMask` answers for every query and key of a request."""
        assert mask.dtype == torch.uint8
        assert indptr.dtype == torch.int32
        sees = torch.empty((qo_len, kv_len), dtype=torch.bool)
        self._library.read_mask(
            _address(mask), _address(indptr), request, qo_len, kv_len, _address(sees)
        )
        return sees

    def transform_output(self, output: float, highest: float, total: float) -> float:
        """What a row writes, given its sum of weighted values, highest score and sum of weights."""
        floats = (ctypes.c_float(x) for x in (output, highest, total))
        return float(self._library.transform_output(*floats))


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory) -> HostKernels:
    """Skips where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile FlashInfer's lines with")
    import flashinfer

    headers = Path(flashinfer.__file__).parent / "data" / "include" / "flashinfer"
    folder = tmp_path_factory.mktemp("flashinfer")
    source, library = folder / "host.cpp", folder / "host.so"
    source.write_text(_host_source(headers))
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(command, check=True)
    return HostKernels(ctypes.CDLL(str(library)))


def paged_run_names(get_module: Callable) -> list[str]:
    """The parameters of the op that FlashInfer's wrapper launches, from its text."""
    tree = ast.parse(inspect.getsource(get_module))
    (op,) = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "paged_run"
    ]  # fmt: skip
    return [arg.arg for arg in op.args.args]


class HostPrefill:
    """Stands for the compiled module of FlashInfer's fa2 prefill."""

    def __init__(self, kernels: HostKernels, run_names: list[str]) -> None:
        self._kernels = kernels
        self._run_names = run_names
        self.plans: list[tuple] = []

    def plan(self, *args) -> list[int]:
        self.plans.append(args)
        return [0]

    def paged_run(self, *args) -> None:
        call = SimpleNamespace(**dict(zip(self._run_names, args, strict=False)))
        assert call.mask_mode == 2, "MaskMode.CUSTOM"
        assert call.layout == 0, "NHD"
        assert call.maybe_prefix_len_ptr is None
        keys, values = call.paged_k_cache, call.paged_v_cache
        group = call.q.shape[1] // keys.shape[2]
        for b in range(len(call.qo_indptr) - 1):
            first, last = call.qo_indptr[b], call.qo_indptr[b + 1]
            pages = call.paged_kv_indices[call.paged_kv_indptr[b] : call.paged_kv_indptr[b + 1]]
            assert keys.shape[1] == call.paged_kv_last_page_len[b] == 1
            k, v = (x[pages, 0].double().repeat_interleave(group, dim=1) for x in (keys, values))
            sees = self._kernels.read_mask(
                call.maybe_custom_mask, call.maybe_mask_indptr, b, int(last - first), len(pages)
            )
            scores = torch.einsum("qhc,khc->hqk", call.q[first:last].double(), k) * call.sm_scale
            weights = scores.masked_fill(~sees, float("-inf")).softmax(-1).nan_to_num()
            call.o[first:last] = torch.einsum("hqk,khc->qhc", weights, v).to(call.o.dtype)


@pytest.fixture
def flashinfer_on_host(monkeypatch, host_kernels) -> HostPrefill:
    """The installed wrapper on the CPU; returns what its launches end in."""
    from flashinfer import prefill

    # The package names a function like the module.
    packing = importlib.import_module("flashinfer.quantization.packbits")
    stand_in = HostPrefill(host_kernels, paged_run_names(prefill.get_batch_prefill_module))
    empty = torch.empty

    def unpinned(*args, pin_memory=False, **kwargs):
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(prefill, "get_batch_prefill_module", lambda backend, *args: stand_in)
    monkeypatch.setattr(packing, "get_quantization_module", lambda: host_kernels)
    return stand_in
