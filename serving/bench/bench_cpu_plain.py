"""What the CPU platform buys: `python serving/bench/bench_cpu_plain.py [--model PATH]`.

Two processes hold the same model, one with SGLang's portable layers and torch_native attention,
one with packed linears and specstack_cpu. They take turns in every round, so that other load on
the machine hits both; printed are medians, and the ratio as the median of the rounds' ratios.
Forwards run on the model runner directly: no scheduler, tokenizer or HTTP is in these times.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from specstack.models.packaged import ensure

CONCURRENCY = (1, 4, 16)
WINDOWS = (1, 2, 4, 8, 16, 32)
PROMPT = 200
STEPS_PER_TURN = 4


class Runner:
    """One model runner with a prefilled batch per concurrency."""

    def __init__(self, model: str, backend: str) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
        from sglang.srt.server_args import PortArgs, ServerArgs

        args = ServerArgs(
            model_path=model,
            device="cpu",
            dtype="float32",
            attention_backend=backend,
            max_total_tokens=16384,
            max_running_requests=32,
            mem_fraction_static=0.3,
            disable_radix_cache=True,
            log_level="error",
        )
        args.resolve_once()
        rank = spawn_world_rank(args, tp_rank=0, pp_rank=0)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
        one_batch._init_process_global_configs()
        self.bench, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
        self.runner = self.bench.torch_runner
        self.batches = {size: self._prefill(one_batch, size) for size in CONCURRENCY}

    def _prefill(self, one_batch: Any, size: int) -> list[Any]:
        requests = one_batch.prepare_synthetic_inputs_for_latency_test(size, PROMPT)
        tokens, _, batch = self.bench.extend(requests)
        return [tokens, batch]

    def decode(self, size: int) -> float:
        """Milliseconds of a decode step (median of a few)."""
        state = self.batches[size]
        times = []
        for _ in range(STEPS_PER_TURN):
            started = time.perf_counter()
            state[0], _ = self.bench.decode(state[0], state[1])
            times.append(1e3 * (time.perf_counter() - started))
        return statistics.median(times)

    def verify(self, num_nodes: int) -> float:
        """Milliseconds to verify one request's chain of that many nodes (median of a few)."""
        import torch
        from sglang.srt.model_executor.forward_batch_info import (
            CaptureHiddenMode,
            ForwardBatch,
            ForwardMode,
        )
        from sglang.srt.speculative.eagle_info import EagleVerifyInput

        batch = self.batches[1][1]
        start = int(batch.seq_lens[0])
        allocator = self.runner.token_to_kv_pool_allocator
        slots = allocator.alloc(num_nodes)
        row = self.runner.req_to_token_pool.req_to_token[batch.req_pool_indices[0]]
        row[start : start + num_nodes] = slots.int()
        saved = batch.input_ids, batch.out_cache_loc, batch.spec_info, batch.forward_mode
        batch.input_ids, batch.out_cache_loc = torch.arange(num_nodes) + 100, slots
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.spec_info = EagleVerifyInput(
            draft_token=batch.input_ids,
            custom_mask=torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril().flatten(),
            positions=torch.arange(start, start + num_nodes),
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            spec_steps=num_nodes,
            topk=2,
            draft_token_num=num_nodes,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=batch.seq_lens_cpu,
        )
        times = []
        for _ in range(STEPS_PER_TURN):
            started = time.perf_counter()
            forward = ForwardBatch.init_new(
                batch,
                self.runner,
                capture_hidden_mode=CaptureHiddenMode.FULL,
                return_hidden_states_before_norm=False,
            )
            with torch.no_grad():
                self.runner.forward(forward)
            times.append(1e3 * (time.perf_counter() - started))
        batch.input_ids, batch.out_cache_loc, batch.spec_info, batch.forward_mode = saved
        allocator.free(slots)
        return statistics.median(times)


def serve(packed: bool, model: str, connection: Connection) -> None:
    """Hold one runner and answer (method, argument) with milliseconds until None comes."""
    from sglang.srt import platforms
    from sglang.srt.platforms.interface import SRTPlatform

    from specstack_serving.cpu.platform import SpecstackCpuPlatform, install

    class PortablePlatform(SpecstackCpuPlatform):
        """The least that stock SGLang needs to start: only the KV pool is replaced."""

        init_backend = SRTPlatform.init_backend
        get_dispatch_key_name = SRTPlatform.get_dispatch_key_name
        post_load_model = SRTPlatform.post_load_model

    platforms._current_platform = SpecstackCpuPlatform() if packed else PortablePlatform()
    install()
    runner = Runner(model, "specstack_cpu" if packed else "torch_native")
    connection.send("ready")
    while (request := connection.recv()) is not None:
        method, argument = request
        connection.send(getattr(runner, method)(argument))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of a float32 model (default: the packaged one)")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    model = options.model or str(ensure("smollm2-135m-instruct"))

    from specstack_serving.cpu.platform import install

    install()  # for its limit on spinning, which both sides inherit
    context = multiprocessing.get_context("spawn")
    sides: list[Connection] = []
    for packed in (False, True):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(packed, model, theirs), daemon=True).start()
        ours.recv()
        sides.append(ours)
    stock, ours = sides

    def ask(side: Connection, method: str, argument: int) -> float:
        side.send((method, argument))
        return float(side.recv())

    print("| requests | stock ms | specstack_cpu ms | stock tok/s | specstack_cpu tok/s | ratio |")
    print("|---|---|---|---|---|---|")
    for size in CONCURRENCY:
        pairs = [
            (ask(stock, "decode", size), ask(ours, "decode", size)) for _ in range(options.rounds)
        ]
        before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(
            f"| {size} | {before:.0f} | {after:.0f} | {1e3 * size / before:.1f} "
            f"| {1e3 * size / after:.1f} | {ratio:.2f} |"
        )
    print("\n| verified nodes, 1 request | ms |\n|---|---|")
    turns = [[ask(ours, "verify", n) for n in WINDOWS] for _ in range(options.rounds)]
    for nodes, column in zip(WINDOWS, zip(*turns, strict=True), strict=True):
        print(f"| {nodes} | {statistics.median(column):.0f} |")
    for side in sides:
        side.send(None)


if __name__ == "__main__":
    main()
