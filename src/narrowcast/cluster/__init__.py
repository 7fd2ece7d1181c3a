"""Clients on Ray actors, and runs submitted as Ray jobs. Ray is imported only here."""

import os

# Ray reads both when it is imported, so they are set before any module of this part is. All processes of a cluster must
# agree on token authentication; Ray's default depends on whether the home folder holds a token file.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
