"""Folders of S3 buckets, through boto3. Access uses the machine's identity, which boto3 looks up in its usual order
(environment, profile, container role, instance role). AWS_ENDPOINT_URL_S3 names a compatible service."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from appliance.checkpoints import buckets
from appliance.checkpoints.remote import TRANSIENT, Listing, RemoteFile, RestartFile, SourceError

BLOCK = 1 << 18
ACCESS_HINT = "grant the identity of this machine (role or AWS_… variables) s3:ListBucket and s3:GetObject"


@dataclass(frozen=True)
class S3(buckets.Folder):
    scheme = "s3"

    def listing(self) -> Listing:
        try:
            pages = list(self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.start))
        except Exception as error:
            raise self._translate(error, self.shown) from error
        return self.build_listing(
            (one["Key"], one["Size"], one["ETag"]) for page in pages for one in page.get("Contents", ())
        )

    def stream(self, file: RemoteFile, start: int, stop: int | None = None) -> Iterator[bytes]:
        key = f"{self.start}{file.name}"
        range_argument = (
            {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"} if start or stop is not None else {}
        )
        try:
            # With IfMatch, an object that was replaced meanwhile cannot be mixed with a part of the old one.
            response = self._client.get_object(Bucket=self.bucket, Key=key, IfMatch=file.version, **range_argument)
            yield from response["Body"].iter_chunks(BLOCK)
        except Exception as error:
            raise self._translate(error, f"s3://{self.bucket}/{key}") from error

    def read_object(self, most: int) -> bytes:
        """Return up to `most` bytes of the object whose key is the prefix."""
        try:
            content: bytes = self._client.get_object(Bucket=self.bucket, Key=self.prefix)["Body"].read(most)
        except Exception as error:
            raise self._translate(error, self.shown) from error
        return content

    @cached_property
    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            config=Config(
                connect_timeout=self.stall_s,
                read_timeout=self.stall_s,
                retries={"total_max_attempts": 1},  # the caller counts attempts
                max_pool_connections=16,
            ),
        )

    def _translate(self, error: Exception, what: str) -> Exception:
        """Translate an error of boto3 to ours. Return any other error unchanged."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

        if isinstance(error, NoCredentialsError | NoRegionError):
            return SourceError(f"{what}: {error}; {ACCESS_HINT}")
        if isinstance(error, ClientError):
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = error.response.get("Error", {}).get("Code", "")
            if status in (412, 416):
                return RestartFile(f"{what}: the object changed while it was read")
            hint = f"; {ACCESS_HINT}" if status in (401, 403) else ""
            return SourceError(f"{what}: S3 answered {status} {code}{hint}", transient=status in TRANSIENT)
        if isinstance(error, BotoCoreError | OSError):
            return SourceError(f"{what}: {error}", transient=True)
        return error
