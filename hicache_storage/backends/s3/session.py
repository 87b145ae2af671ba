"""The SDK's side of the backend: which credentials, which endpoint, and a client for control.

Everything here belongs to one process and one backend: an own session (the SDK's default one is
not safe to make clients from in several threads) and one client made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import boto3
import botocore
import botocore.config
import botocore.session
from botocore.configprovider import ConstantProvider
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from ...errors import BackendUnavailable, ConfigError
from .config import S3Config
from .credentials import Credentials
from .endpoint import Endpoint, endpoint_of

_AWS_HOSTS = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws", ".amazonaws.eu")
_PROBE = "object"
_NOBODY = {"aws_access_key_id": "nobody", "aws_secret_access_key": "nothing"}
"""Keys for clients that are only asked where they would send a request: the SDK's debug log
shows what it signs."""


@dataclass
class Session:
    """What the SDK has found out."""

    client: Any
    endpoint: Endpoint
    credentials: Credentials
    write_checksums: bool
    ca_file: str | None


def open_session(config: S3Config) -> Session:
    """Reads the AWS settings and finds credentials and endpoint.

    Raises ConfigError if they are unusable, BackendUnavailable if a server that gives
    credentials can't be reached.
    """
    try:
        return _open_session(config)
    except NoCredentialsError as error:
        raise ConfigError(
            "backend 's3' finds no credentials: give access_key and secret_key, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or an instance role; "
            "anonymous=true signs nothing"
        ) from error
    except (BotoCoreError, ClientError) as error:
        if "retriev" in type(error).__name__.lower() or isinstance(error, ClientError):
            raise BackendUnavailable(
                f"can't get credentials: {error}", backend="s3", operation="open"
            ) from error
        raise ConfigError(f"backend 's3': {error}") from error
    except ValueError as error:
        raise ConfigError(f"backend 's3': {error}") from error


def _open_session(config: S3Config) -> Session:
    core = botocore.session.Session(profile=config.profile)
    if config.checksums == "auto":
        _default_checksums(core, "when_required")
    session = boto3.Session(
        botocore_session=core,
        aws_access_key_id=config.access_key,
        aws_secret_access_key=config.secret_key,
        aws_session_token=config.session_token,
        region_name=config.region,
    )
    on_aws = _is_aws(_client(session, config, config.addressing, **_NOBODY).meta.endpoint_url)
    if config.checksums == "auto" and on_aws:
        _default_checksums(core, "when_supported")
    addressing = config.addressing
    if addressing == "auto":
        # The SDK's "auto" takes AWS's global host, which redirects for some buckets.
        own_host = on_aws and "." not in config.bucket and ":" not in config.bucket
        addressing = "virtual" if own_host else "path"
        if on_aws and ":" in config.bucket:
            addressing = "virtual"
    endpoint = _endpoint(_client(session, config, addressing, **_NOBODY), config.bucket)
    client = _client(session, config, addressing)
    source = None if config.anonymous else core.get_credentials()
    if source is None and not config.anonymous:
        raise NoCredentialsError
    checksums = client.meta.config.request_checksum_calculation
    return Session(
        client,
        endpoint,
        Credentials(source),
        checksums == "when_supported",
        config.ca_file or core.get_config_variable("ca_bundle"),
    )


def _endpoint(client: Any, bucket: str) -> Endpoint:
    """Where the SDK would ask for an object, and for which region it would sign."""
    url, _, query = client.generate_presigned_url(
        "get_object", Params={"Bucket": bucket, "Key": _PROBE}
    ).partition("?")
    scope = parse_qs(query).get("X-Amz-Credential", [""])[0].split("/")
    return endpoint_of(url, _PROBE, scope[2] if len(scope) == 5 else client.meta.region_name)


def _client(session: Any, config: S3Config, addressing: str, **keys: str) -> Any:
    checksums = None if config.checksums == "auto" else config.checksums
    return session.client(
        "s3",
        endpoint_url=config.endpoint,
        region_name=config.region or session.region_name or "us-east-1",
        verify=(config.ca_file or None) if config.verify_tls else False,
        **keys,
        config=botocore.config.Config(
            signature_version=botocore.UNSIGNED if config.anonymous else "s3v4",
            connect_timeout=config.connect_timeout_s,
            read_timeout=config.deadline_s,
            retries={"mode": "standard", "total_max_attempts": 3},
            max_pool_connections=4,
            proxies={},
            request_checksum_calculation=checksums,
            response_checksum_validation=checksums,
            s3={"addressing_style": addressing},
        ),
    )


def _default_checksums(core: Any, value: str) -> None:
    """Sets what holds if neither the environment nor a profile says anything."""
    store = core.get_component("config_store")
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        provider = store.get_config_provider(name)
        provider.set_default_provider(ConstantProvider(value))


def _is_aws(url: str) -> bool:
    host = url.partition("://")[2].partition("/")[0].partition(":")[0]
    return host.endswith(_AWS_HOSTS)
