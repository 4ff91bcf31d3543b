"""A Prometheus endpoint of the queue server, the learner and each generator: ``METRICS`` says what it shows.

A role hands over its figures when it has new ones; a thread of the endpoint answers Prometheus with the last ones. So
no request can delay the role. Nothing is served unless a port is set.
"""

# pyright: reportMissingImports=false
# prometheus-client is optional.

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from async_rl.config.config import Config
from async_rl.errors import ConfigError
from async_rl.run.records.metric_table import SHOWN, meaning

logger = logging.getLogger(__name__)

Role = Literal["queue", "learner", "generator"]


class Metric(NamedTuple):
    """One metric.

    Attributes:
        figure: the name of the role's figure, with dots between the keys of tables. Of a table, each number is shown by
            its keys. A ``*`` in it stands for the value of ``label``.
        label: the name of the label that tells the numbers of a table apart; empty for a single number.
        help: the meaning and unit.
    """

    figure: str
    label: str
    help: str


METRICS: Mapping[Role, Mapping[str, Metric]] = {
    "queue": {
        "async_rl_queue_leases": Metric("in_flight", "", "Groups that generators are sampling."),
        "async_rl_queue_ready_groups": Metric("depth", "", "Groups that wait for the learner."),
        "async_rl_queue_bytes": Metric("bytes", "", "Size of the stored groups."),
        "async_rl_queue_generators": Metric("num_generators", "", "Generators that are alive."),
        "async_rl_queue_groups_total": Metric("ledger.groups", "account", "Groups by account of the ledger."),
        "async_rl_queue_tokens_total": Metric("ledger.tokens", "account", "Tokens by account of the ledger."),
    },
    "learner": {
        f"async_rl_learner_{shown.prometheus}": Metric(
            key.replace("<dataset>", "*"), "dataset" if "<" in key else "", meaning(key)
        )
        for key, shown in SHOWN.items()
        if shown.prometheus
    },
    "generator": {
        "async_rl_generator_max_running": Metric("max_running", "", "Sequences that it can sample at a time."),
        "async_rl_generator_tokens_total": Metric("num_tokens", "", "Sampled tokens."),
        "async_rl_generator_activations_total": Metric("num_activations", "", "Activated versions of the weights."),
        "async_rl_generator_seconds_total": Metric("wall_s", "", "Time since its start."),
        "async_rl_generator_busy_seconds_total": Metric("busy_s", "", "Time in which it sampled."),
        "async_rl_generator_pause_seconds_total": Metric("pause_s", "", "Time in which it activated versions."),
        "async_rl_generator_idle_seconds_total": Metric("idle_*_s", "cause", "Time without sampling, by cause."),
    },
}
"""Name of each metric of a role -> what it shows. Those that end in ``_total`` are counters, the others gauges."""


class Endpoint:
    """The endpoint of one process, at ``port`` of ``log.prometheus_host``; None if there is none."""

    def __init__(self, role: Role, port: int | None, config: Config) -> None:
        """Start to serve. A port that can't be bound is no reason to stop a run, so that is only logged."""
        self.port: int | None = None
        self._metrics, self._figures = METRICS[role], dict[str, Any]()
        if port is None:
            return
        check_prometheus(port)
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        host = config.log.prometheus_host
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            logger.warning("no Prometheus endpoint at %s:%d: %s; free the port, or choose another", host, port, error)
            return
        self.port = self._server.server_port
        logger.info("Prometheus endpoint: http://%s:%d/metrics", host, self.port)

    def update(self, figures: Mapping[str, Any] | msgspec.Struct) -> None:
        """Show these figures from now on; those that are not among them stay."""
        if self.port is not None:
            plain = msgspec.to_builtins(figures)
            self._figures = {**self._figures, **{key: value for key, value in plain.items() if value is not None}}

    def close(self) -> None:
        if self.port is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def collect(self) -> Iterable[Any]:
        """Return the metrics in prometheus_client's form, which calls this for each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        figures = self._figures
        for name, metric in self._metrics.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric_family = family(
                name.removesuffix("_total"), metric.help, labels=[metric.label] if metric.label else None
            )
            for label, value in _values(figures, metric):
                metric_family.add_metric([label] if metric.label else [], value)
            yield metric_family


def check_prometheus(port: int | None) -> None:
    """Check that the package for an endpoint at ``port`` is installed.

    Raises:
        ConfigError: it is not.
    """
    if port is not None and importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            "log.prometheus_port, generator.prometheus_port: an endpoint needs the package prometheus-client, which is "
            "not installed: pip install 'async-rl[prometheus]', or leave the key out"
        )


def _values(figures: Mapping[str, Any], metric: Metric) -> list[tuple[str, float]]:
    """Return the numbers of a metric with their labels."""
    if "*" in metric.figure:
        pattern = re.compile(re.escape(metric.figure).replace(r"\*", "(.+)"))
        matches = ((pattern.fullmatch(key), value) for key, value in figures.items())
        return [(match[1], float(value)) for match, value in matches if match]
    value: Any = figures
    for key in metric.figure.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        return []
    return _leaves(value, "") if metric.label else [("", float(value))]


def _leaves(table: Mapping[str, Any], prefix: str) -> list[tuple[str, float]]:
    """Return the numbers of a table of tables, with the keys that lead to each, such as ``dropped/stale``."""
    numbers: list[tuple[str, float]] = []
    for key, value in table.items():
        numbers += _leaves(value, f"{prefix}{key}/") if isinstance(value, dict) else [(prefix + key, float(value))]
    return numbers
