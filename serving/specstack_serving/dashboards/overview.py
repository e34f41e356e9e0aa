"""The first dashboard to look at: is speculation paying, and by how much."""

from __future__ import annotations

from specstack_serving.dashboards.panels import Board, Panel, Query, Row
from specstack_serving.dashboards.queries import (
    gauge,
    goodput,
    or_zero,
    quantile,
    rate,
    ratio,
    recorded,
)

ACCEPT_LENGTH = "1 + " + ratio(
    rate("spec_decode_num_accepted_tokens"), rate("spec_decode_num_drafts")
)
TOKENS_PER_ROUND = ratio(
    rate("emitted_tokens"),
    f"({rate('emitted_tokens')} - {rate('spec_decode_num_accepted_tokens')})",
)
"""Every request emits its correct drafts and one token more, so the difference counts requests
times rounds."""
OFF_ROUNDS = ratio(or_zero(rate("rounds", draft_budget="0")), rate("rounds"))
OFF_TIME = f"clamp_max({ratio(rate('off_seconds'), rate('step_seconds', part='_sum'))}, 1)"
ALERTS = 'ALERTS{alertname=~"Specstack.+",instance=~"$instance"}'

GAIN = ((None, "red"), (0.97, "yellow"), (1.05, "green"))
PER_SECOND = "suffix: tok/s"

NOW = Row(
    "Is it paying?",
    (
        Panel(
            "Speedup, last 10 minutes",
            "Tokens per second of rounds as they were, over what plain decoding of the same rounds"
            " was foretold to give. 1 is no gain; below 0.97 the alert SpecstackSpeculationLosing"
            " follows. Empty: no cost table yet, or no traffic.",
            "suffix:x",
            (Query(recorded("instance:specstack_speedup:rate10m"), "{{instance}}"),),
            "stat",
            4,
            thresholds=GAIN,
        ),
        Panel(
            "Accept length",
            "Tokens per request and round, of requests that drafted: correct drafts and the bonus"
            " token. 1 would be plain decoding.",
            "suffix: tokens",
            (Query(ACCEPT_LENGTH, "accept length"),),
            "stat",
            4,
        ),
        Panel(
            "Emitted",
            "Tokens that all rounds of the selected servers emitted, per second of wall time.",
            PER_SECOND,
            (Query(rate("emitted_tokens"), "emitted"),),
            "stat",
            4,
        ),
        Panel(
            "Rounds without drafts",
            "Share of rounds whose budget was 0. High is right under high load, where plain"
            " decoding is best; high on an idle server means that drafts fail.",
            "percentunit",
            (Query(OFF_ROUNDS, "plain rounds"),),
            "stat",
            4,
            at_least=0,
            at_most=1,
        ),
        Panel(
            "Fallback",
            "Whether drafting is off because acceptance collapsed. It comes back by itself when"
            " probes succeed; see the alert SpecstackAcceptanceCollapsed.",
            "none",
            (Query(gauge("fallback_active", ("instance",)), "{{instance}}"),),
            "stat",
            4,
            thresholds=((None, "green"), (1, "red")),
            words=(("0", "drafting"), ("1", "collapsed")),
        ),
        Panel(
            "Alerts",
            "Alerts of the rules in serving/prometheus/rules.yaml, pending or firing.",
            "none",
            (Query(or_zero(f"count by (alertstate) ({ALERTS})"), "{{alertstate}}"),),
            "stat",
            4,
            thresholds=((None, "green"), (1, "orange")),
        ),
    ),
)

GAINS = Row(
    "How much",
    (
        Panel(
            "Goodput: measured, foretold, plain",
            "Tokens per second of round time. `measured` is what rounds did, `predicted` what the"
            " cost table and the survivals of drafts foretold for the same rounds, `plain` what"
            " they foretold for decoding without drafts. Measured above plain: speculation pays."
            " Measured far from predicted: look at the dashboard of the cost model.",
            PER_SECOND,
            tuple(Query(goodput(side), side) for side in ("measured", "predicted", "plain")),
            width=12,
            at_least=0,
        ),
        Panel(
            "Speedup over plain decoding",
            "The measured and the foretold goodput, each over that of plain decoding. The line at"
            " 1 is no gain.",
            "suffix:x",
            tuple(
                Query(ratio(goodput(side), f"({goodput('plain')})"), side)
                for side in ("measured", "predicted")
            ),
            width=12,
            thresholds=GAIN,
        ),
        Panel(
            "Tokens per request and round",
            "`drafting` is the accept length of requests that drafted, `all` counts plain rounds"
            " and requests that opted out as well. The gap is what turning drafts off costs or"
            " saves.",
            "suffix: tokens",
            (Query(ACCEPT_LENGTH, "drafting"), Query(TOKENS_PER_ROUND, "all")),
        ),
        Panel(
            "Emitted tokens",
            "Per second of wall time, by server.",
            PER_SECOND,
            (
                Query(
                    rate("emitted_tokens", ("model_name", "instance")),
                    "{{model_name}} {{instance}}",
                ),
            ),
            at_least=0,
        ),
        Panel(
            "Share without drafts",
            "Of rounds, and of their time. Rounds without drafts are short, so the share of time"
            " is the smaller one.",
            "percentunit",
            (Query(OFF_ROUNDS, "rounds"), Query(OFF_TIME, "time")),
            at_least=0,
            at_most=1,
        ),
    ),
)


def _latency(title: str, name: str, description: str) -> Panel:
    quantiles = ((0.5, "median"), (0.95, "p95"))
    queries = tuple(Query(quantile(q, name), legend) for q, legend in quantiles)
    return Panel(title, description, "s", queries, width=6, at_least=0)


USERS = Row(
    "What users see",
    (
        _latency(
            "Time to first token",
            "sglang:time_to_first_token_seconds",
            "As SGLang measures it, queueing included. Rises first when the server is too full.",
        ),
        _latency(
            "Time between tokens",
            "sglang:inter_token_latency_seconds",
            "As SGLang measures it. Tokens of one round arrive together, so the median may be near"
            " 0 while drafts are accepted; the mean is what counts.",
        ),
        Panel(
            "Requests",
            "In the batch and waiting for a place in it, as SGLang counts them.",
            "none",
            (
                Query(gauge("sglang:num_running_reqs", operator="sum"), "running"),
                Query(gauge("sglang:num_queue_reqs", operator="sum"), "queued"),
            ),
            width=6,
            at_least=0,
        ),
        Panel(
            "Errors",
            "HTTP answers with a status from 400 on, and requests that were aborted (clients that"
            " went away too), per second. 0 where there were none.",
            "reqps",
            (
                Query(or_zero(rate("sglang:http_responses", status_code="4..")), "4xx"),
                Query(or_zero(rate("sglang:http_responses", status_code="5..")), "5xx"),
                Query(or_zero(rate("sglang:num_aborted_requests")), "aborted"),
            ),
            width=6,
            at_least=0,
        ),
    ),
)

OVERVIEW = Board(
    "specstack-overview",
    "specstack / overview",
    "Is speculation paying, by how much, and what would plain decoding give. Rates add up the"
    " selected servers; choose one instance to see it alone.",
    (NOW, GAINS, USERS),
)
