"""The server's process: its socket, and its end."""

from __future__ import annotations

import signal
import socket
from typing import Any

import uvicorn

from halflife.serve.gate import Application

PATIENCE = 30  # seconds for which answers that have begun may go on after a signal


class Listener(uvicorn.Server):
    """uvicorn's server, which prints where it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        for name in (s.getsockname() for s in sockets or ()):
            host = f"[{name[0]}]" if ":" in name[0] else name[0]
            print(f"listening on http://{host}:{name[1]}/v1", flush=True)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine. Port 0 takes a free one.

    Raises:
        ValueError: the address is in use, or is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def listen(application: Application, listening: socket.socket, max_connections: int) -> None:
    """Serve until SIGTERM or Ctrl-C. Then answers that have begun are completed, and the process ends with its signal.

    `listening` is the socket of `bind`. Beyond `max_connections`, connections get status 503.

    Raises:
        SystemExit: after SIGTERM, with exit code 143.
    """

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)  # uvicorn raises the signal again when it has shut down
    config = uvicorn.Config(
        application, log_level="warning", access_log=False, lifespan="on", server_header=False,
        limit_concurrency=max_connections, timeout_graceful_shutdown=PATIENCE,
    )  # fmt: skip
    Listener(config).run(sockets=[listening])
