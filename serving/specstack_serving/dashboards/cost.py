"""What rounds cost, and how well the cost table knows it."""

from __future__ import annotations

from specstack_serving.dashboards.panels import Board, Panel, Query, Row
from specstack_serving.dashboards.queries import gauge, mean, quantile, rate, ratio

PHASES = ("draft", "build", "verify", "accept")
STEP = mean("step_seconds")
REST = f"clamp_min({STEP} - ({' + '.join(mean(f'{phase}_seconds') for phase in PHASES)}), 0)"
FORETOLD = ratio(
    rate("goodput_seconds", side="predicted"), rate("goodput_seconds", side="measured")
)
OUTSIDE = f"clamp_min(1 - ({mean('draft_seconds')} + {mean('verify_seconds')}) / ({STEP} > 0), 0)"

ROUND = Row(
    "Where the time of a round goes",
    (
        Panel(
            "Mean time per round, by phase",
            "Host time of each phase; `rest` is what lies between the end of a round and the start"
            " of the next (scheduling, streaming). On a GPU phases are launched, not waited for:"
            " the phase that waits shows the device's time.",
            "s",
            (*(Query(mean(f"{p}_seconds"), p) for p in PHASES), Query(REST, "rest")),
            stacked=True,
            width=12,
            at_least=0,
        ),
        Panel(
            "p95 per round, by phase",
            "The slow rounds: prompts beside them, longer contexts, larger trees.",
            "s",
            tuple(Query(quantile(0.95, f"{p}_seconds"), p) for p in PHASES),
            width=12,
            at_least=0,
        ),
        Panel(
            "Outside drafting and the target",
            "Share of a step that is neither drafting nor the target's forward: building trees,"
            " acceptance, scheduling. What a faster model cannot make faster.",
            "percentunit",
            (Query(OUTSIDE, "outside"),),
            width=12,
            at_least=0,
            at_most=1,
        ),
        Panel(
            "Verify steps without a graph",
            "Share of rounds whose verify step ran eagerly although graphs are on: a batch or a"
            " context that no captured graph fits. 0 on a CPU.",
            "percentunit",
            (Query(ratio(rate("eager_fallbacks"), rate("rounds")), "eager"),),
            width=12,
            at_least=0,
            at_most=1,
        ),
    ),
)

TABLE = Row(
    "How well the cost table knows it",
    (
        Panel(
            "Step time, measured and foretold",
            "From the start of a round to the start of the next. The foretold mean is the measured"
            " one times the ratio beside.",
            "s",
            (
                Query(STEP, "measured, mean"),
                Query(quantile(0.95, "step_seconds"), "measured, p95"),
                Query(f"({STEP}) * ({FORETOLD})", "foretold, mean"),
            ),
            at_least=0,
        ),
        Panel(
            "Foretold over measured",
            "Of step times. 1 is right; the goodput policy needs the order of budgets more than"
            " this number, but far from 1 the order is wrong too.",
            "suffix:x",
            (Query(FORETOLD, "foretold / measured"),),
            at_least=0,
        ),
        Panel(
            "Drift",
            "How far measured times are from the table's after the machine's overall speed is"
            " taken out. Above 0.25 the table is of another machine or another load: measure"
            " again; see the alert SpecstackCostTableStale.",
            "percentunit",
            (Query(gauge("cost_table_drift", ("instance",)), "{{instance}}"),),
            at_least=0,
            thresholds=((None, "green"), (0.25, "red")),
        ),
    ),
)


def _table(title: str, description: str, name: str, labels: tuple[str, ...], width: int) -> Panel:
    shown = f"{gauge(name, ('model_name', 'instance', *labels))} > 0"  # 0: no longer in use
    query = Query(shown, "")
    return Panel(title, description, "none", (query,), "table", width)


IDENTITY = Row(
    "What runs",
    (
        _table(
            "Cost table",
            "The key of the table in use and where it came from; `none`: nothing is known, and"
            " policies that need a table are learning.",
            "cost_table_info",
            ("key", "source"),
            8,
        ),
        _table(
            "Plan",
            "The identity of the compiled pipeline; the hash is that of `specstack explain`.",
            "plan_info",
            ("plan_hash", "drafter", "tree", "verify", "budget"),
            8,
        ),
        _table(
            "Draft heads",
            "The digest of each head's weights; empty for drafters without weights.",
            "head_info",
            ("place", "form", "digest"),
            8,
        ),
    ),
)

COST = Board(
    "specstack-cost",
    "specstack / cost model",
    "What rounds cost and how well it was foretold. All servers that are selected are counted"
    " together.",
    (ROUND, TABLE, IDENTITY),
)
