"""The numbers that Prometheus reads, by real requests."""

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.goodput_job import write_run
from uneven.errors import ConfigError
from uneven.goodput import read_run
from uneven.train.exporter import Exporter


@pytest.fixture
def report(tmp_path):
    write_run(tmp_path)
    return read_run(tmp_path)[1]


def scrape(exporter):
    """Values by name and labels; every one of them with a help text."""
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert all(family.documentation for family in families)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_numbers_are_those_of_the_report(report):
    with Exporter() as exporter:
        assert scrape(exporter) == {}
        exporter.show(report)
        found = scrape(exporter)
    assert found["uneven_goodput_ratio", "allocated"] == report.goodput_allocated
    assert found["uneven_goodput_ratio", "healthy"] == report.goodput_healthy
    assert found["uneven_wall_seconds",] == report.wall_s
    assert found["uneven_unaccounted_ratio",] == report.unaccounted == 0
    assert found["uneven_tokens_total", "committed"] == report.tokens.committed
    assert found["uneven_flops_total", "computed"] == report.flops(report.tokens.computed)
    assert found["uneven_events_total", "failure"] == 1
    assert found["uneven_device_goodput_ratio", "1"] == report.devices[1].goodput
    seconds = {key[1:]: value for key, value in found.items() if key[0] == "uneven_device_seconds"}
    assert seconds == {
        (str(device.device), kind): value for device in report.devices for kind, value in device.seconds.items()
    }


def test_taken_port_is_refused_and_a_closed_one_is_free_again(report):
    with Exporter() as exporter:
        port = exporter.port
        with pytest.raises(ConfigError, match=f"can't serve metrics at 127.0.0.1:{port}: .*use another port, or 0"):
            Exporter(port)
    with Exporter(port) as again:
        again.show(report)
        assert scrape(again)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:70000"):
        Exporter(70000)
