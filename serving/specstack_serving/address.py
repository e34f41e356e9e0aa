"""Where a server listens, as a URL, and whether it can."""

from __future__ import annotations

import errno
import socket


def base_url(host: str, port: int) -> str:
    """URL of a server; IPv6 addresses stand in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def port_problem(host: str, port: int) -> str | None:
    """Why nothing can listen there, or None."""
    where = base_url(host, port).removeprefix("http://")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            other = port + 1 if port < 65535 else port - 1
            return f"{where} is in use: stop its owner, or --set engine.port={other}"
        if error.errno == errno.EACCES:
            return f"{where}: this user may not listen there: choose a port from 1024 on"
        return f"{where}: {error.strerror}"
    return None
