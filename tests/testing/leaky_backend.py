"""A backend whose repr shows a secret option."""

from dataclasses import dataclass

from hicache_storage import hookimpl
from hicache_storage.backends.memory import MemoryBackend, MemoryConfig
from hicache_storage.config import option


@dataclass(frozen=True)
class LeakyConfig:
    password: str = option("", doc="Password of the store.", secret=True)


class LeakyBackend(MemoryBackend):
    Config = LeakyConfig

    def __init__(self, config):
        super().__init__(MemoryConfig())
        self.password = Password(config.password)

    def __repr__(self):
        return f"LeakyBackend({self.password.text})"

    @hookimpl
    def flush(self):
        pass


class Password:
    def __init__(self, text):
        self.text = text
