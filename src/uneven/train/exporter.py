"""A job's goodput for Prometheus, while it runs: the numbers of the newest report at http://127.0.0.1:PORT/metrics.

The training loop hands over reports; a thread of the server turns the newest one into text when it is asked.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import Self, final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from uneven.errors import ConfigError
from uneven.goodput import Report

ADDRESS = "127.0.0.1"


@final
class Exporter(Collector):
    """Serves at `port`, or with 0 at one that the system gives. Raises ConfigError for a port that can't be had."""

    def __init__(self, port: int = 0) -> None:
        self._report: Report | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=ADDRESS, registry=registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"can't serve metrics at {ADDRESS}:{port}: {error}; use another port, or 0") from None
        self.port: int = self._server.server_port

    def show(self, report: Report) -> None:
        """From now on this is what is served."""
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """The newest report; nothing before the first one. Called by the server's threads."""
        report = self._report
        if report is None:
            return
        yield from _whole_job(report)
        yield from _each_device(report)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _whole_job(report: Report) -> Iterator[Metric]:
    goodput = GaugeMetricFamily(
        "uneven_goodput_ratio", "Useful part of the time of allocated or of healthy devices.", labels=["over"]
    )
    goodput.add_metric(["allocated"], report.goodput_allocated)
    goodput.add_metric(["healthy"], report.goodput_healthy)
    yield goodput
    yield GaugeMetricFamily("uneven_wall_seconds", "Seconds since the job's start.", report.wall_s)
    yield GaugeMetricFamily(
        "uneven_unaccounted_ratio", "Part of the allocated time that has no kind.", report.unaccounted
    )
    tokens = CounterMetricFamily("uneven_tokens", "Target tokens that were committed or computed.", labels=["state"])
    flops = CounterMetricFamily("uneven_flops", "FLOPs of these tokens, by 6 per parameter.", labels=["state"])
    for state in ("committed", "computed"):
        count = getattr(report.tokens, state)
        tokens.add_metric([state], count)
        flops.add_metric([state], report.flops(count))
    yield from (tokens, flops)
    events = CounterMetricFamily("uneven_events", "Failures, recoveries and what else happened.", labels=["kind"])
    for kind in sorted({event.kind for event in report.events}):
        events.add_metric([kind], sum(event.kind == kind for event in report.events))
    yield events


def _each_device(report: Report) -> Iterator[Metric]:
    # Gauges: lost work moves from one kind to another, so a kind's seconds may fall.
    seconds = GaugeMetricFamily("uneven_device_seconds", "Seconds of a device by kind.", labels=["device", "kind"])
    goodput = GaugeMetricFamily("uneven_device_goodput_ratio", "Useful part of a device's time.", labels=["device"])
    unaccounted = GaugeMetricFamily(
        "uneven_device_unaccounted_seconds", "Seconds of a device that have no kind.", labels=["device"]
    )
    for device in report.devices:
        name = str(device.device)
        for kind, value in device.seconds.items():
            seconds.add_metric([name, kind], value)
        goodput.add_metric([name], device.goodput)
        unaccounted.add_metric([name], device.unaccounted_s)
    yield from (seconds, goodput, unaccounted)
