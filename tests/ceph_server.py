"""A real Ceph on loopback, with one monitor, one store in memory and a gateway that speaks S3.

Needs ceph-mon, ceph-osd and radosgw (in Debian: `apt-get install --no-install-recommends ceph-mon
ceph-osd radosgw`) and root, which they expect to be.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from s3_servers import ACCESS_KEY, SECRET_KEY, free_ports

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool")
START_S = 90.0
_numbers = itertools.count()

# No manager: the pools have a fixed number of placement groups, so nothing asks for one.
CONF = """\
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}/0
mon initial members = a
public network = 127.0.0.0/8
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr1 = false
mon allow pool size one = true
mon warn on pool no redundancy = false
mon max pg per osd = 2000
mon data avail crit = 1
mon data avail warn = 2
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 4294967296
keyring = {folder}/keyring
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
crash dir = {folder}/crash
run dir = {folder}
pid file = {folder}/$name.pid
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw enable usage log = false
"""
KEYS = {
    "mon.": ("mon", "allow *"),
    "client.admin": ("mon", "allow *", "osd", "allow *", "mgr", "allow *"),
    "client.rgw": ("mon", "allow *", "osd", "allow *", "mgr", "allow *"),
    "osd.0": ("mon", "allow profile osd", "osd", "allow *", "mgr", "allow profile osd"),
}


class Ceph:
    """The processes of one cluster; `url` is the endpoint of its gateway."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        port, self._mon_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self._conf = folder / "ceph.conf"
        self._fsid = str(uuid.uuid4())
        self._conf.write_text(
            CONF.format(folder=folder, fsid=self._fsid, port=port, mon_port=self._mon_port)
        )
        for name in ("mon", "osd", "rgw", "crash"):
            (folder / name).mkdir()
        atexit.register(self.stop)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def store_url(self, **options: object) -> str:
        """The URL of a store under a prefix of its own."""
        query = "".join(f"&{name}={value}" for name, value in options.items())
        return (
            f"s3://pages/kv-{next(_numbers)}?endpoint={self.url}&create_bucket=true"
            f"&access_key={ACCESS_KEY}&secret_key={SECRET_KEY}{query}"
        )

    def stop(self) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                process.terminate()
        for process in reversed(self._processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        self._processes.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        for name, caps in KEYS.items():
            allowed = [word for kind, cap in _pairs(caps) for word in ("--cap", kind, cap)]
            new = [] if (self._folder / "keyring").exists() else ["--create-keyring"]
            self._call("ceph-authtool", *new, "keyring", "--gen-key", "-n", name, *allowed)
        address = f"[v2:127.0.0.1:{self._mon_port}]"
        self._call("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", address, "monmap")
        mkfs = ("--mkfs", "-i", "a", "--monmap", "monmap", "--keyring", "keyring")
        self._call("ceph-mon", *mkfs)
        self._daemon("ceph-mon", "-i", "a")
        self._call("ceph", "osd", "create")
        self._call("ceph-osd", "-i", "0", "--mkfs", "--no-mon-config")
        self._call("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost")
        self._daemon("ceph-osd", "-i", "0")
        self._daemon("radosgw", "-n", "client.rgw")
        self._wait()
        self._call(
            "radosgw-admin", "user", "create", "--uid=test", "--display-name=test",
            f"--access-key={ACCESS_KEY}", f"--secret={SECRET_KEY}",
        )  # fmt: skip

    def _call(self, program: str, *arguments: str) -> None:
        conf = [] if program in ("ceph-authtool", "monmaptool") else ["-c", str(self._conf)]
        done = subprocess.run(
            [program, *conf, *arguments],
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{program} {arguments}: {done.stdout[-1000:]}{done.stderr[-1000:]}")

    def _daemon(self, program: str, *arguments: str) -> None:
        with (self._folder / f"{program}.out").open("wb") as out:
            command = [program, "-c", str(self._conf), "-f", *arguments]
            self._processes.append(
                subprocess.Popen(command, cwd=self._folder, stdout=out, stderr=out)
            )

    def _wait(self) -> None:
        """Until the gateway answers."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            dead = [process.args for process in self._processes if process.poll() is not None]
            if dead:
                logs = [p.read_text(errors="replace")[-1000:] for p in self._folder.glob("*.out")]
                raise RuntimeError(f"{dead} ended: {logs}")
            try:
                with urllib.request.urlopen(self.url, timeout=5):
                    return
            except urllib.error.HTTPError as error:
                error.close()
                if error.code < 500:
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"the gateway did not answer within {START_S:g} s")


def _pairs(words: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(zip(words[::2], words[1::2], strict=True))


@functools.cache
def start_ceph() -> Ceph:
    """The cluster of this process, started at the first call. Raises RuntimeError without Ceph."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise RuntimeError(
            f"no {', '.join(missing)} here: apt-get install --no-install-recommends ceph-mon "
            "ceph-osd radosgw"
        )
    return Ceph(Path(tempfile.mkdtemp(prefix="ceph-")))
