"""Every manifest passes the validator of its format, for small clusters and for large ones with GPUs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import dockerfile
import jsonschema
import kubernetes_validate
import pytest
from compose_spec import PyCompose
from ray.autoscaler._private.util import prepare_config, validate_config
from ruamel.yaml import YAML

from command_line import assert_refused, narrowcast
from deployed import pods, schema
from narrowcast.experiment import build_experiment

KUBERNETES = "1.34"
LARGE = """\
name: lab
image: registry.example.org/narrowcast:7
head: {cpus: 2, memory_gib: 16}
workers:
- {name: plain, count: 20, cpus: 16, memory_gib: 64, resources: {link: 2, "site-a": 1}}
- {name: gpus, count: 2, cpus: 8, gpus: 4, memory_gib: 128}
service_account: trainer
mlflow: {artifacts: /artifacts, port: 5001}
machines: {head: 198.51.100.1, workers: [198.51.100.2]}
"""


@pytest.fixture(params=["small", "large"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    if request.param == "small":
        return []
    (tmp_path / "cluster.yaml").write_text(LARGE)
    return ["--from", str(tmp_path / "cluster.yaml")]


def written(kind: str, *words: str) -> list[dict[str, Any]]:
    said = narrowcast("manifest", kind, *words)
    assert said.status == 0, said.err
    return list(YAML(typ="safe", pure=True).load_all(said.out))


def test_a_raycluster_is_one_of_kuberay_and_its_pods_of_kubernetes(source: list[str]) -> None:
    (cluster,) = written("raycluster", *source)
    jsonschema.validate(cluster, schema("RayCluster"))
    for pod in pods(cluster["spec"]):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    if source:
        plain, gpus = cluster["spec"]["workerGroupSpecs"]
        assert plain["replicas"] == 20
        (quoted,) = shlex.split(plain["rayStartParams"]["resources"])  # as the shell that starts Ray sees it
        assert json.loads(quoted) == {"link": 2, "site-a": 1}
        assert gpus["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_a_rayjob_brings_the_modules_of_its_classes_and_the_files_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "bands.py").write_text(
        "from narrowcast.platform.data.digits import Digits\nfrom parts import CLIENTS\nfrom typing import Literal\n"
        "class Own(Digits):\n    kind: Literal['own'] = 'own'\n    clients: int = CLIENTS\n"
    )
    (tmp_path / "parts.py").write_text("CLIENTS = 20\n")
    (tmp_path / "fleet.csv").write_text(
        "client,uplink_mbit_per_second,downlink_mbit_per_second,compute_speed\n"
        + "".join(f"{client},1,1,1\n" for client in range(20))
    )
    path = tmp_path / "paper.yaml"
    fleet = f"fleet: {{kind: trace, path: {tmp_path / 'fleet.csv'}}}"
    path.write_text(f"data: bands:Own\nalgorithm: fedavg\n{fleet}\n")
    configuration, job = written("rayjob", "--trust", "--experiment", str(path))
    kubernetes_validate.validate(configuration, KUBERNETES, strict=True)
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    volume = head["volumes"][-1]["configMap"]
    placed = {item["path"]: configuration["data"][item["key"]] for item in volume["items"]}
    assert placed["plugins/bands.py"] == (tmp_path / "bands.py").read_text()
    assert placed["plugins/parts.py"] == "CLIENTS = 20\n"
    assert placed["files/0-fleet.csv"] == (tmp_path / "fleet.csv").read_text()
    values = YAML(typ="safe", pure=True).load(placed["config.yaml"])
    assert values["fleet"]["path"] == "/etc/narrowcast/files/0-fleet.csv"  # where the ConfigMap is mounted
    assert values["backend"]["kind"] == "ray"  # as it is submitted
    mounted = tmp_path / "etc"  # what the pod finds
    for name, text in placed.items():
        (mounted / name).parent.mkdir(parents=True, exist_ok=True)
        (mounted / name).write_text(text.replace("/etc/narrowcast", str(mounted)))
    program = "from narrowcast.experiment import load_experiment; print(load_experiment('config.yaml').data.clients)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=mounted, capture_output=True, text=True, check=True)
    assert ran.stdout == "20\n"


def test_a_rayjob_whose_clients_would_train_on_the_head_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "local.yaml").write_text("data: digits\nalgorithm: fedavg\nbackend: local\n")
    said = narrowcast("manifest", "rayjob", "--experiment", tmp_path / "local.yaml")
    assert said.status == 0
    assert "has backend: local, so that its clients train on the head, which has 0 CPUs" in said.err
    (tmp_path / "large.py").write_text(f"# {'x' * 1_000_000}\n")
    with (tmp_path / "large.py").open("a") as file:
        file.write("from narrowcast.platform.data.digits import Digits\nfrom typing import Literal\n")
        file.write("class Own(Digits):\n    kind: Literal['own'] = 'own'\n")
    (tmp_path / "large.yaml").write_text("data: large:Own\nalgorithm: fedavg\n")
    said = narrowcast("manifest", "rayjob", "--trust", "--experiment", tmp_path / "large.yaml")
    assert_refused(said, "bytes, and a ConfigMap holds 1,000,000; put the modules into the image")


def test_a_wrong_kind_of_manifest_is_named(tmp_path: Path) -> None:
    del tmp_path
    assert_refused(narrowcast("manifest"), "Missing argument 'KIND'")


def test_a_rayjob_brings_the_run_that_it_starts(source: list[str]) -> None:
    configuration, job = written("rayjob", *source, "--experiment", "scolr-ml1m")
    kubernetes_validate.validate(configuration, KUBERNETES, strict=True)
    jsonschema.validate(job, schema("RayJob"))
    for pod in pods(job["spec"]["rayClusterSpec"]):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    values = YAML(typ="safe", pure=True).load(configuration["data"]["config.yaml"])
    assert build_experiment(values, "config.yaml").rounds == 1000
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in head["containers"][0]["volumeMounts"]}
    assert f"{mounts['config']}/config.yaml --continue --output {mounts['runs']}" in job["spec"]["entrypoint"]
    assert head["volumes"][-1] == {"name": "config", "configMap": {"name": configuration["metadata"]["name"]}}


def test_rays_launcher_takes_its_file(source: list[str]) -> None:
    (config,) = written("launcher", *source)
    validate_config(prepare_config(config))


def test_docker_parses_the_dockerfile_and_it_copies_what_is_there(source: list[str]) -> None:
    said = narrowcast("manifest", "dockerfile", *source)
    commands = dockerfile.parse_string(said.out)
    assert commands[0].cmd.upper() == "FROM"
    root = Path(__file__).parents[2]
    copied = [path for each in commands if each.cmd.upper() == "COPY" for path in each.value[:-1]]
    assert copied
    assert all((root / path).exists() for path in copied)
    assert ("download.pytorch.org" in said.out) == (not source)  # with GPUs, torch comes with CUDA


def test_compose_takes_its_file_which_holds_no_secret(source: list[str]) -> None:
    said = narrowcast("manifest", "compose", *source)
    project = PyCompose.from_yaml(said.out)
    (values,) = written("compose", *source)
    workers = {"plain", "gpus"} if source else {"workers"}
    assert set(project.service_names()) == {"postgres", "mlflow", "head"} | workers
    needed = {name for service in values["services"].values() for name in service.get("secrets", ())}
    assert needed == set(values["secrets"])
    published = [port for service in values["services"].values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_the_description_is_what_it_was_made_from(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(LARGE)
    first = narrowcast("manifest", "description", "--from", str(tmp_path / "cluster.yaml")).out
    (tmp_path / "again.yaml").write_text(first)
    assert narrowcast("manifest", "description", "--from", str(tmp_path / "again.yaml")).out == first
    changed = narrowcast("manifest", "description", "workers.0.count=8").out
    assert YAML(typ="safe", pure=True).load(changed)["workers"][0]["count"] == 8


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        (["raycluster", "workers.0.cpu=3"], ["workers.0.cpu is unknown", "cpus"]),
        (["raycluster", "workers.0.cpus=-1"], ["workers.0.cpus = -1", "greater than or equal to 0"]),
        (["raycluster", "tracking_uri=http://u:pw@h"], ["tracking_uri"]),
        (["raycluster", "--experiment", "scolr-ml1m"], ["--experiment", "leave it out"]),
        (["rayjob"], ["--experiment", "name it"]),
        (["rayjob", "--experiment", "scolr-ml1m", "workers.0.count=0"], ["backend.actors = 2", "room for 0"]),
        (["compose", "--from", "no-such.yaml"], ["no-such.yaml", "cannot be read"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_a_cluster_that_cannot_be_is_refused(words: list[str], phrases: list[str]) -> None:
    assert_refused(narrowcast("manifest", *words), *phrases)
