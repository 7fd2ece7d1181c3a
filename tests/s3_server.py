"""A real S3 server on this machine, Moto's, which keeps everything in memory."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import boto3

_START_SECONDS = 60.0
SECRET = "an-s3-secret-of-nobody"


class S3Server:
    """`moto_server` with a bucket named `runs`."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "eu-central-1",
        }
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with (folder / "s3.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_SECONDS
        while not _listens(port):
            assert self._process.poll() is None, (folder / "s3.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.client = boto3.client(
            "s3",
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=SECRET,
            region_name=self.environment["AWS_DEFAULT_REGION"],
        )
        self.client.create_bucket(
            Bucket="runs", CreateBucketConfiguration={"LocationConstraint": self.environment["AWS_DEFAULT_REGION"]}
        )

    def keys(self, prefix: str) -> list[str]:
        """The names of all objects, but for the folders that some clients make up."""
        listed = self.client.list_objects_v2(Bucket="runs", Prefix=prefix).get("Contents", [])
        return sorted(each["Key"] for each in listed if not each["Key"].endswith("/"))

    def kill(self) -> None:
        """End it, with all that it has."""
        self._process.kill()
        self._process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
