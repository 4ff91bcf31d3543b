"""The Prometheus endpoints: what a role shows, ports that are taken, and Grafana's dashboard."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from async_rl.queue.core.ledger import Ledger
from async_rl.queue.messages import GeneratorStats, QueueStats
from async_rl.run.following.sinks import check_sinks
from async_rl.run.records.metric_table import METRIC_KEYS
from async_rl.run.records.metrics import MetricsWriter
from async_rl.run.records.prometheus import METRICS, Endpoint, Role, check_prometheus
from tests.run.test_metrics import a_config

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "async_rl.json"


def free_port() -> int:
    """Return one that is free with the two after it, below those that the system gives to outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for number in range(3):
                probes.enter_context(socket.create_server(("127.0.0.1", port + number)))
            return port


def scraped(port: int) -> dict[str, float]:
    """Sample -> value, as Prometheus reads them; labels as ``name{label}``."""
    from prometheus_client.parser import text_string_to_metric_families  # pyright: ignore[reportMissingImports]

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_queue_shows_leases_groups_and_the_ledger(tmp_path: Path):
    ledger = Ledger()
    ledger.groups.entered, ledger.groups.in_flight, ledger.groups.done = 9, 4, 3
    ledger.groups.dropped["stale"] = 2
    port = free_port()
    with closing(Endpoint("queue", port, a_config(tmp_path))) as endpoint:
        assert scraped(port) == {}
        endpoint.update(
            QueueStats(
                depth=1, bytes=100, in_flight=4, num_generators=2, generators=GeneratorStats(), ledger=ledger.as_dict()
            )
        )
        found = scraped(port)
    assert found["async_rl_queue_leases"] == 4
    assert (found["async_rl_queue_ready_groups"], found["async_rl_queue_generators"]) == (1, 2)
    assert found["async_rl_queue_groups_total{issued}"] == 9
    assert found["async_rl_queue_groups_total{dropped/stale}"] == 2
    assert found["async_rl_queue_tokens_total{received}"] == 0


def test_a_generator_shows_its_totals(tmp_path: Path):
    port = free_port()
    with closing(Endpoint("generator", port, a_config(tmp_path))) as endpoint:
        endpoint.update(GeneratorStats(wall_s=10.0, busy_s=6.0, num_tokens=500, idle_weights_s=1.5, max_running=8))
        found = scraped(port)
    assert found["async_rl_generator_tokens_total"] == 500
    assert found["async_rl_generator_busy_seconds_total"] == 6.0
    assert found["async_rl_generator_idle_seconds_total{weights}"] == 1.5


def test_the_learner_shows_its_last_rows_at_the_second_port(tmp_path: Path):
    port = free_port()
    with closing(MetricsWriter(tmp_path, a_config(tmp_path, prometheus_port=port - 1))) as writer:
        writer.write({"step": 4, "version": 3, "reward/mean": 0.5, "entropy": float("nan")})
        writer.write({"step": 5, "version": 4, "reward/mean": 0.25})
        writer.write({"step": 3, "eval/held_out/accuracy": 0.75})  # of an earlier step
        found = scraped(port)
    assert found == {
        "async_rl_learner_step": 5, "async_rl_learner_version": 4, "async_rl_learner_reward": 0.25,
        "async_rl_learner_eval_accuracy{held_out}": 0.75,
    }  # fmt: skip


def test_a_port_that_is_taken_is_logged_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = Endpoint("learner", taken.getsockname()[1], a_config(tmp_path))
    assert endpoint.port is None
    assert "no Prometheus endpoint at 127.0.0.1:" in caplog.text
    endpoint.update({"step": 1})
    endpoint.close()


def test_without_a_port_nothing_is_imported_or_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_prometheus(None)
    Endpoint("queue", None, a_config(tmp_path)).update({"depth": 1})
    with pytest.raises(ConfigError, match=r"pip install 'async-rl\[prometheus\]'"):
        check_prometheus(9400)


def test_a_port_for_all_generators_is_refused(tmp_path: Path):
    generator = a_config(tmp_path).generator.model_copy(update={"prometheus_port": 9402})
    with pytest.raises(ConfigError, match=r"generator\.prometheus_port: expected it only in --set"):
        check_sinks(a_config(tmp_path).model_copy(update={"generator": generator}))


ROLES: tuple[Role, ...] = ("queue", "learner", "generator")


def test_every_figure_exists():
    figures = {
        "queue": set(QueueStats.__struct_fields__) | {"ledger.groups", "ledger.tokens"},
        "learner": {key.replace("<dataset>", "*") for key in METRIC_KEYS},
        "generator": set(GeneratorStats.__struct_fields__) | {"idle_*_s"},
    }
    for role in ROLES:
        assert {one.figure for one in METRICS[role].values()} <= figures[role]


def test_the_dashboard_asks_for_metrics_that_exist_and_shows_nearly_all():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    known = {name for role in ROLES for name in METRICS[role]}
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [one["query"] for one in dashboard["templating"]["list"]]
    asked = {name for query in queries for name in re.findall(r"async_rl_\w+", query)}
    assert asked <= known
    assert len(asked) > 0.75 * len(known)
    rates = {name for query in queries for name in re.findall(r"rate\((\w+)", query)}
    assert [name for name in rates if not name.endswith("_total")] == [], "the rate of a gauge"
