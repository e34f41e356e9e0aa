"""What the budget policy decides, from which load, how steadily, and what another would do."""

from __future__ import annotations

from specstack_serving.dashboards.overview import OFF_TIME
from specstack_serving.dashboards.panels import Board, Panel, Query, Row
from specstack_serving.dashboards.queries import (
    gauge,
    goodput,
    quantile,
    rate,
    ratio,
    ratio_to_one,
    recorded,
)

ROUNDS = "suffix: rounds/s"

DECISION = Row(
    "What it decides",
    (
        Panel(
            "Budget",
            "Drafts per request allowed in the last round before each scrape; 0 is plain decoding."
            " `verified` is the number of nodes of the verify step, root and padding included.",
            "none",
            (
                Query(gauge("draft_budget", ("instance",)), "allowed {{instance}}"),
                Query(gauge("num_draft_tokens", ("instance",)), "verified {{instance}}"),
            ),
            at_least=0,
        ),
        Panel(
            "Rounds by reason",
            "Why budgets were chosen. `off`: plain decoding is best; `probe`: drafts a little to"
            " see whether it pays again; `hold`: kept, so as not to flap; `learning`: nothing"
            " known yet; `collapsed`: the fallback.",
            ROUNDS,
            (Query(rate("rounds", ("reason",)), "{{reason}}"),),
            stacked=True,
            at_least=0,
        ),
        Panel(
            "Rounds by budget",
            "The same rounds by how many drafts they allowed.",
            ROUNDS,
            (Query(rate("rounds", ("draft_budget",)), "{{draft_budget}} drafts"),),
            stacked=True,
            at_least=0,
        ),
    ),
)

LOAD = Row(
    "From which load",
    (
        Panel(
            "Requests",
            "In the last round, and waiting for a place in it: what the policy saw.",
            "none",
            (
                Query(gauge("running_requests", ("instance",)), "running {{instance}}"),
                Query(gauge("queued_requests", ("instance",)), "queued {{instance}}"),
            ),
            at_least=0,
        ),
        Panel(
            "KV cache in use",
            "Share of the KV cache's tokens. Near 1 requests are retracted, and drafts need room"
            " of their own.",
            "percentunit",
            (Query(gauge("kv_usage", ("instance",)), "{{instance}}"),),
            at_least=0,
            at_most=1,
        ),
        Panel(
            "Prompts from the prefix cache",
            "Share of prompt tokens that the prefix cache held, over 30 minutes. A sudden fall"
            " makes time to first token rise: see the alert SpecstackPrefixHitDrop.",
            "percentunit",
            (Query(recorded("instance:specstack_cached_prompt_share:rate30m"), "{{instance}}"),),
            at_least=0,
            at_most=1,
        ),
    ),
)

STEADINESS = Row(
    "How steadily",
    (
        Panel(
            "Switches",
            "Changes of the budget from one round to the next, per minute. Many mean that two"
            " budgets are worth the same, or that the hysteresis is too small: see the alert"
            " SpecstackBudgetFlapping.",
            "suffix: /min",
            (Query(recorded("instance:specstack_budget_switches:per_minute5m"), "{{instance}}"),),
            width=6,
            at_least=0,
        ),
        Panel(
            "Time without drafts",
            "Share of the time of rounds that decoded plainly because the policy chose to.",
            "percentunit",
            (Query(OFF_TIME, "off"),),
            width=6,
            at_least=0,
            at_most=1,
        ),
        Panel(
            "Fallbacks",
            "Times per second that collapsed acceptance turned drafting off, and whether it is"
            " off now (1).",
            "none",
            (
                Query(rate("fallbacks", ("instance",)), "per second {{instance}}"),
                Query(gauge("fallback_active", ("instance",)), "active {{instance}}"),
            ),
            width=6,
            at_least=0,
        ),
        Panel(
            "Time of a decision",
            "Host time of deciding a budget. The contract is less than 50 microseconds.",
            "s",
            (
                Query(quantile(0.5, "decision_seconds"), "median"),
                Query(quantile(0.99, "decision_seconds"), "p99"),
            ),
            width=6,
            at_least=0,
        ),
    ),
)

SHADOW = Row(
    "What another policy would do (needs a shadow policy)",
    (
        Panel(
            "Foretold goodput",
            "Tokens per second of round time that the cost table foretells for the budgets of the"
            " acting and of the shadow policy, for the same rounds. Both are foretold, so a wrong"
            " table tilts both.",
            "suffix: tok/s",
            (Query(goodput("predicted"), "acting"), Query(goodput("shadow"), "shadow")),
            width=6,
            at_least=0,
        ),
        Panel(
            "Shadow over acting",
            "Above 1 for hours: the shadow policy is the better choice.",
            "suffix:x",
            (Query(ratio(goodput("shadow"), f"({goodput('predicted')})"), "shadow / acting"),),
            width=6,
        ),
        Panel(
            "Shadow's budgets",
            "Rounds by what the shadow policy would have allowed.",
            ROUNDS,
            (Query(rate("shadow_rounds", ("draft_budget",)), "{{draft_budget}} drafts"),),
            width=6,
            stacked=True,
            at_least=0,
        ),
        Panel(
            "Shadow's reasons",
            "Rounds by why the shadow policy would have chosen its budget.",
            ROUNDS,
            (Query(rate("shadow_rounds", ("reason",)), "{{reason}}"),),
            width=6,
            stacked=True,
            at_least=0,
        ),
    ),
)

REQUESTS = Row(
    "Requests that do not draft",
    (
        Panel(
            "Gated and opted out",
            "Requests per round that did not draft while rounds went on: gated by the policy"
            " (context too long, drafts fail), or opted out by their own wish.",
            "suffix: requests",
            tuple(
                Query(ratio_to_one(rate(f"{name}_requests"), rate("rounds")), legend)
                for name, legend in (("gated", "gated"), ("opted_out", "opted out"))
            ),
            width=24,
            at_least=0,
        ),
    ),
)

BUDGET = Board(
    "specstack-budget",
    "specstack / budget",
    "What the budget policy decides and why. Rates add up the selected servers; gauges are drawn"
    " per instance.",
    (DECISION, LOAD, STEADINESS, SHADOW, REQUESTS),
)
