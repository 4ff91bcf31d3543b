"""The files of deploy/kubernetes: what they say fits together, and their commands train."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.config.loading import load_config
from async_rl.net.keys import make_keys
from async_rl.process.child import package_path
from tests.end_to_end.harness import ROOT, check_ledger, roles, steps, wait_until, write_config
from tests.end_to_end.tiny import tiny_config, write_tiny_task
from tests.ports import free_port

FOLDER = ROOT / "deploy" / "kubernetes"
QUEUE = "async-rl-queue:5555"


def manifests(name: str) -> dict[str, dict[str, Any]]:
    """The objects of one file, by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / "base" / name).read_text())}


def pods() -> dict[str, dict[str, Any]]:
    """The pods' specs, by component."""
    (job,) = manifests("learner.yaml")["JobSet"]["spec"]["replicatedJobs"]
    templates = (
        manifests("queue.yaml")["StatefulSet"]["spec"]["template"],
        job["template"]["spec"]["template"],
        manifests("generators.yaml")["Deployment"]["spec"]["template"],
    )
    return {one["metadata"]["labels"]["app.kubernetes.io/component"]: one["spec"] for one in templates}


def container(name: str) -> dict[str, Any]:
    (found,) = pods()[name]["containers"]
    return found


@pytest.mark.parametrize("variant", ["base", "cpu"])
def test_the_configs_are_valid_and_use_the_ports_and_volumes_of_the_manifests(variant: str):
    config = load_config(FOLDER / variant / "run.toml", [])
    ports = {name: {port["containerPort"] for port in container(name)["ports"]} for name in pods()}
    weights, metrics = config.weights.port, config.log.prometheus_port
    assert isinstance(weights, int)
    assert metrics is not None
    assert ports["queue"] == {5555, metrics}
    assert ports["learner"] == {weights, weights + 1, 29500, metrics + 1}
    assert ports["generator"] == {metrics + 2}
    assert config.queue.advertise == f"tcp://{QUEUE}"
    for name, spec in pods().items():
        volumes = {volume["name"] for volume in spec["volumes"]} | ({"journal"} if name == "queue" else set())
        assert {mount["name"] for mount in container(name)["volumeMounts"]} == volumes
    mounted = {mount["mountPath"] for mount in container("queue")["volumeMounts"]}
    paths = (config.run.dir, config.model.path, config.data.train, config.queue.keys, config.queue.journal_dir)
    assert {f"/{str(path).split('/')[1]}" for path in paths} <= mounted
    grace_s = pods()["learner"]["terminationGracePeriodSeconds"]
    assert config.checkpoint.grace_s < grace_s < pods()["queue"]["terminationGracePeriodSeconds"]


def test_generators_never_hold_the_keys_of_queue_and_learner():
    secrets = {
        name: [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume]
        for name, spec in pods().items()
    }
    shared = ["async-rl-keys"]
    assert secrets == {"queue": shared, "learner": shared, "generator": ["async-rl-generator-keys"]}


def test_every_connection_that_a_role_needs_is_open():
    allowed: dict[str, set[int]] = {}
    for policy in yaml.safe_load_all((FOLDER / "base" / "network.yaml").read_text()):
        target = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        allowed[target] = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())}
    assert allowed == {"queue": {5555, 9400}, "learner": {5556, 5557, 9401}, "generator": {5600, 9402}}


class Cluster:
    """One machine that stands for the nodes: the volumes are folders, the queue's service is on loopback."""

    def __init__(self, directory: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._volumes = {f"/{name}": directory / name for name in ("keys", "runs", "journal", "tmp")}
        self._volumes["/etc/async-rl"] = directory / "etc"
        for folder in self._volumes.values():
            folder.mkdir(mode=0o700)
        self._master_port = free_port()

    def folder(self, mounted: str) -> Path:
        return self._volumes[mounted]

    def words(self, given: list[str], variables: Mapping[str, str]) -> list[str]:
        """A command or its arguments as they are here."""
        return [self.text(word, variables) for word in given]

    def text(self, word: str, variables: Mapping[str, str]) -> str:
        for name, value in variables.items():
            word = word.replace(f"$({name})", value)
        word = word.replace(QUEUE, self.address).replace("127.0.0.1:5555", self.address)
        word = word.replace("async-rl-learner-0-0.async-rl", "127.0.0.1").replace("29500", str(self._master_port))
        mounted = "|".join(sorted(self._volumes, reverse=True))
        return re.sub(rf"(?<![\w/])({mounted})(?=/|$)", lambda found: str(self._volumes[found[1]]), word)


def write_run(cluster: Cluster) -> Path:
    """The config of ``cpu`` with a tiny task, and both sets of keys. Returns the generator's."""
    runs = cluster.folder("/runs")
    given = tomllib.loads((FOLDER / "cpu" / "run.toml").read_text())
    tiny = tiny_config(runs, write_tiny_task(runs))
    for section, keys in tiny.items():
        given.setdefault(section, {}).update({k: v for k, v in keys.items() if k not in given[section]})
    given["run"]["dir"], given["model"]["path"] = str(runs / "run"), tiny["model"]["path"]
    given["data"]["train"] = tiny["data"]["train"]
    given["learner"] |= {"steps": 4, "groups_per_step": 2}
    port = free_port()
    given["weights"]["port"] = f"{port}-{port + 20}"
    given["queue"] |= {
        "address": f"tcp://{cluster.address}",
        "advertise": f"tcp://{cluster.address}",
        "keys": str(cluster.folder("/keys")),
        "journal_dir": cluster.text(given["queue"]["journal_dir"], {}),
    }
    given.pop("log")  # ports of Prometheus that other runs of this machine may have
    write_config(cluster.folder("/etc/async-rl") / "run.toml", given)
    make_keys(cluster.folder("/keys"), ["client", "generators"])
    secret = cluster.folder("/tmp") / "generators.key"
    (cluster.folder("/keys") / "generators.key").rename(secret)
    return secret


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_commands_of_the_manifests_train(tmp_path: Path):
    cluster = Cluster(tmp_path)
    secret = write_run(cluster)
    variables = {"NODES": "1", "RANKS": "1", "RANK_OF_NODE": "0", "POD": "generators-abc"}
    commands = {
        name: cluster.words(container(name).get("args") or container(name)["command"], variables) for name in pods()
    }
    generator = [
        word.replace(str(cluster.folder("/keys") / "generators.key"), str(secret)) for word in commands["generator"]
    ]
    generator = generator[: generator.index("--set")]  # the port of Prometheus
    torchrun, *learner = commands["learner"]
    assert torchrun == "torchrun"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": package_path({})}
    with roles(tmp_path / "logs") as start, (tmp_path / "learner.log").open("wb") as log:
        queue = start("queue", *commands["queue"])
        ranks = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *learner],
            cwd=cluster.folder("/tmp"), env=environment, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            sampler = start("generator", *generator)
            probe = cluster.words(container("queue")["livenessProbe"]["exec"]["command"], variables)
            run_dir = cluster.folder("/runs") / "run"
            wait_until("a step", lambda: steps(run_dir), deadline_s=200)
            start("probe", *probe[1:]).succeed()
            start("status", "status", str(run_dir)).succeed()
            assert ranks.wait(200) == 0, (tmp_path / "learner.log").read_text()
        finally:
            ranks.kill()
        sampler.succeed()
        queue.succeed()
    assert steps(run_dir) == [1, 2, 3, 4]
    assert check_ledger(run_dir)["groups"]["trained"] == 8
    assert json.loads((run_dir / "queue.json").read_text())
