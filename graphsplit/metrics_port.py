"""Serves numbers about this process in Prometheus's format: ``GS_METRICS_PORT``.

The library ``prometheus-client`` does it; it is an extra, ``graphsplit[metrics]``, and imported
only where metrics are asked for. On loopback by default; beyond it only under mutual TLS. Without
TLS a browser on this machine is the only stranger, so names that lead here are not answered.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from graphsplit.errors import ConfigurationError
from graphsplit.security.options import SecurityOptions
from graphsplit.security.protection import Protection, require_certificates
from graphsplit.settings import Watching

_Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Samples = tuple[tuple[tuple[str, ...], float], ...]

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


@dataclass(frozen=True)
class Gauge:
    """One metric, as it is now.

    Attributes:
        name: Without the prefix ``graphsplit_``, and without ``_total``.
        help: What it is, with its unit.
        kind: ``"counter"``, ``"gauge"`` or ``"histogram"``.
        labels: Names of the labels.
        samples: For each combination of labels, the value.
        buckets: Of a histogram, for each combination: bounds and how many were at or below.
    """

    name: str
    help: str
    kind: str
    labels: tuple[str, ...] = ()
    samples: Samples = ()
    buckets: tuple[tuple[tuple[str, float], ...], ...] = ()


class _Collector:
    """Looks at the metrics when somebody asks, and never in between."""

    def __init__(self, look: Callable[[], Iterable[Gauge]]) -> None:
        self._look = look

    def collect(self) -> Iterable[Any]:
        """The families of prometheus-client."""
        from prometheus_client import core

        for metric in self._look():
            name = f"graphsplit_{metric.name}"
            labels = list(metric.labels)
            if metric.kind == HISTOGRAM:
                family: Any = core.HistogramMetricFamily(name, metric.help, labels=labels)
                for (values, total), buckets in zip(metric.samples, metric.buckets, strict=True):
                    family.add_metric(values, list(buckets), total)
            else:
                made = (
                    core.CounterMetricFamily if metric.kind == COUNTER else core.GaugeMetricFamily
                )
                family = made(name, metric.help, labels=labels)
                for values, value in metric.samples:
                    family.add_metric(values, value)
            yield family


def serve_metrics(
    look: Callable[[], Iterable[Gauge]],
    watching: Watching,
    security: SecurityOptions,
    protection: Protection,
    *,
    offset: int,
    what: str,
) -> Callable[[], None]:
    """Serve metrics, if they are asked for, from threads of their own.

    Args:
        look: Gives them; called from another thread, whenever somebody asks.
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
