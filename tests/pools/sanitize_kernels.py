"""The kernels over small pages of every shape that they tell apart, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=tests:. compute-sanitizer --tool memcheck \
        --error-exitcode 9 python tests/pools/sanitize_kernels.py

Also with `--tool racecheck`. Without torch's cache each tensor is an allocation of its own, so that
an access beyond its end is seen. Bytes are compared too.
"""

from __future__ import annotations

import itertools
import time

import torch
from pools.cuda_cases import Twins

from hicache_storage.pools import strategy
from hicache_storage.pools.geometry import PageGeometry
from hicache_storage.pools.layouts import LAYOUTS

GEOMETRIES = [
    PageGeometry("mla", 2, 1, 1, 0, 4, torch.uint8),
    PageGeometry("mla", 2, 1, 3, 0, 4, torch.uint8),
    PageGeometry("mla", 2, 1, 8, 0, 1, torch.uint8),
    PageGeometry("mla", 2, 1, 656, 0, 4, torch.uint8),
    PageGeometry("mla", 3, 1, 576, 0, 4, torch.bfloat16),
    PageGeometry("mha", 3, 2, 7, 5, 4, torch.bfloat16),
    PageGeometry("mha", 2, 2, 96, 64, 4, torch.float16),
    PageGeometry("mha", 2, 4, 128, 128, 16, torch.float8_e4m3fn),
]


def main() -> None:
    torch.manual_seed(3)
    strategy._STEP_BYTES = 1  # layers arrive one by one
    began, checked = time.perf_counter(), 0
    for geometry, layout, strided in itertools.product(GEOMETRIES, LAYOUTS, (False, True)):
        twins = Twins(geometry, 9, layout, strided=strided)
        for chosen in ("kernel", "copy_engine"):
            twins.check(chosen, 6)
            checked += 1
    print(f"{checked} copies there and back are exact, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
