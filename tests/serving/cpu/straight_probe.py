"""Run a model folder twice on SGLang's model runner, straightened and as SGLang has it.

Prints JSON: whether it was straightened, and whether prefill and decode gave the same bits, with
and without captured layers. A process of its own, because an engine's globals stay.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

PROMPTS = [[5, 9, 23, 41, 2, 7, 7, 30, 11], [3, 1, 4, 15, 9, 26, 5, 35, 8]]


def outputs(inner: Any, bench: Any, one_batch: Any) -> dict[str, torch.Tensor]:
    """What `inner` returns for a prefill and two decode steps, with and without captures."""
    found: dict[str, torch.Tensor] = {}
    forward = inner.forward
    for name, layers in {"plain": [], "captured": [0, 1, 2]}.items():
        inner.layers_to_capture = layers
        results: list[Any] = []

        def record(*args: Any, results: list[Any] = results, **kwargs: Any) -> Any:
            results.append(forward(*args, **kwargs))
            return results[-1][0] if layers else results[-1]  # noqa: B023

        inner.forward = record
        requests = one_batch.prepare_synthetic_inputs_for_latency_test(2, 9, PROMPTS)
        tokens, _, batch = bench.extend(requests)
        for _ in range(2):
            tokens, _ = bench.decode(tokens, batch)
        for call, result in enumerate(results):
            tensors = [result[0], *result[1]] if layers else [result]
            found |= {f"{name}/{call}/{i}": tensor.clone() for i, tensor in enumerate(tensors)}
    inner.forward = forward
    return found


def main(folder: str) -> None:
    from sglang.srt import platforms

    from specstack_serving.cpu.platform import SpecstackCpuPlatform, install

    platforms._current_platform = SpecstackCpuPlatform()  # before anything of the engine looks
    install()
    from sglang.benchmark import one_batch
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, ServerArgs

    args = ServerArgs(
        model_path=folder,
        device="cpu",
        dtype="float32",
        attention_backend="specstack_cpu",
        max_total_tokens=512,
        max_running_requests=16,
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        log_level="error",
    )
    args.resolve_once()
    rank = spawn_world_rank(args, tp_rank=0, pp_rank=0)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    one_batch._init_process_global_configs()
    bench, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    inner = bench.torch_runner.model.model
    straight = "forward" in vars(inner)
    ours: dict[str, torch.Tensor] = {}
    if straight:
        ours = outputs(inner, bench, one_batch)
        del inner.forward
    theirs = outputs(inner, bench, one_batch)
    different = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    print(json.dumps({"straight": straight, "compared": list(ours), "different": different}))


if __name__ == "__main__":
    main(sys.argv[1])
