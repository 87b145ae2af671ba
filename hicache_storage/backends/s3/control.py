"""Listing, bulk deletes and the bucket itself, through the SDK's client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from ...errors import BackendError, BackendTimeout, BackendUnavailable
from ...failures import FailureLog

T = TypeVar("T")
BULK = 1000
"""Most names in one bulk delete, and in one page of a listing."""


class Listed(NamedTuple):
    """An object as a listing shows it."""

    name: str
    stored_bytes: int
    written_s: float


class Control:
    """Calls of the SDK's client; every error is one of this package. Thread-safe."""

    def __init__(
        self, client: Any, bucket: str, failures: FailureLog, count: Callable[[str], None]
    ) -> None:
        self._client = client
        self._count = count
        self._bucket = bucket
        self._failures = failures
        self._bulk_works = True

    def listing(self, root: str) -> Iterator[Listed]:
        """Every object whose name starts with `root`, page by page."""
        token: dict[str, str] = {}
        while True:
            self._count("LIST")
            found = _translated(
                "scan",
                lambda token=token: self._client.list_objects_v2(  # type: ignore[misc]
                    Bucket=self._bucket, Prefix=root, MaxKeys=BULK, **token
                ),
            )
            for entry in found.get("Contents", ()):
                yield Listed(entry["Key"], entry["Size"], entry["LastModified"].timestamp())
            if not found.get("IsTruncated"):
                return
            token = {"ContinuationToken": found["NextContinuationToken"]}

    def delete(self, names: list[str]) -> list[str]:
        """Deletes objects in bulk; the names that are left, all of them if the store can't.

        Some stores refuse bulk deletes for their checksums or don't know them; that is noted
        once, and then not tried again.
        """
        if not self._bulk_works:
            return names
        self._count("POST")
        objects = [{"Key": name} for name in names]
        try:
            result = _translated(
                "clear",
                lambda: self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}
                ),
            )
        except BackendError as error:
            if error.retryable:
                raise
            self._bulk_works = False
            self._failures.note("bulk delete", f"{error}; objects are deleted one by one instead")
            return names
        return [entry["Key"] for entry in result.get("Errors", ())]

    def create_bucket(self, region: str) -> None:
        """Creates the bucket, unless it is there."""
        place: dict[str, Any] = {}
        if region != "us-east-1":
            place = {"CreateBucketConfiguration": {"LocationConstraint": region}}
        try:
            _translated("open", lambda: self._client.create_bucket(Bucket=self._bucket, **place))
        except BackendError as error:
            if "BucketAlready" not in str(error):
                raise

    def close(self) -> None:
        self._client.close()


def _translated(operation: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except ClientError as error:
        answer = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        raise BackendUnavailable(
            f"{answer.get('Code', '?')}: {answer.get('Message', error)}",
            backend="s3",
            operation=operation,
            retryable=status in (429, 500, 502, 503, 504),
        ) from error
    except HTTPClientError as error:
        kind = BackendTimeout if "Timeout" in type(error).__name__ else BackendUnavailable
        raise kind(str(error), backend="s3", operation=operation) from error
    except BotoCoreError as error:
        raise BackendError(str(error), backend="s3", operation=operation) from error
