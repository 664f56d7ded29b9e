"""What ``serve`` settles before anything is loaded: each wrong thing is one ``SetupError``, in a second or two."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from collections.abc import MutableMapping

from microbatch.errors import SetupError
from microbatch.executor.limits import length_in_file, require_length
from microbatch.executor.sources import ModelFiles, Source, check_quantization, find_source
from microbatch.settings import Settings

logger = logging.getLogger(__name__)


def prefer_passive_waiting(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP threads sleep between parallel regions. Must run before torch is imported; a user's own choice stays.

    Threads that spin for long take the CPU from each other as soon as anything else runs on the machine. A short spin,
    a fraction of a millisecond, bridges the gap between two layers, which is shorter than going to sleep and waking.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment["OMP_WAIT_POLICY"] = "passive"
        environment.setdefault("GOMP_SPINCOUNT", "5000")


def preflight(settings: Settings) -> Source:
    """Check policy, keys, device, model name, packages and port; returns what the model's name means.

    Imports no torch, unless a GPU is asked for: only torch knows whether it can use one.
    """
    from microbatch.wiring import policy_of

    policy_of(settings)
    keys = settings.api_keys()
    if settings.device == "cuda":
        from microbatch.executor.precision import choose_device

        choose_device(settings.device)
    source = find_source(settings.model)
    check_quantization(source, settings.quantization)
    check_port(settings.host, settings.port)
    if not keys and not _is_loopback(settings.host):
        logger.warning("listening on %s without an API key: everyone who reaches it can use it", settings.host)
    return source


def check_files(files: ModelFiles, settings: Settings) -> None:
    """What the model's own config refuses, before torch and the weights are loaded."""
    limit = length_in_file(files.folder / "config.json") if files.gguf_file is None else None
    if limit is not None:
        require_length(settings.max_model_len, limit)


def check_port(host: str, port: int) -> None:
    """``SetupError`` when a server could not listen there; the sockets are closed again."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise SetupError(f"--host {host!r} is not an address") from None
    errors = [error for *_, error in ((where, _try_to_bind(where[0], where[4])) for where in found) if error]
    taken = [error for error in errors if error.errno == errno.EADDRINUSE]
    if not taken and len(errors) < len(found):
        return
    reason = (taken or errors)[0].errno
    if reason == errno.EADDRINUSE:
        raise SetupError(f"port {port} on {host} is taken: stop the server there or choose another --port")
    if reason == errno.EACCES:
        raise SetupError(f"port {port} may not be used without special rights: choose a --port above 1023")
    raise SetupError(f"cannot listen on {host} port {port}: {os.strerror(reason or 0)}")


def _try_to_bind(family: int, address: object) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)  # type: ignore[arg-type]
    except OSError as error:
        return error
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
