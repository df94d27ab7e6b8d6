"""Clients of buckets with the identity of this machine.

obstore reads the variables of each store, and asks the metadata service of the machine or the container. Two identities
are read here: access keys of AWS profiles; and through boto3 or google-auth, where they are installed, profiles with a
role or single sign-on, and Google's workload identity federation.
"""

import configparser
import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
from obstore.store import AzureStore, GCSStore, S3Store

from appliance.checkpoints.remote import SourceError
from appliance.config.environment import without_empty_variables
from appliance.config.variables import value

ACCESS_HINTS = {
    "s3": "grant the identity of this machine (role, profile or AWS_… variables) s3:ListBucket and s3:GetObject",
    "gs": "grant the identity of this machine (its service account) storage.objects.list and storage.objects.get",
    "az": "grant the identity of this machine (managed identity or AZURE_… variables) Storage Blob Data Reader",
}
RETRIES: dict[str, Any] = {"max_retries": 0}  # the caller counts attempts
OWN_GOOGLE = ("", "service_account", "authorized_user")
"""Types of credential files that obstore reads."""


def client_options(stall_s: float) -> dict[str, Any]:
    stall = timedelta(seconds=stall_s)
    # `timeout` would limit the whole file.
    return {"connect_timeout": stall, "read_timeout": stall, "timeout": timedelta(days=7), "allow_http": True}


def open_s3(bucket: str, environ: Mapping[str, str], stall_s: float, region: str) -> Any:
    """Return a client of S3. region: of the bucket, or "" for the machine's region. Raise SourceError."""
    _aws_endpoint(environ)  # obstore reads it, but ends the process if it is not a URL
    settings, provider = _aws_profile(environ)
    if region:
        settings["region"] = region
    with without_empty_variables("AWS_"):
        return S3Store(
            bucket,
            config=settings,  # type: ignore[arg-type]
            client_options=client_options(stall_s),  # type: ignore[arg-type]
            retry_config=RETRIES,  # type: ignore[arg-type]
            credential_provider=provider,
        )


def open_gs(bucket: str, environ: Mapping[str, str], stall_s: float, account: str) -> Any:
    """Return a client of Google Cloud Storage. Raise SourceError."""
    emulator = _checked_url("STORAGE_EMULATOR_HOST", value(environ, "STORAGE_EMULATOR_HOST"))
    settings: dict[str, Any] = {"base_url": emulator, "skip_signature": True} if emulator else {}
    provider = None if emulator else _google_provider(environ)
    # obstore reads a file that SERVICE_ACCOUNT names. In Kubernetes that is often the name of an account.
    with without_empty_variables("GOOGLE_", "SERVICE_ACCOUNT"):
        return GCSStore(
            bucket,
            config=settings,  # type: ignore[arg-type]
            client_options=client_options(stall_s),  # type: ignore[arg-type]
            retry_config=RETRIES,  # type: ignore[arg-type]
            credential_provider=provider,
        )


def open_az(bucket: str, environ: Mapping[str, str], stall_s: float, account: str) -> Any:
    """Return a client of a container of Azure Blob Storage."""
    settings: dict[str, Any] = {"account_name": account} if account else {}
    with without_empty_variables("AZURE_"):
        return AzureStore(
            bucket,
            config=settings,  # type: ignore[arg-type]
            client_options=client_options(stall_s),  # type: ignore[arg-type]
            retry_config=RETRIES,  # type: ignore[arg-type]
        )


OPEN: dict[str, Callable[[str, Mapping[str, str], float, str], Any]] = {"s3": open_s3, "gs": open_gs, "az": open_az}


def _aws_endpoint(environ: Mapping[str, str]) -> str:
    """Return the URL of a service that is compatible with S3, or "". Raise SourceError."""
    own = _checked_url("AWS_ENDPOINT_URL_S3", value(environ, "AWS_ENDPOINT_URL_S3"))
    return own or _checked_url("AWS_ENDPOINT_URL", value(environ, "AWS_ENDPOINT_URL"))


def _checked_url(name: str, url: str) -> str:
    if url and not url.startswith(("http://", "https://")):
        raise SourceError(f"{name}={url}: must be a URL, such as https://{url}")
    return url.rstrip("/")


def bucket_region(bucket: str, environ: Mapping[str, str], stall_s: float) -> str:
    """Return the region in which S3 has the bucket, which a request without credentials returns. Raise SourceError."""
    endpoint = _aws_endpoint(environ) or "https://s3.amazonaws.com"
    url = f"{endpoint}/{bucket}"  # a host name BUCKET.s3.amazonaws.com has no certificate for buckets with a dot
    try:
        region: str = httpx.head(url, timeout=stall_s).headers.get("x-amz-bucket-region", "")
    except httpx.HTTPError as error:
        raise SourceError(f"s3://{bucket}: {error or type(error).__name__}", transient=True) from error
    if not region:
        raise SourceError(f"s3://{bucket}: is in another region; set AWS_REGION to it")
    return region


def _aws_profile(environ: Mapping[str, str]) -> tuple[dict[str, Any], Any]:
    """Return the settings of the AWS profile and, if it has no access key, a provider of its credentials.

    Variables with an access key, and the roles of containers, have precedence, as in the AWS SDKs."""
    if (
        value(environ, "AWS_ACCESS_KEY_ID")
        or value(environ, "AWS_WEB_IDENTITY_TOKEN_FILE")
        or value(environ, "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
        or value(environ, "AWS_CONTAINER_CREDENTIALS_FULL_URI")
    ):
        return {}, None
    folder, named = Path(value(environ, "HOME") or "/") / ".aws", value(environ, "AWS_PROFILE")
    profile = named or "default"
    keys = _section(Path(value(environ, "AWS_SHARED_CREDENTIALS_FILE") or folder / "credentials"), profile)
    section = profile if profile == "default" else f"profile {profile}"
    settings = _section(Path(value(environ, "AWS_CONFIG_FILE") or folder / "config"), section)
    given = value(environ, "AWS_REGION") or value(environ, "AWS_DEFAULT_REGION")
    found: dict[str, Any] = {"region": settings["region"]} if "region" in settings and not given else {}
    if (endpoint := settings.get("endpoint_url")) and not _aws_endpoint(environ):
        found["endpoint"] = _checked_url(f"endpoint_url of the AWS profile {profile}", endpoint)
    merged = settings | keys
    if "aws_access_key_id" in merged and "role_arn" not in merged:
        if "aws_secret_access_key" not in merged:
            raise SourceError(f"the AWS profile {profile} has aws_access_key_id, but no aws_secret_access_key")
        found |= {"access_key_id": merged["aws_access_key_id"], "secret_access_key": merged["aws_secret_access_key"]}
        if "aws_session_token" in merged:
            found["token"] = merged["aws_session_token"]
        return found, None
    if named and not merged:
        raise SourceError(f"AWS_PROFILE={named}: no file of AWS profiles has this profile")
    if not named and not merged.keys() & {"role_arn", "sso_session", "sso_start_url", "credential_process"}:
        return found, None  # the role of the machine
    try:
        from boto3 import Session
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        what = f"the AWS profile {profile} has no access key"
        raise SourceError(f"{what}; roles and single sign-on need boto3: pip install 'slipway-serve[s3]'") from error
    try:
        return found, Boto3CredentialProvider(Session(profile_name=profile))
    except (BotoCoreError, ValueError) as error:
        raise SourceError(f"the AWS profile {profile}: {error}") from error


def _section(path: Path, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(path)
        return dict(parser[name]) if parser.has_section(name) else {}
    except configparser.Error as error:
        raise SourceError(f"{path}: {str(error).partition(chr(10))[0]}") from error


def _google_provider(environ: Mapping[str, str]) -> Any:
    """Return a provider of credentials if obstore cannot read their file, or None."""
    path = value(environ, "GOOGLE_APPLICATION_CREDENTIALS")
    if not path:
        return None
    try:
        kind = json.loads(Path(path).read_text()).get("type", "")
    except (OSError, ValueError, AttributeError) as error:
        raise SourceError(f"GOOGLE_APPLICATION_CREDENTIALS: {path}: {error}") from error
    if kind in OWN_GOOGLE:
        return None
    try:
        from google.auth.exceptions import GoogleAuthError
        from obstore.auth.google import GoogleCredentialProvider
    except ImportError as error:
        what = f"{path}: credentials of the type {kind} need google-auth"
        raise SourceError(f"{what}: pip install 'slipway-serve[gs]'") from error
    try:
        return GoogleCredentialProvider()
    except (GoogleAuthError, ValueError) as error:
        raise SourceError(f"{path}: {error}") from error
