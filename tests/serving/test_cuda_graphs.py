"""Captured verify steps, as far as a machine without a GPU can tell; the rest is marked `gpu`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specstack.graph_shapes import GraphShape
from specstack_serving import contract
from specstack_serving import sglang_compat as sgl
from specstack_serving.cuda_graphs import GraphRunners
from specstack_serving.verify_input import TreeVerifyInput

pytest.importorskip("sglang")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
SHAPES = tuple(GraphShape(width=w, max_batch=b) for w, b in ((1, None), (4, 8), (17, 3)))
FULL = sgl.CaptureHiddenMode.FULL


class PlugInAlgorithm:
    """As far as the engine is concerned: none of its own."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("is_"):
            raise AttributeError(name)
        return lambda: name == "is_speculative"


class Eagle(PlugInAlgorithm):
    def is_eagle(self) -> bool:
        return True


def model_runner(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        spec_algorithm=PlugInAlgorithm(), is_draft_worker=False, init_new_workspace=False, **fields
    )


def graph_runner(engine: Any, width: int = 4, **fields: Any) -> SimpleNamespace:
    """The fields that the engine's own functions read of a DecodeCudaGraphRunner."""
    return SimpleNamespace(
        model_runner=engine,
        buffers=SimpleNamespace(custom_mask=torch.ones(64, dtype=torch.bool)),
        captured_req_width=width,
        **fields,
    )


class TestTheInputOfACapture:
    real = staticmethod(sgl.resolve(sgl.SEAMS["DecodeCudaGraphRunner_get_spec_info"].path))

    def test_the_engine_makes_none_for_a_plug_in(self) -> None:
        """What the hooks are for. If it ever makes one, they hide it: this must fail first."""
        engine = model_runner()
        assert self.real(graph_runner(engine), 8) is None
        dummy = sgl.create_dummy_verify_input
        with sgl.resolve("sglang.srt.runtime_context:get_context")().override_server_args():
            assert dummy(engine.spec_algorithm, torch.ones(4), 4, False) is None

    def test_the_hook_gives_a_tree_with_the_static_mask_the_width_and_the_hidden_mode(
        self,
    ) -> None:
        engine = model_runner()
        runner = graph_runner(engine)
        made = GraphRunners(SHAPES, engine, FULL).captured_input(self.real, runner, 8)
        assert isinstance(made, TreeVerifyInput)
        assert made.custom_mask is runner.buffers.custom_mask, "the graph reads this address"
        assert (made.draft_token_num, made.num_tokens_per_req) == (4, 4)
        assert made.capture_hidden_mode == FULL
        assert (made.tree_topk, made.max_tree_depth) == (-1, 4)

    def test_a_drafter_that_taps_nothing_captures_no_hidden_states(self) -> None:
        engine = model_runner()
        mode = sgl.CaptureHiddenMode.NULL
        made = GraphRunners(SHAPES, engine, mode).captured_input(self.real, graph_runner(engine), 8)
        required = sgl.resolve(
            "sglang.srt.model_executor.forward_batch_info:get_required_capture_hidden_mode"
        )
        assert required(mode, made) == mode
        assert required(mode, GraphRunners(SHAPES, engine, FULL)._verify_input(None, 4)) == FULL

    def test_another_algorithm_of_the_process_keeps_its_own(self) -> None:
        other = model_runner()
        original = lambda runner, num_tokens: (runner, num_tokens)  # noqa: E731
        hooks, runner = GraphRunners(SHAPES, model_runner(), FULL), graph_runner(other)
        assert hooks.captured_input(original, runner, 8) == (runner, 8)
        dummy = lambda *args: args  # noqa: E731
        kept = hooks.dummy_input(dummy, other.spec_algorithm, None, 4, False)
        assert kept == (other.spec_algorithm, None, 4, False)

    def test_the_warm_up_has_the_same_input(self) -> None:
        engine, mask = model_runner(), torch.ones(5, dtype=torch.bool)
        made = GraphRunners(SHAPES, engine, FULL).dummy_input(
            lambda *_: None, engine.spec_algorithm, mask, 17, False
        )
        assert isinstance(made, TreeVerifyInput)
        assert made.custom_mask is mask
        assert made.draft_token_num == 17


class TestWhatAttentionReads:
    """The engine's own capture code on our input, and on the missing one."""

    def test_triton_captures_with_the_mask_and_the_width(self) -> None:
        backend = pytest.importorskip("sglang.srt.layers.attention.triton_backend")
        make = backend.TritonAttnBackend._build_cuda_graph_forward_metadata
        width_of = backend.TritonAttnBackend._target_verify_num_tokens_per_req
        mask = torch.zeros(99, dtype=torch.uint8)
        indptr = torch.zeros(9)
        fake = SimpleNamespace(
            sliding_window_size=None, _verify_mask=SimpleNamespace(buffer=mask),
            target_verify_num_tokens_per_req=17, kv_indptr=indptr, qo_indptr=indptr,
            mask_indptr=indptr, cuda_graph_kv_indices=indptr,
        )  # fmt: skip
        fake._target_verify_num_tokens_per_req = lambda spec: width_of(fake, spec)
        mode = sgl.ForwardMode.TARGET_VERIFY
        ours = GraphRunners(SHAPES, model_runner(), FULL)._verify_input(torch.ones(9), 4)
        captured = make(fake, 2, mode, ours)
        assert captured.custom_mask is mask
        assert captured.max_extend_len == 4
        without = make(fake, 2, mode, None)
        assert without.custom_mask is None
        assert without.max_extend_len == 17

    def test_flashinfer_makes_masked_wrappers(self) -> None:
        backend = pytest.importorskip("sglang.srt.layers.attention.flashinfer_backend")
        prepare = backend.FlashInferAttnBackend._prepare_cuda_graph_metadata
        masked: list[bool] = []
        fake = SimpleNamespace(
            _create_prefill_wrappers=lambda bs, use: masked.append(use),
            prefill_cuda_graph_metadata={},
        )
        mode = sgl.ForwardMode.TARGET_VERIFY
        ours = GraphRunners(SHAPES, model_runner(), FULL)._verify_input(torch.ones(9), 4)
        for spec_info in (ours, None):
            prepare(fake, 2, 8, mode, spec_info)
        assert masked == [True, False]


class TestCanRun:
    real = staticmethod(
        sgl.resolve(
            "sglang.srt.model_executor.runner.decode_cuda_graph_runner:"
            "DecodeCudaGraphRunner.can_run_graph"
        )
    )

    @pytest.mark.parametrize(
        ("width", "batch", "can_run"), [(4, 2, True), (4, 8, True), (5, 2, False), (4, 9, False)]
    )
    def test_a_graph_runs_its_own_width_and_batches_that_it_holds(
        self, width: int, batch: int, can_run: bool
    ) -> None:
        runner = graph_runner(
            model_runner(), ragged_verify_mode=False, require_mlp_tp_gather=False,
            enable_pdmux=False, disable_padding=False, require_mlp_sync=False, max_bs=8,
            is_encoder_decoder=False, enable_two_batch_overlap=False,
            _make_graph_key=lambda *_, **__: None, _resolve_lora_variant=lambda _: None,
        )  # fmt: skip
        ours = GraphRunners(SHAPES, model_runner(), FULL)._verify_input(None, width)
        batch_ = SimpleNamespace(replace_embeds=None, spec_info=ours, batch_size=batch)
        assert self.real(runner, batch_) is can_run


class TestBatchSizes:
    ENGINE = ([1, 2, 4, 8, 16, 32], [1, 2, 4])

    def original(self, engine: Any, width: int, **_: Any) -> tuple[list[int], list[int]]:
        return self.ENGINE

    @pytest.mark.parametrize(
        ("width", "captured", "compiled"),
        [
            (1, [1, 2, 4, 8, 16, 32], [1, 2, 4]),
            (4, [1, 2, 4, 8], [1, 2, 4]),
            (17, [1, 2, 4], [1, 2, 4]),  # 3 requests are padded to 4
            (9, [1, 2, 4, 8, 16, 32], [1, 2, 4]),  # none of ours
        ],
    )
    def test_a_width_is_captured_for_the_batches_that_the_budget_gives_it(
        self, width: int, captured: list[int], compiled: list[int]
    ) -> None:
        hooks = GraphRunners(SHAPES, model_runner(), FULL)
        found = hooks.batch_sizes(self.original, None, width, gathered_buffer_required=False)
        assert found == (captured, compiled)

    def test_the_shared_logits_hold_every_width(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The widest width has the fewest requests: its rows alone would be 68."""
        hooks = GraphRunners(SHAPES, model_runner(), FULL)
        monkeypatch.setattr(
            sgl,
            "get_batch_sizes_to_capture",
            lambda engine, width, **kw: hooks.batch_sizes(self.original, engine, width, **kw),
        )
        engine = SimpleNamespace(decode_graph_gather_requirements=lambda: (False, False))
        assert hooks.logits_rows(lambda _: 17 * 4, engine) == 68
        many = GraphRunners([*SHAPES[:1], SHAPES[2], GraphShape(width=4, max_batch=32)],
                            model_runner(), FULL)  # fmt: skip
        monkeypatch.setattr(
            sgl,
            "get_batch_sizes_to_capture",
            lambda engine, width, **kw: many.batch_sizes(self.original, engine, width, **kw),
        )
        assert many.logits_rows(lambda _: 17 * 4, engine) == 4 * 32


class Bag:
    """`get_spec()` of the engine."""

    speculative_num_draft_tokens = 17

    @contextmanager
    def override(self, **values: Any) -> Iterator[None]:
        before = self.speculative_num_draft_tokens
        self.speculative_num_draft_tokens = values["speculative_num_draft_tokens"]
        try:
            yield
        finally:
            self.speculative_num_draft_tokens = before


class TestRunners:
    def engine(self) -> Any:
        bag = self.bag

        def attention(init_new_workspace: bool) -> str:
            engine.init_new_workspace = init_new_workspace  # as the engine does
            return f"attention {bag.speculative_num_draft_tokens}"

        engine = model_runner(attn_backend="stock", _get_attention_backend=attention)
        engine.decode_cuda_graph_runner = self.captured(engine, width=17)
        return engine

    def captured(self, engine: Any, *, width: int, attn_backend: Any = None) -> Any:
        runner = graph_runner(engine, width, capture_bs=[1, 2], attn_backend=attn_backend)
        runner.get_spec_info = lambda num_tokens: self.hooks.captured_input(
            lambda *_: None, runner, num_tokens
        )
        return runner

    @pytest.fixture(autouse=True)
    def _fakes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bag = Bag()
        self.model_runner = self.engine()
        self.hooks = GraphRunners(SHAPES, self.model_runner, FULL)
        monkeypatch.setattr(sgl, "get_spec", lambda: self.bag)
        monkeypatch.setattr(
            sgl,
            "DecodeCudaGraphRunner",
            lambda engine, *, attn_backend, speculative_num_draft_tokens: self.captured(
                engine, width=speculative_num_draft_tokens, attn_backend=attn_backend
            ),
        )

    def active(self) -> tuple[Any, Any]:
        engine = self.model_runner
        return engine.attn_backend, engine.decode_cuda_graph_runner

    def test_every_width_has_a_runner_with_attention_made_for_it(self) -> None:
        before = self.active()
        self.hooks.build()
        assert self.active() == before
        assert self.bag.speculative_num_draft_tokens == 17
        assert self.model_runner.init_new_workspace is False
        for width in (1, 4):
            with self.hooks.activate(width):
                attention, graphs = self.active()
                assert attention == graphs.attn_backend == f"attention {width}"
                assert graphs.captured_req_width == width
        with self.hooks.activate(17):
            assert self.active() == before, "the engine's own capture serves the widest"

    def test_what_was_active_returns_after_an_error(self) -> None:
        self.hooks.build()
        before = self.active()
        inside = []
        with pytest.raises(RuntimeError, match="out of memory"), self.hooks.activate(4):
            self.forward_that_fails(inside)
        assert inside[0] != before == self.active()

    def forward_that_fails(self, seen: list[Any]) -> None:
        seen.append(self.active())
        raise RuntimeError("out of memory")

    def test_an_error_in_a_capture_leaves_the_engine_as_it_was(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def out_of_memory(*_: Any, **__: Any) -> None:
            raise MemoryError

        monkeypatch.setattr(sgl, "DecodeCudaGraphRunner", out_of_memory)
        with pytest.raises(MemoryError):
            self.hooks.build()
        assert self.bag.speculative_num_draft_tokens == 17
        assert self.model_runner.init_new_workspace is False

    def test_an_unplanned_width_leaves_the_engine_as_it_is(self) -> None:
        self.hooks.build()
        before = self.active()
        with self.hooks.activate(9):
            assert self.active() == before

    def test_no_capture_another_width_or_no_mask_is_an_error(self) -> None:
        self.model_runner.decode_cuda_graph_runner.get_spec_info = lambda _: None
        with pytest.raises(RuntimeError, match="with NoneType instead of a tree"):
            self.hooks.build()
        self.model_runner.decode_cuda_graph_runner.captured_req_width = 16
        with pytest.raises(RuntimeError, match="of 16 nodes per request instead of 17"):
            self.hooks.build()
        self.model_runner.decode_cuda_graph_runner = None
        with pytest.raises(RuntimeError, match="captured no verify step"):
            self.hooks.build()

    def test_an_eager_step_is_said_once_a_width(self, caplog: pytest.LogCaptureFixture) -> None:
        found = [self.hooks.fell_back(4, n, ran) for n, ran in ((2, True), (9, False), (10, False))]
        assert found == [False, True, True]
        assert [r.message[:38] for r in caplog.records] == [
            "no graph for 9 requests of 4 nodes: th"
        ]


def test_the_hooks_reach_every_name_that_the_engine_holds() -> None:
    """In a process of its own, as hooks stay: names that modules imported by value included."""
    script = """
from types import SimpleNamespace
from specstack.graph_shapes import GraphShape
from specstack_serving import sglang_compat as sgl
sgl.import_engine()
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.runner import base_runner, decode_cuda_graph_runner
from specstack_serving.cuda_graphs import GraphRunners
engine = SimpleNamespace(spec_algorithm=object())
hooks = GraphRunners([GraphShape(width=1, max_batch=None)], engine, sgl.CaptureHiddenMode.NULL)
apply, sgl.HookRegistry.apply_hooks = sgl.HookRegistry.apply_hooks, lambda: None
try:
    hooks.install()
    raise SystemExit("an engine that ignores hooks went unnoticed")
except RuntimeError as error:
    assert "did not take the hook" in str(error)
sgl.HookRegistry.reset()
sgl.HookRegistry.apply_hooks = apply
hooks.install()
held = {
    "sizes": (decode_cuda_graph_runner.get_batch_sizes_to_capture,
              model_runner.get_batch_sizes_to_capture),
    "dummy": (base_runner.create_dummy_verify_input,),
    "input": (decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info,),
    "rows": (model_runner.ModelRunner.max_decode_logits_rows,),
}
for name, functions in held.items():
    assert all(hasattr(f, "__wrapped__") for f in functions), name
made = base_runner.create_dummy_verify_input(engine.spec_algorithm, None, 3, False)
assert made.draft_token_num == 3
from sglang.srt.runtime_context import get_context
with get_context().override_server_args(speculative_num_draft_tokens=17):
    with sgl.get_spec().override(speculative_num_draft_tokens=4):
        assert sgl.get_spec().speculative_num_draft_tokens == 4
    assert sgl.get_spec().speculative_num_draft_tokens == 17
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


RELIED_UPON = [
    # file, function, what it must say, what a broken engine would say
    ("model_executor/runner/decode_cuda_graph_runner.py", "capture_prepare",
     "spec_info = self.get_spec_info(num_tokens)", "self.get_spec_info", "self.make_spec_info"),
    ("model_executor/runner/decode_cuda_graph_runner.py", "__init__",
     "self.captured_req_width = model_runner.decode_num_tokens_per_req("
     "num_draft_tokens=self.speculative_num_draft_tokens)",
     "num_draft_tokens=self.speculative_num_draft_tokens", ""),
    ("model_executor/runner/decode_cuda_graph_runner.py", "__init__",
     "self.attn_backend = attn_backend or model_runner.attn_backend", "attn_backend or ", ""),
    ("model_executor/model_runner.py", "_forward_raw",
     "ForwardContext(attn_backend=self.attn_backend)", "self.attn_backend", "self.own_backend"),
    ("model_executor/model_runner.py", "_forward_raw",
     "self.decode_cuda_graph_runner.can_run_graph(forward_batch)",
     "self.decode_cuda_graph_runner.can_run_graph", "self.graphs.can_run"),
    ("managers/scheduler.py", "init_all_cuda_graphs",
     "self.tp_worker.init_cuda_graphs()\nif self.draft_worker is not None:\n"
     "    self.draft_worker.init_cuda_graphs()", "self.draft_worker.init_cuda_graphs()", "pass"),
    ("layers/attention/triton_backend.py", "__init__",
     "self.num_draft_tokens = get_spec().speculative_num_draft_tokens",
     "get_spec().speculative_num_draft_tokens", "17"),
]  # fmt: skip


def says(source: str, function: str, statement: str) -> bool:
    """Whether any definition of `function` holds the code, however it is laid out."""
    wanted = ast.unparse(ast.parse(statement))
    return any(
        _squeezed(wanted) in _squeezed(ast.unparse(node))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == function
    )


def _squeezed(code: str) -> str:
    return "\n".join(line.strip() for line in code.splitlines())


@pytest.mark.parametrize(("file", "function", "statement", "old", "new"), RELIED_UPON)
def test_the_engine_works_as_the_runners_assume(
    file: str, function: str, statement: str, old: str, new: str
) -> None:
    root = contract.installed_root()
    assert root is not None
    source = ast.unparse(ast.parse((root / "sglang/srt" / file).read_text()))
    assert says(source, function, statement)
    assert old in source
    assert not says(source.replace(old, new), function, statement), "a changed engine must fail"


def test_the_worker_is_made_before_the_engine_captures() -> None:
    """The hooks are installed in between."""
    root = contract.installed_root()
    assert root is not None
    tree = ast.parse((root / "sglang/srt/managers/scheduler.py").read_text())
    (made,) = [n for n in ast.walk(tree)
               if isinstance(n, ast.FunctionDef) and n.name == "init_model_worker"]  # fmt: skip
    calls = [n.func.attr for n in ast.walk(made)
             if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]  # fmt: skip
    order = [c for c in calls if c in ("maybe_init_draft_worker", "init_all_cuda_graphs")]
    assert order == ["maybe_init_draft_worker", "init_all_cuda_graphs"]


class TestCapturedAndEager:
    """The engine's model runner verifies random trees of two widths both ways."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=256, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
            initializer_range=0.1, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        made = tmp_path_factory.mktemp("tiny")
        LlamaForCausalLM(config).save_pretrained(made)
        words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(made)
        return made

    def probe(self, folder: Path, *arguments: str) -> dict[str, Any]:
        script = Path(__file__).with_name("graph_probe.py")
        run = subprocess.run(
            [sys.executable, str(script), str(folder), *arguments],
            capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        assert {width: one["captured"] for width, one in found.items()} == {
            "4": [1, 2, 4, 8],
            "17": [1, 2, 4],
        }
        return found

    def test_recorded_forwards_agree_on_a_cpu(self, folder: Path) -> None:
        """Everything but CUDA: capture inputs, static buffers, padding from 3 to 4, masks."""
        for one in self.probe(folder, "cpu", "specstack_cpu", "float32").values():
            assert one["ran"]
            assert one["error"] < 1e-4
            assert one["without_mask"] > 0.1, "a mask that replays did not fill would be seen"

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    @pytest.mark.parametrize(
        ("attention", "dtype", "tolerance"),
        [("triton", "float32", 1e-2), ("flashinfer", "bfloat16", 0.1)],
    )
    def test_graphs_agree_on_a_gpu(
        self, folder: Path, attention: str, dtype: str, tolerance: float
    ) -> None:
        for one in self.probe(folder, "cuda", attention, dtype).values():
            assert one["ran"]
            assert one["error"] < tolerance < one["without_mask"] / 3
