"""What can go wrong, as classes that say whose fault it is and whether a retry can help."""

from __future__ import annotations


class HiCacheStorageError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(HiCacheStorageError, ValueError):
    """An option, URL or namespace is wrong; nothing was opened."""


class UnknownBackendError(ConfigError):
    """No backend of that name is installed; the message lists those that are."""


class InvalidKey(HiCacheStorageError, ValueError):
    """A page key is outside the allowed form (see `keys.check_page_key`)."""


class PageSizeMismatch(HiCacheStorageError, ValueError):
    """Keys, pages or buffers don't fit together; raised before any byte moves."""


class BackendError(HiCacheStorageError):
    """A backend failed as a whole; a miss or one refused page is never an error.

    `retryable` says whether the same call may succeed if it is made again soon. Whoever
    retries clears it when it gives up, so that no outer layer retries once more.
    """

    default_retryable = False

    def __init__(
        self, message: str, *, backend: str, operation: str, retryable: bool | None = None
    ) -> None:
        super().__init__(message)
        self.backend = backend
        self.operation = operation
        self.retryable = self.default_retryable if retryable is None else retryable

    def __str__(self) -> str:
        return f"backend {self.backend!r}, {self.operation}: {super().__str__()}"


class BackendUnavailable(BackendError):
    """The store can't be reached or refuses all work for now."""

    default_retryable = True


class BackendTimeout(BackendError):
    """The store didn't answer within the operation's deadline."""

    default_retryable = True


class CapacityExceeded(BackendError):
    """The store is full and can't make room."""


class ContractViolation(HiCacheStorageError):
    """A backend or plugin breaks the hook contract; the message names it and the rule."""


class CorruptPage(HiCacheStorageError):
    """Stored bytes are not the page that was written under this key."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"page {key}: {reason}")
        self.key = key
        self.reason = reason


class StoreClosed(HiCacheStorageError):
    """The store was closed before this call."""
