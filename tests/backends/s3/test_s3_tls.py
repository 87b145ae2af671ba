"""TLS: verified by default, with a CA of one's own if asked, and off only if asked."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from backends.s3.misbehaving_server import (
    MisbehavingServer,
    Sometimes,
    error,
    half_body,
    hang_up,
    in_pieces,
    refuse_early,
)
from backends.s3.rig import Opened, url_of

from hicache_storage import ConfigError, open_store

cryptography = pytest.importorskip("cryptography", reason="comes with moto: extra 'servers'")
from cryptography import x509  # noqa: E402
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402

Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, its key in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "ca.pem"
    pem = serialization.Encoding.PEM
    path.write_bytes(
        certificate.public_bytes(pem)
        + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path


@pytest.fixture(params=["TLSv1_2", "TLSv1_3"])
def tls_server(request: pytest.FixtureRequest, certificate: Path) -> Iterator[MisbehavingServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.minimum_version = context.maximum_version = ssl.TLSVersion[request.param]
    with MisbehavingServer(context=context) as server:
        yield server


def test_pages_go_both_ways(tls_server: MisbehavingServer, opened: Open, certificate: Path) -> None:
    store = opened(tls_server, ca_file=certificate)
    store.fill(40)
    assert store.get(list(range(40))) == [True] * 40
    assert store.exists(list(range(41))) == 40
    assert tls_server.connects <= 32 + 1
    store.store.clear()
    assert not tls_server.objects


@pytest.mark.parametrize(
    "misbehave",
    [half_body(by_reset=False), half_body(by_reset=True), hang_up, error(500), in_pieces()],
)
def test_what_goes_wrong_inside_tls_costs_no_page(
    tls_server: MisbehavingServer, opened: Open, certificate: Path, misbehave: object
) -> None:
    store = opened(tls_server, ca_file=certificate)
    store.fill(10)
    tls_server.behave = Sometimes(misbehave, lambda s: s.verb == "GET", times=4)  # type: ignore[arg-type]
    assert store.get(list(range(10))) == [True] * 10
    tls_server.behave = Sometimes(refuse_early, lambda seen: seen.verb == "PUT", times=2)
    store.fill(10)


def test_a_large_page_goes_through_in_many_records(
    tls_server: MisbehavingServer, certificate: Path
) -> None:
    from backends.s3.rig import KEYS, NAMESPACE

    from hicache_storage import Namespace

    fields = {name: getattr(NAMESPACE, name) for name in Namespace.__dataclass_fields__}
    size = 5_000_001
    namespace = Namespace(**fields | {"page_bytes": size})
    source = bytes(range(256)) * (size // 256 + 1)
    with open_store(url_of(tls_server, ca_file=certificate)) as store:
        cuts = [0, 1, 70_000, 70_001, 3_000_000, size]
        view = memoryview(source)[:size]
        spans = tuple(view[a:b] for a, b in itertools.pairwise(cuts))
        assert store.batch_set(namespace, KEYS[:3], [spans] * 3) == [True] * 3
        buffers = [bytearray(size) for _ in range(3)]
        assert store.batch_get(namespace, KEYS[:3], buffers) == [True] * 3
        assert all(buffer == view for buffer in buffers)


def test_a_certificate_nobody_vouches_for_is_refused(tls_server: MisbehavingServer) -> None:
    with pytest.raises(ConfigError, match=r"TLS failed.*ca_file"):
        open_store(url_of(tls_server))
    assert tls_server.seen == []


def test_a_certificate_of_another_host_is_refused(
    tls_server: MisbehavingServer, certificate: Path
) -> None:
    url = url_of(tls_server, ca_file=certificate).replace("127.0.0.1", "localhost")
    with pytest.raises(ConfigError, match="TLS failed"):
        open_store(url)


def test_verification_is_off_only_if_asked(tls_server: MisbehavingServer, opened: Open) -> None:
    store = opened(tls_server, verify_tls=False)
    store.fill(2)
    assert store.get([0, 1]) == [True, True]


def test_a_ca_file_that_is_none_says_so(tls_server: MisbehavingServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        open_store(url_of(tls_server, ca_file=tmp_path / "nothing.pem"))
    (tmp_path / "empty.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="holds no CAs"):
        open_store(url_of(tls_server, ca_file=tmp_path / "empty.pem"))


def test_plain_http_to_a_tls_port_is_told_apart(tls_server: MisbehavingServer) -> None:
    url = url_of(tls_server, attempts=1).replace("https://", "http://")
    with pytest.raises(Exception, match=r"closed the connection|not HTTP|reset"):
        open_store(url)


def test_tls_to_a_plain_port_is_told_apart(server: MisbehavingServer) -> None:
    url = url_of(server).replace("http://", "https://")
    with pytest.raises(Exception, match=r"can't connect|TLS failed"):
        open_store(url)
