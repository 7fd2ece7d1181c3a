"""File systems by their URL: S3 by pyarrow, which is there anyway, and all others by what fsspec knows."""

from __future__ import annotations

import os
from typing import Any

import fsspec
from fsspec.implementations.arrow import ArrowFSWrapper

_S3 = "s3://"
_ATTEMPTS = 3
_CONNECT_SECONDS, _REQUEST_SECONDS = 5.0, 60.0


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a folder or URL, and the path there; `ValueError`, `ImportError` where fsspec knows none.

    Credentials, region and, where it is not Amazon's, the endpoint of S3 are those of the environment or of ~/.aws:
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL. (s3fs needs
    an older botocore than MLflow's own S3 store runs with, so it cannot be asked for beside it.)
    """
    if not url.startswith(_S3):
        files, path = fsspec.core.url_to_fs(url)
        return files, path
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    files = S3FileSystem(
        endpoint_override=os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_REQUEST_SECONDS,
        allow_delayed_open=True,  # a small file is one put
    )
    return ArrowFSWrapper(files), url.removeprefix(_S3)
