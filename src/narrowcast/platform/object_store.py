"""File systems by URL: S3 through pyarrow, which is a dependency anyway, and all others through fsspec."""

from __future__ import annotations

import os
from typing import Any

import fsspec
from fsspec.implementations.arrow import ArrowFSWrapper

_S3 = "s3://"
_ATTEMPTS = 3
_CONNECT_SECONDS, _REQUEST_SECONDS = 5.0, 60.0


def file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a folder or URL, and the path on it.

    Raise `ValueError` for an unknown protocol and `ImportError` if its package is not installed. Credentials, region
    and endpoint of S3 come from the environment or from ~/.aws: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL. s3fs is not used: it needs an older botocore than
    MLflow's S3 store.
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
