"""The page: what it says, what it never does, and that a change anywhere is found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_folders import RawRun, Speed, answer, closed, failed, open_loop, simulated, write_folder

from specstack_loadtest import headlines, words
from specstack_loadtest.looks import colors_of
from specstack_loadtest.plots import all_plots
from specstack_loadtest.report import embedded, page, write_report
from specstack_loadtest.summary import summarise, write_summary
from specstack_loadtest.verify import differing, verify

USERS = (1, 2, 8)


def comparison(folder: Path) -> Path:
    """Plain decoding, a side that is faster, and one whose rounds cost too much."""
    speeds = {
        "plain": Speed(), "goodput": Speed(budget=3),
        "too-deep": Speed(base_s=0.09, per_request_s=0.03, budget=6),
    }  # fmt: skip
    runs = {
        (side, repeat): simulated(speed, USERS, 30, 5, seed=10 * repeat, cap=6)
        for side, speed in speeds.items()
        for repeat in range(2)
    }
    return write_folder(folder, closed(users=USERS, seconds=30, warmup=5, name="crossover"), runs)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole folder, not to be changed."""
    folder = comparison(tmp_path_factory.mktemp("made") / "f")
    write_summary(folder)
    write_report(folder)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    import shutil

    return Path(shutil.copytree(made, tmp_path / "copy"))


def text_of(folder: Path) -> str:
    """What the page shows, without its scripts."""
    body = re.search(r"<body>(.*?)<script ", (folder / "report.html").read_text(), re.DOTALL)
    assert body is not None
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body[1]))


def test_the_verdict_comes_first_and_in_words(made: Path) -> None:
    text = text_of(made)
    assert "goodput is faster than plain at every load." in text
    assert "too-deep is slower at every load." in text
    assert text.index("In short") < text.index("Throughput")
    assert "goodput gives most tokens/s; too-deep loses." in text


def concluded(*judged: str | None) -> str:
    """What is said of a side with these verdicts at 1, 2, 4, ... users; None: not compared."""
    names = [f"{2**k} user{'s' if k else ''}" for k in range(len(judged))]
    ratio = {"value": 1.5, "low": 1.2, "high": 1.8}
    summary = {
        "sides": ["plain", "fast"],
        "baseline": "plain",
        "phases": [
            {"number": k, "name": name, "users": 2**k, "rate": None} for k, name in enumerate(names)
        ],
        "comparisons": [
            {"side": "fast", "phase": k, "verdict": verdict, "by": "tokens_per_s",
             "tokens_per_s_ratio": ratio}
            for k, verdict in enumerate(judged) if verdict is not None
        ],
    }  # fmt: skip
    ((side, said),) = headlines.conclusions(summary)
    assert side == "fast"
    return said.split(". ")[0].removesuffix(".")


@pytest.mark.parametrize(
    ("judged", "said"),
    [
        (["faster", "faster", None], "faster than plain at 1 and 2 users; not compared at 1 of 3"
         " loads (4 users)"),
        ([None, "faster", None], "faster than plain at 2 users; not compared at 2 of 3 loads"
         " (1 and 4 users)"),
        (["faster", "same", "unknown"], "faster than plain at 1 user; the same within noise at"
         " 2 users; not slower at 2 of 3 loads; measured too briefly to say at 4 users"),
        (["faster", "same", None], "faster than plain at 1 user; the same within noise at 2 users;"
         " not slower at 2 of 3 loads; not compared at 1 of 3 loads (4 users)"),
        (["same", "same", "unknown"], "the same within noise at 1 and 2 users; measured too briefly"
         " to say at 4 users"),
        (["slower", "slower", None], "slower at 1 and 2 users; not compared at 1 of 3 loads"
         " (4 users)"),
    ],
)  # fmt: skip
def test_loads_that_were_not_compared_or_are_unknown_are_said(
    judged: list[str | None], said: str
) -> None:
    assert concluded(*judged) == said


@pytest.mark.parametrize(
    ("judged", "said"),
    [
        (["faster", "faster", "faster"], "faster than plain at every load"),
        (["unknown", "unknown"], "measured too briefly to say at every load"),
        (["faster", "same"], "faster than plain at 1 user; the same within noise at 2 users; never"
         " slower"),
        (["faster", "slower"], "faster than plain at 1 user; slower at 2 users"),
        (["faster"], "faster than plain at 1 user"),
    ],
)  # fmt: skip
def test_of_every_load_is_spoken_where_all_are_known(judged: list[str], said: str) -> None:
    """Control."""
    assert concluded(*judged) == said


def test_an_interrupted_comparison_says_how_far_it_came(tmp_path: Path) -> None:
    runs = {
        (side, 0): replace(simulated(speed, (1, 2), 30, 5, seed=1), complete=False)
        for side, speed in {"plain": Speed(), "goodput": Speed(budget=3)}.items()
    }
    scenario = closed(users=(1, 2, 4, 8, 16), seconds=30, warmup=5)
    (concluded,) = headlines.conclusions(summarise(write_folder(tmp_path / "f", scenario, runs)))
    assert concluded[1].startswith(
        "faster than plain at 1 and 2 users; not compared at 3 of 5 loads (4, 8 and 16 users)."
    )


def test_the_page_needs_nothing_else(made: Path) -> None:
    """No address of anything is in it, but in the texts and namespaces of the plotting library."""
    page_text = (made / "report.html").read_text()
    own = re.sub(r"<script data-bokeh.*?</script>", "", page_text, flags=re.DOTALL)
    assert re.findall(r"https?://[^\s\"'<]+", own) == []
    assert (
        re.findall(r"<(?:script|link|img|iframe)[^>]*\s(?:src|href)=\"(?!data:)", page_text) == []
    )
    assert "@import" not in own


def test_the_same_summary_gives_the_same_page(made: Path) -> None:
    from specstack_loadtest.folder import Manifest

    summary, manifest = summarise(made), Manifest.read(made)
    assert page(summary, manifest) == page(summary, manifest)


def test_every_text_is_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    runs = {("plain", 0): RawRun((answer(10.0), failed(11.0, evil, index=1)))}
    scenario = closed(name=evil, description=evil)
    folder = write_folder(tmp_path / "f", scenario, runs)
    write_summary(folder)
    text = write_report(folder).read_text()
    assert "<script>alert" not in text
    assert "<img" not in text.split("<script data-bokeh")[0]
    found = re.search(r'id="summary">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    assert json.loads(found[1])["scenario"]["name"] == evil


def test_embedded_json_cannot_end_its_element() -> None:
    data = {"a": "</script><!-- & \u2028"}
    assert "<" not in embedded(data)
    assert json.loads(embedded(data)) == data


def test_problems_stand_in_a_red_box_at_the_top(tmp_path: Path) -> None:
    plain = tuple(answer(10.0 + k, index=k) for k in range(20))
    fast = (*(replace(r, text_sha256="else") for r in plain[:3]), failed(15.0, index=3), *plain[4:])
    runs = {
        ("plain", 0): RawRun(plain), ("plain", 1): RawRun(plain),
        ("fast", 0): RawRun(fast, complete=False, reason="killed"),
    }  # fmt: skip
    folder = write_folder(tmp_path / "f", open_loop(), runs)
    write_summary(folder)
    text = write_report(folder).read_text()
    box = re.search(r'class="box bad".*?</section>', text, re.DOTALL)
    assert box is not None
    assert text.index('class="box bad"') < text.index("In short")
    for part in ("the run ended early (killed)", "1 of 20", "3 of 19 greedy answers differ"):
        assert part in box[0]


def test_no_problem_has_no_box(made: Path) -> None:
    """Control."""
    assert 'class="box bad"' not in (made / "report.html").read_text()


def test_a_single_side_without_baseline_has_a_page(tmp_path: Path) -> None:
    records = tuple(answer(10.0 + 0.5 * k, index=k) for k in range(60))
    folder = write_folder(tmp_path / "f", closed(), {("server", 0): RawRun(records)}, baseline=None)
    write_summary(folder)
    write_report(folder)
    text = text_of(folder)
    assert "No baseline was measured" in text
    assert "Not checked: there is no baseline." in text
    assert "times" not in text.split("Latency")[0].split("Throughput")[1]


def test_paired_differences_are_shown_of_each_repeat(tmp_path: Path) -> None:
    """30 ms sooner in one repeat, 10 ms in the other; nothing of the kind for the baseline."""
    runs = {
        (side, repeat): RawRun(
            tuple(answer(10.0 + k, index=k, ttft_s=0.1 - less_s) for k in range(20))
        )
        for side, both in {"plain": (0.0, 0.0), "fast": (0.03, 0.01)}.items()
        for repeat, less_s in enumerate(both)
    }
    folder = write_folder(tmp_path / "f", open_loop(), runs)
    write_summary(folder)
    write_report(folder)
    assert text_of(folder).count("-30.0 ms, -10.0 ms") == 2  # to the first chunk, and to the end
    assert verify(folder) == []


def test_a_folder_with_nothing_to_show_has_a_page(tmp_path: Path) -> None:
    runs = {("plain", 0): RawRun((failed(10.0, "connect"),), complete=False)}
    folder = write_folder(tmp_path / "f", closed(), runs)
    write_summary(folder)
    write_report(folder)
    assert "1 of 1 requests failed" in text_of(folder)
    assert verify(folder) == []


def test_the_speedup_is_shown_against_one(made: Path) -> None:
    summary = summarise(made)
    fast = [c for c in summary["comparisons"] if c["side"] == "goodput"]
    assert min(c["tokens_per_s_ratio"]["low"] for c in fast) > 1.2
    plot = all_plots({**summary, "comparisons": fast})["crossover"]
    assert plot.y_range.start < 1 < plot.y_range.end


def test_every_side_keeps_its_colour(made: Path) -> None:
    summary = summarise(made)
    colors = colors_of(summary)
    assert len(set(colors.values())) == 3
    for plot in all_plots(summary).values():
        for renderer in plot.select({"type": object}):
            for tag in getattr(renderer, "tags", ()):
                assert tag == "rule" or tag == "interval" or tag.removeprefix("side:") in colors


def test_numbers_are_written_with_three_digits() -> None:
    written = [words.amount(x) for x in (None, 0, 0.1234, 1.234, 12.34, 123.4, 12345.6, 0.00012)]
    assert written == [words.DASH, "0", "0.123", "1.23", "12.3", "123", "12,346", "1.2e-04"]
    assert [words.milliseconds(x) for x in (1.5, 99.96, 123.4, 1234, 65_000)] == [
        "1.50 ms", "100.0 ms", "123 ms", "1.23 s", "65.0 s",
    ]  # fmt: skip
    assert [words.signed_ms(x) for x in (-12.0, 0.0, 12.0)] == ["-12.0 ms", "0 ms", "+12.0 ms"]
    assert [words.percent(x) for x in (None, 0, 0.005, 0.05, 0.5)] == [
        words.DASH,
        "0 %",
        "0.50 %",
        "5.0 %",
        "50 %",
    ]
    assert words.listed(["a", "b", "c"]) == "a, b and c"


def test_an_untouched_folder_is_verified(made: Path) -> None:
    assert verify(made) == []


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    """Change the first place of a text in a file."""

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def edit_number(name: str, pattern: str) -> Callable[[Path], None]:
    """Add one to the last digit that a pattern's group ends with."""

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        match = re.search(pattern, text, re.DOTALL)
        assert match is not None
        at = match.end(1) - 1
        digit = (int(text[at]) + 1) % 10
        (folder / name).write_text(f"{text[:at]}{digit}{text[at + 1 :]}")

    return change


def removed(name: str) -> Callable[[Path], None]:
    """Remove a file."""
    return lambda folder: (folder / name).unlink()


def added(name: str) -> Callable[[Path], None]:
    """Add an empty one."""
    return lambda folder: (folder / name).touch()


RAW = "raw/plain/0/requests.jsonl"
PAGE, TABLES = "report.html", "report.html: its text and tables"
VALUE = r'"tokens_per_s": \{\s+"value": (\d+\.\d+)'
EMBEDDED = r'"tokens_per_s":\{"value":(\d+\.\d+)'


@pytest.mark.parametrize(
    ("change", "words_of_it"),
    [
        (edit(RAW, '"worker":0', '"worker":1'), [f"{RAW} was changed"]),
        (edit(RAW, "{", "["), ["no summary can be made of the raw files", "requests.jsonl:1"]),
        (
            edit("scenario.yaml", "seconds: 30", "seconds: 31"),
            ["scenario.yaml was", "summary.json"],
        ),
        (edit_number("summary.json", VALUE), ["results[0].tokens_per_s.value"]),
        (edit_number("summary.csv", r"plain,1 user,(\d+)"), ["summary.csv is not"]),
        (edit_number(PAGE, EMBEDDED), ["report.html: its embedded summary"]),
        (edit_number(PAGE, r'<td class="number">(\d+\.\d)'), [TABLES]),
        (edit(PAGE, "goodput gives most", "too-deep gives most"), [TABLES]),
        (edit(PAGE, '"depth of the draft"', '"depth"'), ["report.html: its plots"]),
        (edit(PAGE, "</html>", "<!-- --></html>"), ["report.html is not what"]),
        (removed("raw/plain/1/metrics.jsonl"), ["raw/plain/1/metrics.jsonl is missing"]),
        (added("raw/plain/1/more"), ["raw/plain/1/more is not in manifest.json"]),
        (removed("summary.json"), ["summary.json is missing"]),
        (removed(PAGE), ["report.html is missing"]),
    ],
)
def test_a_change_is_found(
    copied: Path, change: Callable[[Path], None], words_of_it: list[str]
) -> None:
    """Control of the check: one change each."""
    change(copied)
    found = "\n".join(verify(copied))
    for expected in words_of_it:
        assert expected in found


def test_differing_names_the_places() -> None:
    one: dict[str, Any] = {"a": [1, {"b": 2}], "c": 3}
    other: dict[str, Any] = {"a": [1, {"b": 5}], "d": 3}
    assert sorted(differing(one, other)) == ["a[1].b", "c", "d"]
    assert list(differing(one, one)) == []


def two_sides(one: str, other: str) -> dict[str, Any]:
    """The comparisons of two sides at one load."""
    ratio = {"value": 1.0, "low": 0.9, "high": 1.1}
    return {
        "sides": ["plain", "one", "other"],
        "baseline": "plain",
        "phases": [{"number": 0, "name": "2 users", "users": 2, "rate": None}],
        "comparisons": [
            {"side": side, "phase": 0, "verdict": verdict, "by": "tokens_per_s",
             "tokens_per_s_ratio": ratio}
            for side, verdict in (("one", one), ("other", other))
        ],
    }  # fmt: skip


def test_a_side_that_nothing_is_known_of_comes_last() -> None:
    sides = [side for side, _ in headlines.conclusions(two_sides("unknown", "slower"))]
    assert sides == ["other", "one"]
    assert [side for side, _ in headlines.conclusions(two_sides("slower", "same"))] == [
        "other",
        "one",
    ]


@pytest.mark.parametrize(
    ("verdict", "said"),
    [("unknown", "no side is known to be faster than plain."),
     ("same", "no side is faster than plain.")],
)  # fmt: skip
def test_what_is_not_known_is_not_denied(verdict: str, said: str) -> None:
    summary = two_sides("same", verdict)
    by_side = {found["side"]: found for found in summary["comparisons"]}
    assert headlines._headline(summary, [], by_side) == said


def estimate(low: float | None, high: float | None) -> dict[str, float | None]:
    """Its value lies in the middle; None: it has no interval."""
    if low is None or high is None:
        return {"value": 1.0, "low": None, "high": None}
    return {"value": (low + high) / 2, "low": low, "high": high}


def alone(users: int | None, **found: tuple[float | None, float | None]) -> str:
    """The headline of sides without a baseline, by tokens/s (users) or time to the answer."""
    one = estimate(1.0, 1.0)
    results = [
        {
            "side": side, "phase": 0,
            "tokens_per_s": estimate(*ends) if users else one,
            "e2e_ms": {"mean": one if users else estimate(*ends)},
        }
        for side, ends in found.items()
    ]  # fmt: skip
    return headlines._headline({"baseline": None, "phases": [{"users": users}]}, results, {})


@pytest.mark.parametrize(
    ("users", "found", "said"),
    [
        (4, {"a": (95, 105), "b": (96, 106)}, "b and a are the same within noise."),
        (4, {"a": (95, 105), "b": (106, 110)}, "b gives most tokens/s."),
        (4, {"a": (95, 105), "b": (96, 106), "c": (80, 90)},
         "b and a are the same within noise, ahead of c."),
        (4, {"a": (95, 105), "b": (None, None)}, "measured too briefly to say."),
        (None, {"a": (95, 105), "b": (96, 106)}, "a and b are the same within noise."),
        (None, {"a": (95, 105), "b": (106, 110)}, "a answers soonest."),
        (4, {"a": (95, 105)}, ""),
    ],
)  # fmt: skip
def test_without_a_baseline_the_best_side_is_named_where_intervals_tell(
    users: int | None, found: dict[str, tuple[float | None, float | None]], said: str
) -> None:
    assert alone(users, **found) == said


@pytest.mark.parametrize(
    ("by", "one", "other", "said"),
    [
        ("tokens_per_s", (1.2, 1.4), (1.3, 1.5),
         "other and one are faster than plain and the same within noise."),
        ("tokens_per_s", (1.2, 1.4), (1.5, 1.6), "other gives most tokens/s."),
        ("e2e_ms", (-90.0, -70.0), (-80.0, -60.0),
         "one and other are faster than plain and the same within noise."),
        ("e2e_ms", (-90.0, -70.0), (-60.0, -50.0), "one answers soonest."),
    ],
)  # fmt: skip
def test_of_several_faster_sides_the_best_is_named_where_intervals_tell(
    by: str, one: tuple[float, float], other: tuple[float, float], said: str
) -> None:
    by_side = {
        side: {
            "side": side, "verdict": "faster", "by": by, "tokens_per_s_ratio": estimate(*ends),
            "paired": {"e2e_ms": {"difference": estimate(*ends)}},
        }
        for side, ends in (("one", one), ("other", other))
    }  # fmt: skip
    assert headlines._headline({"baseline": "plain"}, [], by_side) == said
