"""The Dockerfile of the image of every node, built from a checkout of narrowcast."""

from __future__ import annotations

from narrowcast.cluster.deployment.description import Deployment

_CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu "
_TEMPLATE = """\
# The image of every node, made by: narrowcast manifest dockerfile
# Build it where pyproject.toml is: docker build -t {image} -f Dockerfile .
# For an image that can be built again as it was, give base_image by digest: python@sha256:...
FROM {base}

# KubeRay's probes call wget, Ray's launcher calls rsync.
RUN apt-get update \\
 && apt-get install --yes --no-install-recommends rsync wget \\
 && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 ray \\
 && install --directory --owner=ray {runs} {data}

WORKDIR /opt/narrowcast
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY locks locks
# Every file is checked against its sha256 in the lock{and_then}.
RUN pip install --no-cache-dir {index}--require-hashes --no-deps -r locks/runtime.txt -r locks/torch-{build}.txt
COPY src src
RUN pip install --no-cache-dir --no-build-isolation {rest} ".[cluster,server,he,ui]"

USER ray
WORKDIR /home/ray
ENV PYTHONUNBUFFERED=1 {environment}
EXPOSE 6379 8265
CMD ["ray", "start", "--head", "--block"]
"""


def dockerfile(deployment: Deployment) -> str:
    """Return the Dockerfile; without GPUs, torch is installed from its index of CPU builds, which are smaller."""
    return _TEMPLATE.format(
        image=deployment.image,
        base=deployment.base_image,
        runs=deployment.runs.path,
        data=deployment.data.path,
        index="" if deployment.gpus else _CPU_INDEX,
        and_then=", but for CUDA's libraries: torch names their versions" if deployment.gpus else "",
        build="cuda" if deployment.gpus else "cpu",
        rest="--constraint constraints.txt" if deployment.gpus else "--no-deps",
        environment=" ".join(f"{name}={value}" for name, value in deployment.environment().items()),
    )
