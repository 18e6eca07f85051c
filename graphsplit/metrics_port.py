"""Serves numbers about this process in Prometheus's format: ``GS_METRICS_PORT``.

The library ``prometheus-client`` does it; it is an extra, ``graphsplit[metrics]``, and imported
only where metrics are asked for. On loopback by default; beyond it only under mutual TLS. Without
TLS a browser on this machine is the only stranger, so names that lead here are not answered.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from graphsplit.errors import ConfigurationError
from graphsplit.security.options import SecurityOptions
from graphsplit.security.protection import Protection, require_certificates
from graphsplit.settings import Watching

_Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def metric(
    name: str,
    text: str,
    values: float | Mapping[str, float],
    *,
    label: str = "",
    is_counter: bool = False,
) -> Any:
    """One metric as it is now, of prometheus-client.

    Args:
        name: Without the prefix ``graphsplit_``, and without ``_total``.
        text: What it is, with its unit.
        values: The value; or that of each value of the label.
        label: Name of the label; empty for none.
        is_counter: Whether it only grows.
    """
    from prometheus_client import core

    kind = core.CounterMetricFamily if is_counter else core.GaugeMetricFamily
    if not isinstance(values, Mapping):
        return kind(f"graphsplit_{name}", text, value=values)
    family = kind(f"graphsplit_{name}", text, labels=[label])
    for one, value in values.items():
        family.add_metric([one], value)
    return family


class _Collector:
    """Looks at the metrics when somebody asks, and never in between."""

    def __init__(self, look: Callable[[], Iterable[Any]]) -> None:
        self.collect = look


def serve_metrics(
    look: Callable[[], Iterable[Any]],
    watching: Watching,
    security: SecurityOptions,
    protection: Protection,
    *,
    offset: int,
    what: str,
) -> Callable[[], None]:
    """Serve metrics, if they are asked for, from threads of their own.

    Args:
        look: Gives them, of prometheus-client; called from another thread, whenever somebody asks.
        watching: Where to serve them.
        security: The files of the certificates.
        protection: What they hold.
        offset: Added to the port: processes of one machine share the setting.
        what: Whose metrics, in words: ``"the metrics of worker 3"``.

    Returns:
        What ends serving.

    Raises:
        ConfigurationError: The library is missing, the address cannot be bound, or is one that
            others can reach without a certificate.
    """
    if watching.metrics_port is None:
        return lambda: None
    host, port = watching.metrics_host, watching.metrics_port + offset
    require_certificates(host, protection, what=what)
    prometheus_client = _library(watching.metrics_port)
    registry = prometheus_client.CollectorRegistry()
    registry.register(_Collector(look))
    prometheus_client.ProcessCollector(registry=registry)
    tls = _tls_options(security) if protection.tls is not None else {}
    try:
        server, thread = prometheus_client.start_http_server(
            port, addr=host, registry=registry, **tls
        )
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"{what} cannot be served on {host}:{port} (GS_METRICS_HOST, GS_METRICS_PORT): {error}"
            f"\n  Fix: choose another GS_METRICS_PORT; the scheduler takes it, and worker r the "
            f"port r + 1 above it"
        ) from None

    if not tls:
        server.set_app(_for_own_names(server.get_app(), host))

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(1.0)

    return close


def _for_own_names(app: _Application, host: str) -> _Application:
    """Answer only who asks for this machine by its address, ``localhost`` or ``host``.

    A page in a browser of this machine may have a name of its own that leads here, and would read
    the answer (DNS rebinding); it cannot ask for an address.
    """

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        asked = environ.get("HTTP_HOST", "")
        if _is_own_name(asked, host):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"metrics are told to who asks by address, or by GS_METRICS_HOST\n"]

    return answer


def _is_own_name(asked: str, host: str) -> bool:
    """Whether a ``Host`` header names this machine; one that is missing comes of no browser."""
    name = asked if asked.endswith("]") else asked.rpartition(":")[0] or asked
    name = name.removeprefix("[").removesuffix("]").lower()
    if name in ("", "localhost", host.lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _library(port: int) -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise ConfigurationError(
            f"GS_METRICS_PORT={port} asks for metrics, and the package prometheus-client is not "
            f"there\n  Fix: pip install 'graphsplit[metrics]', or unset it"
        ) from None
    return prometheus_client


def _tls_options(security: SecurityOptions) -> dict[str, Any]:
    return {
        "certfile": security.tls_cert,
        "keyfile": security.tls_key,
        "client_cafile": security.tls_ca,
        "client_auth_required": True,
    }
