"""Runs on the cluster ahead of a run, as a file of its own and with the standard library alone: says what is there."""

import json
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version


def versions(names: list[str]) -> dict[str, str | None]:
    """The version of each distribution, None where it is not there."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    try:  # our own may come as source, without metadata
        found["narrowcast"] = import_module("narrowcast").__version__
    except ImportError:
        found["narrowcast"] = None
    return found


if __name__ == "__main__":
    print(json.dumps({"python": ".".join(map(str, sys.version_info[:3])), "packages": versions(sys.argv[1:])}))
