"""Which values of a subject's options are secret."""

from __future__ import annotations

import dataclasses

from ..config import build_config
from ..discovery import load_backend
from ..middleware.stack import split_middleware
from ..opening import _backend_and_options
from .subject import Subject

SHORTEST = 6


def secret_values(subject: Subject) -> dict[str, str]:
    """The subject's secret options that have a value, text of 6 characters or more, by name; none
    for an opener of its own."""
    if subject.opener != Subject.opener:
        return {}
    name, given = _backend_and_options(subject.where)
    cls = getattr(load_backend(name), "Config", None)
    if cls is None:
        return {}
    own, _ = split_middleware(given)
    config = build_config(cls, name, own)
    return {
        field.name: value
        for field in dataclasses.fields(cls)
        if not field.repr
        and isinstance(value := getattr(config, field.name), str)
        # A shorter one could stand in any text by chance.
        and len(value) >= SHORTEST
    }
