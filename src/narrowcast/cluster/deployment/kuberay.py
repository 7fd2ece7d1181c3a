"""Manifests for the KubeRay operator, version 1.5.1 or later, the first that distributes Ray's tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from narrowcast.cluster.deployment.description import Deployment, NodeDescription, Workers
from narrowcast.cluster.ray_jobs import STOP_SECONDS
from narrowcast.platform.config import write_yaml
from narrowcast.platform.errors import UserError

CONFIG_FOLDER = "/etc/narrowcast"
_LARGEST = 1_000_000
"""Bytes of a ConfigMap, a little below the limit of Kubernetes, 1 MiB."""


def ray_cluster(deployment: Deployment) -> list[dict[str, Any]]:
    """Return the manifest of a permanent cluster, for `narrowcast submit`."""
    return [
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": _metadata(deployment, deployment.name),
            "spec": _cluster_spec(deployment),
        }
    ]


def ray_job(
    deployment: Deployment, name: str, config: Mapping[str, Any], files: Mapping[str, Path]
) -> list[dict[str, Any]]:
    """Return the manifests of one run on a cluster of its own; it is restarted at most twice if it fails.

    `files` go with the configuration, by their paths beside it. Raise `UserError` if a ConfigMap cannot hold them.
    """
    text = StringIO()
    write_yaml(config, text)
    content = {"config.yaml": text.getvalue()}
    # A key of a ConfigMap has no slash, so that the volume says which path each is at.
    items = [{"key": "config.yaml", "path": "config.yaml"}]
    for place, (path, file) in enumerate(files.items()):
        key = f"{place}-{re.sub(r'[^-._a-zA-Z0-9]', '-', file.name)}"
        content[key] = _text(file)
        items.append({"key": key, "path": path})
    if (size := sum(len(each.encode()) for each in content.values())) > _LARGEST:
        raise UserError(
            f"the configuration and its {len(files)} files have {size:,} bytes, and a ConfigMap holds {_LARGEST:,}; "
            "put the modules into the image, or use a permanent cluster and narrowcast submit"
        )
    spec = _cluster_spec(deployment)
    head = spec["headGroupSpec"]["template"]["spec"]
    head["volumes"].append({"name": "config", "configMap": {"name": name, **({"items": items} if files else {})}})
    head["containers"][0]["volumeMounts"].append({"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True})
    run = f"python -m narrowcast run {CONFIG_FOLDER}/config.yaml --continue --output {deployment.runs.path}"
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _metadata(deployment, name),
            "data": content,
        },
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": _metadata(deployment, name),
            "spec": {
                "entrypoint": run,
                "runtimeEnvYAML": f'env_vars:\n  RAY_JOB_STOP_WAIT_TIME_S: "{STOP_SECONDS}"\n',
                "submissionMode": "K8sJobMode",
                "backoffLimit": 2,
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": 600,
                "rayClusterSpec": spec,
            },
        },
    ]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: a manifest holds text in UTF-8 only ({error}); put it into the image") from error


def _metadata(deployment: Deployment, name: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "narrowcast", "app.kubernetes.io/instance": deployment.name}
    return {"name": name, "namespace": deployment.namespace, "labels": labels}


def _cluster_spec(deployment: Deployment) -> dict[str, Any]:
    head = deployment.head
    return {
        "rayVersion": deployment.ray_version,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": str(head.cpus), **_resources(head)},
            "template": _pod(deployment, head, "ray-head", {"gcs": 6379, "dashboard": 8265, "metrics": 8080}),
        },
        "workerGroupSpecs": [_group(deployment, each) for each in deployment.workers],
    }


def _group(deployment: Deployment, workers: Workers) -> dict[str, Any]:
    return {
        "groupName": workers.name,
        "replicas": workers.count,
        "minReplicas": workers.count,
        "maxReplicas": workers.count,
        "rayStartParams": {"num-cpus": str(workers.cpus), **_resources(workers)},
        "template": _pod(deployment, workers, "ray-worker", {"metrics": 8080}),
    }


def _resources(node: NodeDescription) -> dict[str, str]:
    """Return custom resources quoted twice, since `ray start` reads them from a shell."""
    return {"resources": json.dumps(json.dumps(node.resources))} if node.resources else {}


def _pod(deployment: Deployment, node: NodeDescription, container: str, ports: Mapping[str, int]) -> dict[str, Any]:
    environment: list[dict[str, Any]] = [
        # KubeRay sets the mode and the token itself.
        {"name": name, "value": value}
        for name, value in deployment.environment().items()
        if name != "RAY_AUTH_MODE"
    ]
    if (uri := deployment.tracking_uri) is not None:
        reference = {"secretKeyRef": {"name": uri.secret, "key": uri.key}}
        environment.append({"name": "MLFLOW_TRACKING_URI", "valueFrom": reference})
    amounts = {"cpu": str(max(node.cpus, 1)), "memory": f"{node.memory_gib}Gi"}
    if node.gpus:
        amounts["nvidia.com/gpu"] = str(node.gpus)
    disks = {"runs": deployment.runs, "data": deployment.data}
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": STOP_SECONDS + 30,
        "automountServiceAccountToken": deployment.service_account is not None,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [
            {
                "name": container,
                "image": deployment.image,
                "env": environment,
                "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
                "resources": {"requests": amounts, "limits": amounts},
                "securityContext": {"allowPrivilegeEscalation": False},
                "volumeMounts": [{"name": name, "mountPath": disk.path} for name, disk in disks.items()],
            }
        ],
        "volumes": [
            {"name": name, "persistentVolumeClaim": {"claimName": disk.volume}} for name, disk in disks.items()
        ],
    }
    if deployment.service_account is not None:
        spec["serviceAccountName"] = deployment.service_account
    return {"spec": spec}
