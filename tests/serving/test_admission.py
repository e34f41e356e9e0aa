"""The opt-out and the refusals."""

from __future__ import annotations

import json

import pytest

from specstack_serving.admission import move_request_options, wants_speculation


@pytest.mark.parametrize(
    ("custom_params", "wanted"),
    [
        (None, True),
        ({}, True),
        ({"other": 1}, True),
        ({"specstack": {}}, True),
        ({"specstack": {"speculate": True}}, True),
        ({"specstack": {"speculate": False}}, False),
    ],
)
def test_opt_out_is_read(custom_params: object, wanted: bool) -> None:
    assert wants_speculation(custom_params) is wanted


@pytest.mark.parametrize(
    "options", ["off", False, {"speculate": "no"}, {"speculate": 0}, {"specualte": False}]
)
def test_a_malformed_opt_out_is_refused(options: object) -> None:
    with pytest.raises(ValueError, match="specstack"):
        wants_speculation({"specstack": options})


def moved(request: object, *, native: bool = False) -> object:
    return json.loads(move_request_options(json.dumps(request).encode(), native=native))


def test_the_top_level_key_moves_to_custom_params() -> None:
    request = {"model": "m", "specstack": {"speculate": False}, "custom_params": {"a": 1}}
    assert moved(request) == {
        "model": "m",
        "custom_params": {"a": 1, "specstack": {"speculate": False}},
    }


def test_the_native_api_keeps_custom_params_with_the_sampling_parameters() -> None:
    request = {"text": "x", "specstack": {"speculate": False}}
    assert moved(request, native=True) == {
        "text": "x",
        "sampling_params": {"custom_params": {"specstack": {"speculate": False}}},
    }


@pytest.mark.parametrize("body", [b'"specstack"', b'{"specstack"', b'["specstack"]', b"\xff"])
def test_other_bodies_pass_unchanged(body: bytes) -> None:
    assert move_request_options(body, native=False) == body


def test_the_word_inside_a_prompt_is_not_an_option() -> None:
    body = json.dumps({"prompt": 'say "specstack"'}).encode()
    assert move_request_options(body, native=False) == body
