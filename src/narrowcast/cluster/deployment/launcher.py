"""The cluster file of Ray's launcher (`ray up`) for existing machines, reached by SSH."""

from __future__ import annotations

import shlex
from typing import Any

from narrowcast.cluster.deployment.description import Deployment

# `ray up` selects Ray's second autoscaler, which never starts a worker on existing machines (checked with 2.60).
_AUTOSCALER = "RAY_enable_autoscaler_v2=0"
_TOKEN = "~/.ray/auth_token"
_TOKEN_IN_CONTAINER = "/home/ray/.ray/auth_token"


def launcher(deployment: Deployment) -> dict[str, Any]:
    """Return the cluster file; the cluster's token is that of the user who runs `ray up`."""
    machines = deployment.machines
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in deployment.environment().items())
    start = "--disable-usage-stats --object-manager-port=8076"
    return {
        "cluster_name": deployment.name,
        "provider": {"type": "local", "head_ip": machines.head, "worker_ips": list(machines.workers)},
        "auth": {"ssh_user": machines.user, "ssh_private_key": machines.private_key},
        "max_workers": len(machines.workers),
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 60,
        **({"docker": _container(deployment)} if machines.container else {}),
        "file_mounts": {_TOKEN_IN_CONTAINER if machines.container else _TOKEN: _TOKEN},
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [
            "ray stop",
            f"{_AUTOSCALER} {environment} ray start --head --port=6379 --dashboard-host=127.0.0.1 {start} "
            "--autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": ["ray stop", f"{environment} ray start --address=$RAY_HEAD_IP:6379 {start}"],
    }


def _container(deployment: Deployment) -> dict[str, Any]:
    mounts = [f"-v {disk.path}:{disk.path}" for disk in (deployment.runs, deployment.data)]
    return {
        "image": deployment.image,
        "container_name": deployment.name,
        "pull_before_run": False,
        "run_options": ["--ulimit nofile=65536:65536", *mounts, *(["--gpus all"] if deployment.gpus else [])],
    }
