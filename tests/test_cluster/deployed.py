"""What KubeRay's own kinds may hold, field by field, from the reference of its ray.io/v1 API (release 1.6)."""

from __future__ import annotations

from typing import Any

_STRING, _INTEGER, _BOOLEAN, _NUMBER = ({"type": each} for each in ("string", "integer", "boolean", "number"))
_STRINGS = {"type": "object", "additionalProperties": _STRING}


def _object(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": fields}


_POD = _object(("spec",), metadata={"type": "object"}, spec={"type": "object"})  # the core schema sees to the rest
_GROUP = {"rayStartParams": _STRINGS, "template": _POD, "resources": _STRINGS, "labels": _STRINGS}
_CLUSTER = _object(
    ("headGroupSpec",),
    suspend=_BOOLEAN,
    managedBy=_STRING,
    authOptions=_object(mode={"enum": ["disabled", "token"]}, secretName=_STRING, enableK8sTokenAuth=_BOOLEAN),
    enableInTreeAutoscaling=_BOOLEAN,
    headServiceAnnotations=_STRINGS,
    rayVersion=_STRING,
    headGroupSpec=_object(
        ("template",),
        headService={"type": "object"},
        enableIngress=_BOOLEAN,
        serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        **_GROUP,
    ),
    workerGroupSpecs={
        "type": "array",
        "items": _object(
            ("groupName", "minReplicas", "maxReplicas", "template"),
            groupName=_STRING,
            replicas=_INTEGER,
            minReplicas=_INTEGER,
            maxReplicas=_INTEGER,
            numOfHosts=_INTEGER,
            idleTimeoutSeconds=_INTEGER,
            suspend=_BOOLEAN,
            **_GROUP,
        ),
    },
)
_JOB = _object(
    (),
    activeDeadlineSeconds=_INTEGER,
    backoffLimit=_INTEGER,
    rayClusterSpec=_CLUSTER,
    submitterPodTemplate=_POD,
    metadata=_STRINGS,
    clusterSelector=_STRINGS,
    submitterConfig=_object(backoffLimit=_INTEGER),
    managedBy=_STRING,
    entrypoint=_STRING,
    runtimeEnvYAML=_STRING,
    jobId=_STRING,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    entrypointResources=_STRING,
    entrypointNumCpus=_NUMBER,
    entrypointNumGpus=_NUMBER,
    ttlSecondsAfterFinished=_INTEGER,
    shutdownAfterJobFinishes=_BOOLEAN,
    suspend=_BOOLEAN,
)


def schema(kind: str) -> dict[str, Any]:
    """The JSON schema of a RayCluster or a RayJob, pods left open."""
    return _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "ray.io/v1"},
        kind={"const": kind},
        metadata={"type": "object"},
        spec={"RayCluster": _CLUSTER, "RayJob": _JOB}[kind],
    )


def pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Every pod template of a cluster's spec, as a Pod."""
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": group["template"]["spec"]}
        for group in groups
    ]
