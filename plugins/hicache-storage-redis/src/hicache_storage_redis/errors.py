"""From redis-py's exceptions to this package's, in one place."""

from __future__ import annotations

from redis import exceptions as redis_errors

from hicache_storage import BackendError, BackendTimeout, BackendUnavailable

PASSING = ("LOADING", "BUSY", "READONLY", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "UNBLOCKED")
"""Answers with which a server says that it can't serve for now."""


def translated(error: Exception, operation: str) -> BackendError:
    """The error to raise instead of `error`; the caller raises it `from error`."""
    name = "redis"
    if isinstance(error, redis_errors.TimeoutError):
        return BackendTimeout(str(error), backend=name, operation=operation)
    if isinstance(error, redis_errors.AuthenticationError | redis_errors.NoPermissionError):
        return BackendUnavailable(
            f"{error}; check username, password and the access list",
            backend=name,
            operation=operation,
            retryable=False,
        )
    if isinstance(error, redis_errors.ConnectionError | redis_errors.ClusterError | OSError):
        return BackendUnavailable(
            str(error) or type(error).__name__, backend=name, operation=operation
        )
    passing = str(error).startswith(PASSING)
    return BackendError(str(error), backend=name, operation=operation, retryable=passing)


def refuses_page(error: Exception) -> bool:
    """Whether the server is well but has no room for this page."""
    return isinstance(error, redis_errors.OutOfMemoryError) or str(error).startswith("OOM")
