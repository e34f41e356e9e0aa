"""Files, variables, `extends` and `--set`."""

from __future__ import annotations

from pathlib import Path

import pytest

from specstack_dsl import SpecError, load, loads
from specstack_dsl.source import MAX_BYTES

UNPRICED = {"calibration": None, "cost": None}
HEAD = "version: 1\ntarget: org/model\n"


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
    return file


def message(file: Path | str, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        load(file, overrides)
    return str(caught.value)


class TestFiles:
    def test_a_missing_file(self) -> None:
        assert message("no.yaml") == "no.yaml: cannot read the file: no such file or directory"

    def test_a_folder(self, tmp_path: Path) -> None:
        assert message(tmp_path) == f"{tmp_path}: cannot read the file: is a directory"

    def test_an_empty_file(self, tmp_path: Path) -> None:
        file = write(tmp_path, "e.yaml", "")
        assert "empty: a pipeline has at least `version: 1`" in message(file)

    def test_only_a_comment(self, tmp_path: Path) -> None:
        assert ":1:1: empty" in message(write(tmp_path, "e.yaml", "# nothing\n"))

    def test_a_scalar(self, tmp_path: Path) -> None:
        file = write(tmp_path, "e.yaml", "hello")
        assert message(file).endswith("a pipeline is a mapping of sections, found 'hello'")

    def test_not_utf8(self, tmp_path: Path) -> None:
        file = tmp_path / "latin.yaml"
        file.write_bytes(b"version: 1\ntarget: caf\xe9\n")
        expected = f"{file}:2:12: not UTF-8 text: byte 0xe9; save the file as UTF-8"
        assert message(file) == expected

    def test_a_byte_order_mark_is_fine(self, tmp_path: Path) -> None:
        file = tmp_path / "bom.yaml"
        file.write_bytes(b"\xef\xbb\xbf" + HEAD.encode())
        assert load(file).target.model == "org/model"

    def test_windows_line_ends_are_fine(self, tmp_path: Path) -> None:
        file = tmp_path / "crlf.yaml"
        file.write_bytes(HEAD.replace("\n", "\r\n").encode())
        assert load(file).position("target").line == 2

    def test_a_huge_file_is_not_read(self, tmp_path: Path) -> None:
        file = write(tmp_path, "h.yaml", "#" * (MAX_BYTES + 1))
        assert message(file) == f"{file}: more than 64 KiB: not a pipeline"

    @pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
    def test_an_endless_file_is_not_read(self) -> None:
        assert message("/dev/zero").endswith("not a pipeline")


class TestVariables:
    def model(self, text: str, **environ: str) -> str:
        return loads(f"version: 1\ntarget: {text}\n", environ=environ).target.model

    def test_a_set_variable(self) -> None:
        assert self.model("org/${NAME}", NAME="m") == "org/m"

    def test_a_default_for_an_unset_variable(self) -> None:
        assert self.model("${NAME:-org/m}") == "org/m"

    def test_a_default_for_an_empty_variable(self) -> None:
        assert self.model("${NAME:-org/m}", NAME="") == "org/m"

    def test_two_in_one_value(self) -> None:
        assert self.model("${A}/${B}", A="org", B="m") == "org/m"

    def test_the_value_of_a_variable_is_not_expanded_again(self) -> None:
        with pytest.raises(SpecError, match="is not a model"):
            self.model("${A}", A="${B}", B="org/m")

    def test_a_doubled_dollar_is_literal(self) -> None:
        text = HEAD + "engine: {args: {chat_template: '$${x} $y'}}\n"
        assert loads(text, environ={}).engine.args == {"chat_template": "${x} $y"}

    def test_a_variable_stays_text(self) -> None:
        """Numbers come from `--set`, where the value is read as YAML."""
        with pytest.raises(SpecError, match="expected an integer, found '80'"):
            loads(HEAD + "engine: {port: '${PORT}'}\n", environ={"PORT": "80"})

    def test_every_unset_variable_is_reported(self) -> None:
        with pytest.raises(SpecError) as caught:
            loads("version: 1\ntarget: ${A}\nmetrics: {prefix: '${B}'}\n", environ={})
        assert [p.path for p in caught.value.problems] == ["target", "metrics.prefix"]

    def test_keys_are_not_expanded(self) -> None:
        with pytest.raises(SpecError, match="unknown section"):
            loads(HEAD + "${A}: 1\n", environ={"A": "tree"})


class TestExtends:
    def test_a_child_states_only_what_differs(self, tmp_path: Path) -> None:
        write(tmp_path, "p.yaml", HEAD + "tree: {kind: best_first, depth: 4, width: 2}\n")
        child = write(tmp_path, "c.yaml", "extends: p.yaml\nversion: 1\ntree: {depth: 6}\n")
        tree = load(child).tree
        assert tree.options == {"depth": 6, "width": 2, **UNPRICED}

    def test_positions_name_the_file_that_a_value_came_from(self, tmp_path: Path) -> None:
        parent = write(tmp_path, "p.yaml", HEAD + "tree: {kind: chain, depth: 0}\n")
        child = write(tmp_path, "c.yaml", "extends: p.yaml\nengine: {port: 0}\n")
        first, second = message(child).splitlines()
        assert first.startswith(f"{child}:2:16: engine.port: ")
        assert second.startswith(f"{parent}:3:28: tree.depth: ")

    def test_another_kind_drops_the_options_of_the_parent(self, tmp_path: Path) -> None:
        write(tmp_path, "p.yaml", HEAD + "tree: {kind: best_first, depth: 4, width: 2}\n")
        child = write(tmp_path, "c.yaml", "extends: p.yaml\ntree: chain\n")
        assert load(child).tree.options == {"depth": 8, **UNPRICED}

    def test_the_same_kind_as_a_name_keeps_them(self, tmp_path: Path) -> None:
        write(tmp_path, "p.yaml", HEAD + "tree: {kind: chain, depth: 16}\n")
        child = write(tmp_path, "c.yaml", "extends: p.yaml\ntree: chain\n")
        assert load(child).tree.options == {"depth": 16, **UNPRICED}

    def test_args_merge_and_lists_replace(self, tmp_path: Path) -> None:
        write(tmp_path, "p.yaml", HEAD + "engine: {args: {warmups: a, numa_node: [0, 1]}}\n")
        child = write(tmp_path, "c.yaml", "extends: p.yaml\nengine: {args: {numa_node: [2]}}\n")
        assert load(child).engine.args == {"warmups": "a", "numa_node": [2]}

    def test_grandparents_and_folders(self, tmp_path: Path) -> None:
        write(tmp_path, "base/g.yaml", "version: 1\ntarget: ./model\ntree: chain\n")
        write(tmp_path, "base/p.yaml", "extends: g.yaml\nengine: {port: 1}\n")
        child = write(tmp_path, "sub/c.yaml", "extends: ../base/p.yaml\n")
        pipeline = load(child)
        assert (pipeline.tree.kind, pipeline.engine.port) == ("chain", 1)
        model = pipeline.position("target.model").resolve(pipeline.target.model)
        assert model == tmp_path / "base/model"

    def test_a_circle_is_an_error(self, tmp_path: Path) -> None:
        write(tmp_path, "a.yaml", "extends: b.yaml\n")
        file = write(tmp_path, "b.yaml", "extends: ./a.yaml\n")
        expected = f"{tmp_path / 'a.yaml'}:1:10: extends: 'b.yaml' extends itself, directly or"
        assert message(file).startswith(expected)

    def test_a_circle_through_a_link_is_an_error(self, tmp_path: Path) -> None:
        file = write(tmp_path, "a.yaml", "extends: link.yaml\n")
        (tmp_path / "link.yaml").symlink_to(file)
        assert "extends itself" in message(file)


class TestOverrides:
    def test_one_value(self) -> None:
        assert loads(HEAD, overrides=["tree.depth=3", "tree.kind=chain"]).tree.options == {
            "depth": 3,
            **UNPRICED,
        }

    def test_a_section_by_name(self) -> None:
        text = HEAD + "budget: {kind: fixed, draft_budget: 4}\n"
        overrides = ["drafter=none", "budget={kind: fixed, draft_budget: 0}"]
        pipeline = loads(text, overrides=overrides)
        assert not pipeline.speculates

    def test_the_target_by_name_keeps_its_options(self) -> None:
        text = "version: 1\ntarget: {model: org/a, dtype: float32}\n"
        target = loads(text, overrides=["target=org/b"]).target
        assert (target.model, target.dtype) == ("org/b", "float32")

    def test_another_kind_drops_options_whatever_the_order(self) -> None:
        text = HEAD + "budget:\n  kind: table\n  rows: [{max_batch: 1, draft_budget: 2}]\n"
        overrides = ["budget.draft_budget=3", "budget.kind=fixed"]
        assert loads(text, overrides=overrides).budget.options == {
            "draft_budget": 3,
            "min_survival": 0.0,
        }

    def test_an_item_of_a_list(self) -> None:
        text = HEAD + "budget:\n  kind: table\n  rows: [{max_batch: 1, draft_budget: 2}]\n"
        pipeline = loads(text, overrides=["budget.rows.0.draft_budget=5"])
        assert pipeline.budget.steps == ((1, 5),)

    def test_values_are_yaml(self) -> None:
        args = loads(HEAD, overrides=["engine.args={warmups: on, dp_size: 2}"]).engine.args
        assert args == {"warmups": "on", "dp_size": 2}

    def test_the_last_one_wins(self) -> None:
        assert loads(HEAD, overrides=["engine.port=1", "engine.port=2"]).engine.port == 2

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("tree.depth", "expected SECTION.OPTION=VALUE, for example --set tree.depth=4"),
            (".".join("a" * 40) + "=1", "expected SECTION.OPTION=VALUE"),
            ("budget.rows.\u00b2=1", "budget.rows has items 0 to 0"),
            ("=3", "expected SECTION.OPTION=VALUE, for example --set tree.depth=4"),
            ("extends=a.yaml", "expected SECTION.OPTION=VALUE, for example --set tree.depth=4"),
            ("engine.port=0", "engine.port: expected at least 1, found 0"),
            ("engine.prt=1", "engine.prt: unknown option of engine"),
            ("engine.port.x=1", "engine.port: engine.port is 7, which has no 'x'"),
            ("budget.rows.1.draft_budget=1", "budget.rows has items 0 to 0, no '1'"),
            ("tree=[", "malformed YAML"),
            ("tree=", "tree: expected a name or a mapping, found nothing"),
        ],
    )
    def test_messages_name_the_override(self, override: str, expected: str) -> None:
        text = HEAD + (
            "engine: {port: 7}\nbudget:\n  kind: table\n  rows: [{max_batch: 1, draft_budget: 2}]\n"
        )
        with pytest.raises(SpecError) as caught:
            loads(text, overrides=[override])
        assert str(caught.value).startswith(f"--set {override}")
        assert expected in str(caught.value)
