"""Clients on Ray actors, and runs submitted as Ray jobs. Ray is imported only here."""

from narrowcast.platform.config.trust import ScopedSettings

# Ray reads both when it is imported and when it starts processes. All processes of a cluster must agree on token
# authentication; Ray's default depends on whether the home folder holds a token file.
RAY_SETTINGS = ScopedSettings({"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"})
