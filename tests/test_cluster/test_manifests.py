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
from narrowcast.cluster.deployment import Deployment
from narrowcast.cluster.ray_jobs import STOP_SECONDS

KUBERNETES = "1.34"
DEPLOY = Path(__file__).parents[2] / "deploy"
LARGE = """\
name: lab
image: registry.example.org/narrowcast:7
head: {cpus: 2, memory_gib: 16}
workers:
- {name: plain, count: 20, cpus: 16, memory_gib: 64, resources: {link: 2, "site-a": 1}}
- {name: gpus, count: 2, cpus: 8, gpus: 4, memory_gib: 128}
service_account: trainer
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


def test_a_wrong_kind_of_manifest_is_named(tmp_path: Path) -> None:
    del tmp_path
    assert_refused(narrowcast("manifest"), "Missing argument 'KIND'")


def test_docker_parses_the_dockerfile_and_it_copies_what_is_there(source: list[str]) -> None:
    said = narrowcast("manifest", "dockerfile", *source)
    commands = dockerfile.parse_string(said.out)
    assert commands[0].cmd.upper() == "FROM"
    root = Path(__file__).parents[2]
    copied = [path for each in commands if each.cmd.upper() == "COPY" for path in each.value[:-1]]
    assert copied
    assert all((root / path).exists() for path in copied)
    assert ("download.pytorch.org" in said.out) == (not source)  # with GPUs, torch comes with CUDA


def deployed(name: str) -> dict[str, Any]:
    return YAML(typ="safe", pure=True).load((DEPLOY / name).read_text())


def test_the_rayjob_runs_a_file_of_its_configmap_on_the_cluster_of_the_generator() -> None:
    job = deployed("rayjob.yaml")
    jsonschema.validate(job, schema("RayJob"))
    spec = job["spec"]["rayClusterSpec"]
    for pod in pods(spec):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    head = spec["headGroupSpec"]["template"]["spec"]
    config, mount = head["volumes"].pop(), head["containers"][0]["volumeMounts"].pop()
    assert config == {"name": "config", "configMap": {"name": job["metadata"]["name"]}}
    mounts = {each["name"]: each["mountPath"] for each in head["containers"][0]["volumeMounts"]}
    assert f"run {mount['mountPath']}/config.yaml --continue --output {mounts['runs']}" in job["spec"]["entrypoint"]
    assert f'RAY_JOB_STOP_WAIT_TIME_S: "{STOP_SECONDS}"' in job["spec"]["runtimeEnvYAML"]
    (cluster,) = written("raycluster")
    assert spec == cluster["spec"]


@pytest.mark.slow
def test_what_is_mounted_from_a_configmap_runs_with_the_modules_and_files_beside_it(tmp_path: Path) -> None:
    mounted = tmp_path / "..2026_01_01"  # a ConfigMap's files are links into a folder of its version
    mounted.mkdir()
    (mounted / "bands.py").write_text(
        "from narrowcast.platform.data.scikit_learn import Digits\nfrom parts import CLIENTS\n"
        "from typing import Literal\n"
        "class Own(Digits):\n    kind: Literal['own'] = 'own'\n    clients: int = CLIENTS\n"
    )
    (mounted / "parts.py").write_text("CLIENTS = 20\n")
    (mounted / "fleet.csv").write_text(
        "client,uplink_mbit_per_second,downlink_mbit_per_second,compute_speed\n"
        + "".join(f"{client},1,1,1\n" for client in range(20))
    )
    (mounted / "config.yaml").write_text(
        f"data: bands:Own\nalgorithm: fedavg\nfleet: {{kind: trace, path: {tmp_path / 'fleet.csv'}}}\n"
    )
    (tmp_path / "..data").symlink_to(mounted.name)
    for each in list(mounted.iterdir()):
        (tmp_path / each.name).symlink_to(Path("..data", each.name))
    program = (
        "import sys; from narrowcast.experiment import load_experiment\n"
        "read = load_experiment(sys.argv[1]); print(read.data.clients, read.fleet.path.stat().st_size > 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "config.yaml")], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "20 True\n"


def test_rays_launcher_takes_its_file() -> None:
    validate_config(prepare_config(deployed("launcher.yaml")))


def test_compose_takes_its_file_which_holds_no_secret() -> None:
    values = deployed("compose.yaml")
    project = PyCompose.from_yaml((DEPLOY / "compose.yaml").read_text())
    assert set(project.service_names()) == {"postgres", "mlflow", "head", "workers"}
    needed = {name for service in values["services"].values() for name in service.get("secrets", ())}
    assert needed == set(values["secrets"])
    published = [port for service in values["services"].values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_the_files_of_deploy_have_the_image_and_the_environment_of_the_generators() -> None:
    images = {deployed("launcher.yaml")["docker"]["image"]}
    services = deployed("compose.yaml")["services"]
    images |= {services[name]["image"] for name in ("mlflow", "head", "workers")}
    assert images == {Deployment().image}
    environment = Deployment().environment()
    for name in ("head", "workers"):
        assert environment.items() <= services[name]["environment"].items()
    for started in ("head_start_ray_commands", "worker_start_ray_commands"):
        words = deployed("launcher.yaml")[started][1].split()
        assert {f"{name}={value}" for name, value in environment.items()} <= set(words)


def test_commands_of_the_files_of_deploy_are_ones_that_a_shell_parses() -> None:
    services = deployed("compose.yaml")["services"].values()
    commands = [each["command"][2] for each in services if each.get("command", [""])[0] == "sh"]
    launcher = deployed("launcher.yaml")
    commands += launcher["head_start_ray_commands"] + launcher["worker_start_ray_commands"]
    assert len(commands) == 7
    for each in commands:
        subprocess.run(["sh", "-n", "-c", each.replace("$$", "$")], check=True)


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
        (["raycluster", "--from", "no-such.yaml"], ["no-such.yaml", "cannot be read"]),
        (["rayjob"], ["'rayjob' is not one of 'raycluster', 'dockerfile', 'description'"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_a_cluster_that_cannot_be_is_refused(words: list[str], phrases: list[str]) -> None:
    assert_refused(narrowcast("manifest", *words), *phrases)
