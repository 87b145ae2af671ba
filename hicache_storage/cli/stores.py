"""Opening the store that a command names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from ..config import environment_url, masked_url
from ..errors import ConfigError
from ..opening import open_store
from ..store import Store


@contextmanager
def opened(arguments: argparse.Namespace, *needs: str) -> Iterator[Store]:
    """The store, closed afterwards. Raises ConfigError if its backend lacks one of `needs`."""
    with open_store(arguments.url) as store:
        missing = sorted(set(needs) - store.capabilities)
        if missing:
            raise ConfigError(
                f"{arguments.command} needs a backend with {' and '.join(missing)}; "
                f"{store.name!r} has {', '.join(sorted(store.capabilities)) or 'no optional hook'}"
            )
        yield store


def shown_url(url: str | None) -> str:
    """The URL without what may be a secret: user, password and query."""
    return masked_url(url or environment_url() or "")
