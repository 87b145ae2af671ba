"""A real SGLang server with this package's stores, on one GPU or two.

    python -m benchmarks.sglang_server --release 0.5.16            one GPU
    python -m benchmarks.sglang_server --release 0.5.16 --ranks 2  two GPUs, tensor-parallel

`pack` makes what a machine without a network needs for it.
"""
