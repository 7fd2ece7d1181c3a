"""From one description of a cluster to the files that Kubernetes, Ray's launcher, Docker and Compose read."""
