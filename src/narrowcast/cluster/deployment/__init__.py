"""From one description of a cluster to its KubeRay manifest and its Dockerfile."""
