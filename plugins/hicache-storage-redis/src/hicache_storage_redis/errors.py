"""From redis-py's exceptions to this package's, in one place."""

from __future__ import annotations

from hicache_storage import BackendError, BackendTimeout, BackendUnavailable

PASSING = ("LOADING", "BUSY", "READONLY", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "UNBLOCKED")
"""Answers with which a server says that it can't serve for now."""


def client_errors() -> tuple[type[Exception], ...]:
    """What redis-py raises; for `except`, which evaluates it only when something was raised."""
    import redis

    return redis.RedisError, OSError


def translated(error: Exception, operation: str) -> BackendError:
    """The error to raise instead of `error`; the caller raises it `from error`."""
    from redis import exceptions as redis_errors

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
        text = str(error) or type(error).__name__
        return BackendUnavailable(text, backend=name, operation=operation)
    passing = str(error).startswith(PASSING) or isinstance(error, redis_errors.ReadOnlyError)
    return BackendError(str(error), backend=name, operation=operation, retryable=passing)


def is_of_one_page(error: Exception) -> bool:
    """Whether the server is well and only this page fails: there is no room for it, or its name
    holds a value of another type."""
    from redis import exceptions as redis_errors

    of_the_server = (
        redis_errors.ClusterError,
        redis_errors.NoPermissionError,
        redis_errors.ReadOnlyError,
    )
    if isinstance(error, of_the_server) or str(error).startswith(PASSING):
        return False
    return isinstance(error, redis_errors.ResponseError)
