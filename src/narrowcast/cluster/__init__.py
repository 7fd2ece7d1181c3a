"""Clients on Ray actors (Ray is imported only here), the fleets they make up, and runs submitted as Ray jobs."""

import os

# Ray reads both when it is imported, so they are set before any module of this part is. Token authentication must be
# the same for everyone on a cluster, and is not left to whether a token file happens to lie in the home folder.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
