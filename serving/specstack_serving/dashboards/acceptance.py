"""How many drafts are right: by depth, by context length, by drafter."""

from __future__ import annotations

from specstack_serving.dashboards.overview import ACCEPT_LENGTH
from specstack_serving.dashboards.panels import Board, Panel, Query, Row
from specstack_serving.dashboards.queries import rate, ratio, ratio_to_one

MAX_DEPTH = 16
"""Depths that are drawn; deeper ones are counted by the server and left out here."""

DRAFTS, PROPOSED = "spec_decode_num_drafts", "spec_decode_num_draft_tokens"
CORRECT = "spec_decode_num_accepted_tokens"
ACCEPT_RATE = ratio(rate(CORRECT), rate(PROPOSED))


def alpha(depth: int) -> str:
    """alpha_k: the draft at `depth` was right, given that the one above it was.

    Of trees as of chains; a path that ends because nothing was offered counts as not right.
    """
    right = rate(f"{CORRECT}_per_pos", position=str(depth - 1))
    if depth == 1:
        return ratio(right, rate(DRAFTS))
    return ratio(right, rate(f"{CORRECT}_per_pos", position=str(depth - 2)))


DEPTH = Row(
    "By depth",
    (
        Panel(
            "alpha_k: right, given that the draft above was",
            "One row per depth, from 1 at the bottom; the colour is the share of paths that go on"
            " to this depth among those that reached the one above. A row that turns dark at once"
            " means other text or a broken drafter; rows that fade upwards are normal. Depths that"
            " the pipeline does not have are missing.",
            "percentunit",
            tuple(Query(alpha(depth), str(depth)) for depth in range(1, MAX_DEPTH + 1)),
            "heatmap",
            12,
            at_least=0,
            at_most=1,
        ),
        Panel(
            "Paths that reach a depth",
            "Share of drafting request rounds whose accepted path was at least so deep; position 0"
            " is depth 1. The sum over positions is the accept length less 1.",
            "percentunit",
            (
                Query(
                    ratio_to_one(rate(f"{CORRECT}_per_pos", ("position",)), rate(DRAFTS)),
                    "position {{position}}",
                ),
            ),
            width=12,
            at_least=0,
            at_most=1,
        ),
        Panel(
            "Drafts verified per depth",
            "Drafts per drafting request round at each depth: the shape of the trees.",
            "suffix: drafts",
            (
                Query(
                    ratio_to_one(rate(f"{PROPOSED}_per_pos", ("position",)), rate(DRAFTS)),
                    "position {{position}}",
                ),
            ),
            width=12,
            stacked=True,
            at_least=0,
        ),
        Panel(
            "Wasted drafts",
            "Share of verified drafts that were not right. Trees waste more than chains by design;"
            " what counts is the goodput.",
            "percentunit",
            (Query(ratio(rate("wasted_drafts"), rate(PROPOSED)), "wasted"),),
            width=12,
            at_least=0,
            at_most=1,
        ),
    ),
)

OVERALL = Row(
    "Overall",
    (
        Panel(
            "Accept length",
            "Tokens per drafting request round, the bonus token included.",
            "suffix: tokens",
            (Query(ACCEPT_LENGTH, "accept length"),),
            width=12,
        ),
        Panel(
            "Accept rate",
            "Right drafts over verified drafts, the bonus token not counted. Falls when trees grow"
            " although more tokens are emitted.",
            "percentunit",
            (Query(ACCEPT_RATE, "accept rate"),),
            width=12,
            at_least=0,
            at_most=1,
        ),
    ),
)

CONTEXT = Row(
    "By context length",
    (
        Panel(
            "Accept length by context",
            "Tokens per drafting request round, by the request's committed tokens. A line that lies"
            " lower for long contexts: the drafter does not hold over them.",
            "suffix: tokens",
            (
                Query(
                    "1 + "
                    + ratio(
                        rate(f"{CORRECT}_per_context", ("context",)),
                        rate(f"{DRAFTS}_per_context", ("context",)),
                    ),
                    "{{context}} tokens",
                ),
            ),
            width=12,
        ),
        Panel(
            "Accept rate by context",
            "Right drafts over verified drafts, by the request's committed tokens.",
            "percentunit",
            (
                Query(
                    ratio(
                        rate(f"{CORRECT}_per_context", ("context",)),
                        rate(f"{PROPOSED}_per_context", ("context",)),
                    ),
                    "{{context}} tokens",
                ),
            ),
            width=12,
            at_least=0,
            at_most=1,
        ),
    ),
)

DRAFTER = Row(
    "By drafter of a merge (needs a merge)",
    (
        Panel(
            "Accept rate by drafter",
            "Right drafts over verified drafts, of each drafter; what several proposed counts for"
            " each.",
            "percentunit",
            (
                Query(
                    ratio(
                        rate(f"{CORRECT}_per_drafter", ("drafter",)),
                        rate(f"{PROPOSED}_per_drafter", ("drafter",)),
                    ),
                    "{{drafter}}",
                ),
            ),
            width=12,
            at_least=0,
            at_most=1,
        ),
        Panel(
            "Right drafts by drafter",
            "Per second. A drafter near 0 costs time and gives nothing.",
            "suffix: drafts/s",
            (Query(rate(f"{CORRECT}_per_drafter", ("drafter",)), "{{drafter}}"),),
            width=12,
            at_least=0,
        ),
    ),
)

ACCEPTANCE = Board(
    "specstack-acceptance",
    "specstack / acceptance",
    "How many drafts are right, and where they stop being so. All servers that are selected are"
    " counted together.",
    (DEPTH, OVERALL, CONTEXT, DRAFTER),
)
