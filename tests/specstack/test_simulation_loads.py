"""Loads say what they are asked for; bad ones are refused with file and line."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from specstack.simulation.errors import SimulationError
from specstack.simulation.loads import LoadOptions, parse_load

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.9799600,160,1
"""
MOONCAKE = """{"timestamp": 0, "input_length": 640, "output_length": 32, "hash_ids": [0]}
{"timestamp": 2500, "input_length": 64, "output_length": 16, "hash_ids": [1]}
"""


def test_a_closed_load_keeps_its_concurrency():
    load = parse_load("closed:16", LoadOptions(max_requests=50))
    assert load.arrivals is None
    assert load.concurrency.tolist() == [16] * 50


def test_steps_last_about_as_long_each():
    load = parse_load("steps:1,16,1", LoadOptions(max_requests=180))
    assert load.concurrency.tolist() == [1] * 10 + [16] * 160 + [1] * 10


def test_made_up_lengths_have_their_means():
    options = LoadOptions(max_requests=20000, prompt_tokens=300, output_tokens=80)
    load = parse_load("closed:1", options)
    assert load.prompt_lens.mean() == pytest.approx(300, rel=0.02)
    assert load.output_lens.mean() == pytest.approx(80, rel=0.02)


def test_bursts_are_burstier_than_poisson_at_the_same_rate():
    options = LoadOptions(max_requests=20000)
    gaps = {}
    for text in ("poisson:4", "burst:4", "burst:4,0.1"):
        arrivals = parse_load(text, options).arrivals
        gaps[text] = np.diff(arrivals)
        assert gaps[text].mean() == pytest.approx(0.25, rel=0.1)
    spread = [gap.std() / gap.mean() for gap in gaps.values()]
    assert spread == pytest.approx([1.0, 2.0, 10**0.5], rel=0.1)


def test_another_seed_is_another_load():
    one, again, other = (
        parse_load("poisson:4", LoadOptions(seed=seed)).arrivals for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()


def test_arrivals_of_azure_are_scaled(tmp_path):
    file = tmp_path / "code.csv"
    file.write_text(AZURE)
    options = LoadOptions(scale_lengths=Fraction(1, 16), scale_time=0.5)
    load = parse_load(f"trace:{file}", options)
    np.testing.assert_allclose(load.arrivals, [0, 0.026, 1.0], atol=1e-6)
    assert load.prompt_lens.tolist() == [300, 199, 10]
    assert load.output_lens.tolist() == [1, 1, 1]
    assert len(parse_load(f"trace:{file}", LoadOptions(max_requests=2))) == 2


def test_arrivals_of_mooncake_are_milliseconds(tmp_path):
    file = tmp_path / "conversation.jsonl"
    file.write_text(MOONCAKE)
    load = parse_load(f"trace:{file}", LoadOptions())
    assert load.arrivals.tolist() == [0, 2.5]
    assert (load.prompt_lens.tolist(), load.output_lens.tolist()) == ([640, 64], [32, 16])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", AZURE + "2023-11-16 18:17:06.0,many,1\n", r"a\.csv:5: not an arrival: "),
        ("a.csv", "when,what\n1,2\n", r"a\.csv:2: not an arrival: KeyError\('TIMESTAMP'\)"),
        ("a.csv", AZURE.splitlines()[0], r"a\.csv: no request in this file"),
        ("a.jsonl", MOONCAKE + "{\n", r"a\.jsonl:3: not an arrival: "),
        ("a.jsonl", "[1]\n", r"a\.jsonl:1: not an arrival: "),
        ("a.txt", "", r"expected trace:FILE\.csv \(TIMESTAMP,"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(SimulationError, match=message):
        parse_load(f"trace:{tmp_path / name}", LoadOptions())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("closd:4", "--load closd:4: no kind 'closd', did you mean 'closed'"),
        ("closed:0", "--load closed:0: expected numbers above 0, for example closed:16"),
        ("closed:1,2", "for example closed:16"),
        ("poisson:1,2", "for example poisson:2.5"),
        ("burst:x", "for example burst:2.5 or burst:2.5,0.1"),
        ("trace:none.csv", "none.csv: No such file or directory"),
    ],
)
def test_a_load_that_cannot_be_is_refused(text, message):
    with pytest.raises(SimulationError) as error:
        parse_load(text, LoadOptions())
    assert message in str(error.value).replace("; did", ", did")
