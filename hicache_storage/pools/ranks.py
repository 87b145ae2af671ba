"""Ranks: which share of the pages this process has, and which of them it writes to storage."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """This process's place in tensor, pipeline and context parallelism."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise ConfigError(f"ranks: {axis}_rank {rank} is not below {axis}_size {size}")

    def fields(self) -> dict[str, int]:
        """By name, as `PageGeometry.namespace` takes them."""
        return dataclasses.asdict(self)

    def writes(self, kind: Literal["mha", "mla"]) -> bool:
        """Whether this rank writes the pages of a pool of this kind.

        Every tensor-parallel rank holds the same latent rows, so of an MLA pool only tp_rank 0
        writes. Pipeline stages and context shards differ, and so do the heads of an MHA pool:
        each rank writes its own. It is asked for each pool, so a rank that leaves the MLA
        target to another still writes its own shard of an MHA draft.
        """
        return kind == "mha" or self.tp_rank == 0
