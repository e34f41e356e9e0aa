"""Ports. Children that end with their parent: tests/serving/test_supervisor.py."""

from __future__ import annotations

import socket

from specstack.processes import free_port


def test_a_free_port_can_be_listened_on_and_a_taken_one_is_not_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()
        taken = listener.getsockname()[1]
        assert taken not in {free_port() for _ in range(20)}
