"""The frozen list of SGLang's argument names against the installed SGLang."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from specstack_dsl.freeze_sglang_args import installed
from specstack_dsl.sglang_args import frozen


@pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang")
def test_the_frozen_names_are_those_of_the_installed_sglang() -> None:
    hint = "write them again: python -m specstack_dsl.freeze_sglang_args"
    (version, names), (now, current) = frozen(), installed()
    assert version == now, hint
    assert names == current, hint


def test_the_frozen_names_are_plain_field_names() -> None:
    version, names = frozen()
    assert version == "0.5.23"
    assert len(names) > 500
    assert all(name.isidentifier() and not name.startswith("_") for name in names)
