"""The Prometheus configuration and rules, judged by Prometheus' own tool."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_tools import PROMETHEUS, ROOT, RULES, promtool

from specstack.metrics.definitions import METRICS
from specstack_serving.dashboards.queries import CACHED, PREFIX, RECORDED

RUNBOOK = ROOT / "docs/monitoring.md"


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = [rule for rule in rules() if "alert" in rule]


def exported_names() -> set[str]:
    names = set()
    for metric in METRICS:
        parts = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names |= {f"{PREFIX}_{metric.exported_name}{part}" for part in parts}
    return names


def unknown_metrics(text: str) -> set[str]:
    """Names in expressions that nothing exports."""
    return set(re.findall(rf"(?<![\w:]){PREFIX}_\w+", text)) - exported_names()


def test_prometheus_accepts_the_configuration_and_the_rules() -> None:
    for kind, name in (("rules", "rules.yaml"), ("config", "prometheus.yaml")):
        result = promtool("check", kind, PROMETHEUS / name)
        assert result.returncode == 0, result.stderr


def test_every_alert_fires_and_stays_silent_as_its_cases_say() -> None:
    result = promtool("test", "rules", PROMETHEUS / "rules_test.yaml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_firing_and_a_silent_case() -> None:
    cases: dict[str, set[bool]] = {}
    for test in yaml.safe_load((PROMETHEUS / "rules_test.yaml").read_text())["tests"]:
        for case in test["alert_rule_test"]:
            cases.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
    assert cases == {rule["alert"]: {True, False} for rule in ALERTS}


BROKEN = [
    ("up{job", 'absent(up{job="no"}) * up{job'),
    ('up{job="specstack"} == 0', "up == 0"),
    ("specstack_fallback_active == 1", "specstack_fallback_active == 2"),
    ("< 0.97", "< 0.5"),
    ("< 0.97", "< 0.99"),
    ('{side="plain"}', '{side="predicted"}'),
    ("and sum by (model_name, instance, job) (rate(specstack_spec_decode_num_drafts", "or sum by"
     " (model_name, instance, job) (rate(specstack_spec_decode_num_drafts"),
    ("per_minute5m > 60", "per_minute5m > 100"),
    ("per_minute5m > 60", "per_minute5m > 30"),
    ("60 * sum by", "sum by"),
    ("cost_table_drift > 0.25", "cost_table_drift > 0.4"),
    ("cost_table_drift > 0.25", "cost_table_drift > 0.1"),
    ("for: 15m", "for: 30m"),
    ("for: 15m", "for: 1m"),
    ('{source="none"}', '{source=~".+"}'),
    ('budget=~"goodput|slo"', 'budget=~".+"'),
    ("> 0.01", "> 0.1"),
    ("> 0.01", "> 0.0001"),
    ("< 0.5 *", "< 0.1 *"),
    ("< 0.5 *", "< 0.99 *"),
    ("(rate(specstack_prompt_tokens_total[30m])) > 1\n",
     "(rate(specstack_prompt_tokens_total[30m])) > 0\n"),
    ("severity: warning", "severity: info"),
]  # fmt: skip


@pytest.mark.parametrize(("right", "wrong"), BROKEN, ids=lambda text: text[:40])
def test_a_broken_rule_fails_the_cases(tmp_path: Path, right: str, wrong: str) -> None:
    """Control: one wrong threshold, label or duration per variant."""
    text = RULES.read_text()
    assert right in text
    (tmp_path / "rules.yaml").write_text(text.replace(right, wrong))
    shutil.copy(PROMETHEUS / "rules_test.yaml", tmp_path)
    assert promtool("check", "rules", tmp_path / "rules.yaml").returncode == 0
    assert promtool("test", "rules", tmp_path / "rules_test.yaml").returncode != 0


def test_rules_ask_for_exported_metrics_only() -> None:
    expressions = "\n".join(rule["expr"] for rule in rules())
    assert unknown_metrics(expressions) == set()
    assert f'source="{CACHED}"' in expressions


def test_a_misspelt_metric_in_a_rule_is_noticed() -> None:
    """Control."""
    assert unknown_metrics("rate(specstack_round_total[1m])") == {"specstack_round_total"}


def test_what_dashboards_read_of_rules_is_recorded() -> None:
    assert set(RECORDED) <= {rule.get("record") for rule in rules()}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    page, anchor = rule["annotations"]["runbook"].split("#")
    assert ROOT / page == RUNBOOK
    headings = re.findall(r"^#+ (.+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert anchor in [heading.lower().replace(" ", "-") for heading in headings]
