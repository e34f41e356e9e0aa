"""Plans with trained heads: what is read from a checkpoint, and what it may not contradict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specstack import memory
from specstack.bind import bind
from specstack.explain import _shown, explain, flat_values
from specstack.facts import HostFacts, ModelFacts
from specstack.head_rules import HEAD_RULES
from specstack.head_sizes import head_parameters, kv_values_per_token
from specstack.models.heads.checkpoint import make_head
from specstack.models.heads.config import HeadConfig
from specstack.models.heads.testing import (
    GATED,
    GATED_LINEAR,
    HIDDEN,
    KV,
    KV_LINEAR,
    SUM,
    SUM_LOW_RANK,
    random_tables,
    tiny_config,
)
from specstack.models.heads.vocabulary import DraftVocabulary
from specstack.plan import Plan, compile
from specstack_dsl import PlanError, loads

CPU = HostFacts(accelerator="none", num_accelerators=0, memory_bytes=16 * 2**30, num_cpus=4)
FACTS = ModelFacts(
    architecture="LlamaForCausalLM", num_layers=6, hidden_size=24, num_heads=4, num_kv_heads=2,
    head_dim=8, vocab_size=40, max_position_embeddings=128, num_parameters=1_000,
)  # fmt: skip
START = "version: 1\ntarget: org/m\n"
TAPS = {"source": "hidden", "target_layers": (1, 3, 4)}
BLOCK = tiny_config("block", TAPS, mask="bidirectional", block_size=4)
LAST = tiny_config("autoregressive", {"source": "hidden", "target_layers": (1, 5)})
MARKOV = tiny_config("block", TAPS, block_size=4, conditioning={"kind": "markov", "rank": 3})
REFRESH = tiny_config("block", TAPS, block_size=4, conditioning={"kind": "refresh"})
CHAIN = tiny_config("autoregressive", KV, draft_vocab_size=10)


@pytest.fixture(autouse=True)
def _heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    heads = {"block": BLOCK, "chain": CHAIN, "last": LAST, "markov": MARKOV, "refresh": REFRESH}
    for name, config in heads.items():
        write(name, config)


def write(name: str, config: HeadConfig) -> None:
    Path(name).mkdir()
    Path(name, "config.json").write_text(config.model_dump_json())


def plan(text: str, **facts: Any) -> Plan:
    pipeline = loads(START + text, "f.yaml")
    return compile(pipeline, model_facts=replace(FACTS, **facts), host_facts=CPU)


TREE = "tree: {kind: best_first, depth: 3, width: 2}\n"
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a mask that the head does not have": (
        "drafter: {kind: block, checkpoint: ./block, mask: tree_causal}\n" + TREE, {},
        "f.yaml:3:51: drafter.mask: the pipeline says tree_causal, but the head ./block has"
        " bidirectional: remove the line, or name another head",
    ),
    "a reduced vocabulary that the head does not have": (
        "drafter: {kind: block, checkpoint: ./block, draft_vocab: 32}\n" + TREE, {},
        "f.yaml:3:58: drafter.draft_vocab: the pipeline says 32, but the head ./block has all"
        " tokens: remove the line, or name another head",
    ),
    "in a merge": (
        "drafter: {kind: merge, of: [ngram, {kind: block, checkpoint: ./block, block_size: 8}]}\n",
        {},
        "f.yaml:3:83: drafter.of.1.block_size: the pipeline says 8, but the head ./block has 4:"
        " remove the line, or name another head",
    ),
    "another target": (
        "drafter: {kind: block, checkpoint: ./block}\n" + TREE,
        {"hidden_size": 32, "vocab_size": 41},
        "f.yaml:3:36: drafter.checkpoint: the head ./block was made for tiny, which is not org/m:"
        " hidden_size 24, not 32; vocab_size 40, not 41",
    ),
    "the last layer": (
        "drafter: {kind: autoregressive, checkpoint: ./last}\n", {},
        "f.yaml:3:45: drafter.checkpoint: the head ./last reads the output of layer 5, the last one"
        " of org/m, which SGLang does not hand out: train a head on layers up to 4",
    ),
    "a deep tree": (
        "drafter: {kind: block, checkpoint: ./block}\n", {},
        "f.yaml:1:1: tree.depth: the tree is 8 deep, but the blocks of ./block hold 3 drafts"
        " behind their anchor: set tree.depth to at most 3",
    ),
    "more ranks than KV heads": (
        "drafter: {kind: autoregressive, checkpoint: ./chain}\nengine: {tp: 4}\n", {},
        "f.yaml:4:14: engine.tp: tp is 4, but the head ./chain reads the target's 2 KV heads, which"
        " do not divide by it: set tp to a divisor of 2",
    ),
    "marginals for a path-conditional tree": (
        "drafter: {kind: block, checkpoint: ./block}\ntree: {kind: path_conditional, depth: 3}\n",
        {},
        "f.yaml:4:14: tree.kind: path_conditional needs a head with a corrector or a refresh pass,"
        " but ./block has none: use best_first",
    ),
    "conditioning left out for a path-conditional tree": (
        "drafter: {kind: block, checkpoint: ./markov, conditioning: none}\n"
        "tree: {kind: path_conditional, depth: 3}\n",
        {},
        "f.yaml:4:14: tree.kind: path_conditional needs a head with a corrector or a refresh pass,"
        " but ./markov leaves it out: use best_first, or remove drafter.conditioning",
    ),
    "drawn drafts of a second pass": (
        "drafter: {kind: block, checkpoint: ./refresh, drafts: drawn}\n"
        "tree: {kind: chain, depth: 3}\n",
        {},
        "f.yaml:3:55: drafter.drafts: the head ./refresh scores a tree in a second pass, which"
        " drawn drafts cannot follow: set drafter.conditioning to none, or drafts to best",
    ),
    "no folder": (
        "drafter: {kind: block, checkpoint: ./nothing}\n", {},
        "f.yaml:3:36: drafter.checkpoint: the folder {here}/nothing does not exist: name a draft"
        " head's folder",
    ),
    "an empty folder": (
        "drafter: {kind: block, checkpoint: ./}\n", {},
        "f.yaml:3:36: drafter.checkpoint: the folder {here} has no config.json: name a draft"
        " head's folder",
    ),
    "the other form": (
        "drafter: {kind: block, checkpoint: ./chain}\n", {},
        "f.yaml:3:36: drafter.checkpoint: the head ./chain is of form autoregressive, the drafter"
        " of kind block: write kind: autoregressive",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_contradiction_names_both_sides(case: str, tmp_path: Path) -> None:
    text, facts, expected = CASES[case]
    with pytest.raises(PlanError) as caught:
        plan(text, **facts)
    assert str(caught.value) == expected.replace("{here}", str(tmp_path))


def test_every_rule_is_broken_by_a_case() -> None:
    broken = set()
    for text, facts, _ in CASES.values():
        with pytest.raises(PlanError) as caught:
            plan(text, **facts)
        broken |= {problem.rule for problem in caught.value.problems}
    assert {rule.__name__ for rule in HEAD_RULES} <= broken


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read {file}: Expecting property name"),
        ("{}", "{file} has model_type None; a draft head has 'specstack_head'"),
        ('{"model_type": "specstack_head"}', "{file} is not a head's: form: Field required; "),
    ],
)
def test_a_folder_without_a_head_is_said(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "block/config.json"
    file.write_text(content)
    with pytest.raises(PlanError) as caught:
        plan("drafter: {kind: block, checkpoint: ./block}\n" + TREE)
    assert caught.value.problems[0].message.startswith(message.replace("{file}", str(file)))


class TestOptions:
    def test_of_a_block(self, tmp_path: Path) -> None:
        made = plan("drafter: {kind: block, checkpoint: ./block, mask: bidirectional}\n" + TREE)
        assert made.drafter.options == {
            "checkpoint": str(tmp_path / "block"), "candidates": 64, "max_depth": 3,
            "search": {"width": 2}, "drafts": "best", "conditioned": True,
        }  # fmt: skip
        assert made.heads[0].config == BLOCK
        values = flat_values(made)
        assert values["drafter.mask"] == "bidirectional"
        assert values["drafter.draft_vocab"] == "all tokens"
        assert made.origins["drafter.mask"] == "f.yaml:3"
        assert made.origins["drafter.context"] == "derived: the checkpoint"
        assert made.origins["drafter.search"] == "derived: the tree"

    @pytest.mark.parametrize(
        ("tree", "width", "found"),
        [
            ("{kind: chain, depth: 3}", 3, 1),
            ("{kind: best_first, depth: 3, width: 2}", 3, 2),
            ("{kind: best_first, depth: 3, width: 4}", 3, 3),
            ("{kind: best_first, depth: 3}", 3, 3),
        ],
    )
    @pytest.mark.parametrize("drafts", ["best", "drawn"])
    def test_a_head_narrows_a_tree_and_never_widens_it(
        self, tree: str, width: int, found: int, drafts: str
    ) -> None:
        """A chain of drawn drafts that were chosen among several would bias the output."""
        if drafts == "drawn" and "chain" not in tree:
            pytest.skip("refused by the language")
        head = f"{{kind: block, checkpoint: ./markov, width: {width}, drafts: {drafts}}}"
        made = plan(f"drafter: {head}\ntree: {tree}\n")
        assert made.drafter.options["search"] == {"width": found}
        bind(made)

    def test_conditioning_none_leaves_out_what_a_head_has(self) -> None:
        text = "drafter: {kind: block, checkpoint: ./markov%s}\n" + TREE
        assert plan(text % "").drafter.options["conditioned"] is True
        left_out = plan(text % ", conditioning: none")
        assert left_out.drafter.options["conditioned"] is False
        assert left_out.hash != plan(text % "").hash

    @pytest.mark.parametrize(
        ("tree", "search", "shown"),
        [
            ("{kind: chain, depth: 3}", {"width": 1}, "the best paths, width 1"),
            ("{kind: best_first, depth: 3}", {"width": None}, "the best paths"),
            (
                "{kind: beam, depth: 3, width: 4}",
                {"width": 4, "frontier": 4},
                "the best paths, width 4, frontier 4",
            ),
            (
                "{kind: expand, depth: 3}",
                {"width": 7, "families": True},
                "whole families of 7",
            ),
            ("{kind: static, paths: [[0]]}", {"paths": [[0]]}, "a shape of 1 nodes"),
            (
                "{kind: path_conditional, depth: 3, frontier: 8}",
                {"width": None, "frontier": 8},
                "the best paths, frontier 8",
            ),
        ],
    )
    def test_a_tree_says_what_a_head_expands(
        self, tree: str, search: dict[str, Any], shown: str
    ) -> None:
        made = plan(f"drafter: {{kind: block, checkpoint: ./markov}}\ntree: {tree}\n")
        assert made.drafter.options["search"] == search
        assert _shown("drafter.search", search) == shown
        assert set(flat_values(made)) == set(made.origins)
        parts = bind(made)
        assert parts.drafter is not None
        assert parts.tree_builder.depth == (1 if "static" in tree else 3)

    def test_of_a_merge(self, tmp_path: Path) -> None:
        of = "[ngram, {kind: block, checkpoint: ./block},"
        of += " {kind: autoregressive, checkpoint: ./chain}]"
        made = plan(f"drafter: {{kind: merge, of: {of}}}\n")
        ngram, block, chain = made.drafter.options["of"]
        assert ngram["options"]["max_depth"] == chain["options"]["max_depth"] == 8
        assert block["options"]["max_depth"] == 3, "others go deeper"
        assert chain["options"]["checkpoint"] == str(tmp_path / "chain")
        assert [head.place for head in made.heads] == ["drafter.of.1", "drafter.of.2"]
        assert made.origins["drafter.of.0.kind"] == "f.yaml:3"
        assert made.origins["drafter.of.0.min_match"] == "default"

    @pytest.mark.parametrize(
        "drafter",
        [
            "{kind: block, checkpoint: ./block}",
            "{kind: autoregressive, checkpoint: ./chain, width: 3}",
            "{kind: merge, of: [ngram, {kind: block, checkpoint: ./block}]}",
            "{kind: block, checkpoint: org/head}",
            "{kind: autoregressive, checkpoint: org/head}",
        ],
    )
    def test_every_value_has_an_origin(self, drafter: str) -> None:
        made = plan(f"drafter: {drafter}\n" + TREE)
        assert set(flat_values(made)) == set(made.origins)
        assert Plan.model_validate_json(made.model_dump_json()) == made

    def test_a_merge_becomes_live(self) -> None:
        of = "[ngram, {kind: autoregressive, checkpoint: ./chain}]"
        drafter = bind(plan(f"drafter: {{kind: merge, of: {of}}}\n")).drafter
        assert drafter is not None
        assert drafter.needs_tokens
        assert drafter.needs is not None
        assert drafter.needs.kv_layers == CHAIN.context.kv_layers


def test_the_hash_names_a_head_by_its_name_and_config() -> None:
    text = "drafter: {kind: block, checkpoint: ./block}\n" + TREE
    first = plan(text).hash
    Path("elsewhere").mkdir()
    Path("block").rename("elsewhere/block")
    moved = loads(START + text, "elsewhere/f.yaml")
    assert compile(moved, model_facts=FACTS, host_facts=CPU).hash == first
    write("block", tiny_config("block", TAPS, mask="bidirectional", block_size=4, num_layers=3))
    assert plan(text).hash != first


def test_a_head_that_is_elsewhere_is_said() -> None:
    warnings = plan("drafter: {kind: block, checkpoint: org/head}\n").warnings
    assert "the head org/head is not on this machine: nothing was checked" in warnings


def test_a_head_in_the_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--head/snapshots/main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(BLOCK.model_dump(mode="json")))
    made = plan("drafter: {kind: block, checkpoint: org/head}\n" + TREE)
    assert made.drafter.options["checkpoint"] == "org/head"
    assert made.heads[0].config == BLOCK


def test_drafting_beyond_what_was_trained_is_said() -> None:
    warnings = plan("drafter: {kind: autoregressive, checkpoint: ./chain}\n").warnings
    assert (
        "the head ./chain was trained to depth 4; beyond it, up to tree.depth 8, it is on its own"
        in warnings
    )


def test_memory_of_a_head() -> None:
    pipeline = loads(START + "drafter: {kind: autoregressive, checkpoint: ./chain}\n", "f.yaml")
    made = compile(pipeline, model_facts=FACTS, host_facts=CPU)
    sizes = explain(pipeline, made).memory_bytes
    assert sizes["draft_weights"] == 4 * head_parameters(CHAIN)
    assert sizes["draft_kv_per_token"] == 4 * 2 * 2 * 4 * 8
    tokens = made.engine.max_total_tokens
    assert tokens is not None
    assert sizes["draft_kv_cache"] == tokens * 512
    assert memory.draft_weights_bytes(plan("drafter: {kind: block, checkpoint: org/h}\n")) is None


def conditioned(kind: str, parent: str, output: str) -> dict[str, Any]:
    return {"conditioning": {"kind": kind, "rank": 3, "parent": parent, "output": output}}


@pytest.mark.parametrize("draft_vocab_size", [None, 10])
@pytest.mark.parametrize(
    ("form", "context", "fields"),
    [
        ("block", HIDDEN, {}),
        ("block", KV_LINEAR, {"target": {"qk_norm": False}}),
        ("block", SUM, {}),
        ("block", SUM_LOW_RANK, {}),
        ("block", HIDDEN, {"slots": "seeded"}),
        ("block", HIDDEN, {"slots": "seeded", "block_size": 2}),
        ("block", HIDDEN, conditioned("markov", "embedding", "hidden")),
        ("block", HIDDEN, conditioned("gru", "table", "logits")),
        ("block", SUM, {"slots": "seeded", **conditioned("gru", "embedding", "hidden")}),
        ("autoregressive", HIDDEN, {"extra_norms": True}),
        ("autoregressive", KV, {}),
        ("autoregressive", GATED, {}),
        ("autoregressive", GATED_LINEAR, {}),
    ],
)
def test_sizes_are_those_of_the_head(
    form: str, context: dict[str, Any], fields: dict[str, Any], draft_vocab_size: int | None
) -> None:
    config = tiny_config(form, context, draft_vocab_size=draft_vocab_size, **fields)
    vocabulary = None
    if draft_vocab_size is not None:
        vocabulary = DraftVocabulary.from_counts(torch.rand(40), draft_vocab_size)
    head = make_head(config, random_tables(config), vocabulary)
    found = sum(parameter.numel() for parameter in head.parameters())
    copied = head.lm_head.weight.numel() if draft_vocab_size else 0
    assert head_parameters(config) == found + copied
    kept = 2 * config.num_layers * config.target.head_dim
    heads = head.num_cache_heads
    if form == "autoregressive" and context is not HIDDEN:
        heads += config.target.num_kv_heads
    assert kv_values_per_token(config) == kept * heads
