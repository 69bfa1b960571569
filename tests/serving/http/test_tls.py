"""A server with TLS, and certificates that it cannot use."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError
from sglcore.serving.http.server import tls_of
from tests.serving.clients.test_slow_clients import GET, Served, run, served


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A certificate of this machine, its key, and the same key encrypted with the password
    `secret`."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key, locked = (str(folder / name) for name in ("cert.pem", "key.pem", "locked.pem"))
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert]
    subprocess.run(made, check=True, capture_output=True)
    encrypted = ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(encrypted, check=True, capture_output=True)
    return cert, key, locked


def test_a_server_with_a_certificate_is_asked_by_tls_alone(files: tuple[str, str, str]) -> None:
    cert, key, _ = files

    async def work() -> None:
        async with served(ssl_certfile=cert, ssl_keyfile=key) as server:
            assert server.url.startswith("https://")
            reader, writer = await server.connect(ssl.create_default_context(cafile=cert))
            writer.write(GET)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.close()
            reader, writer = await server.connect()
            writer.write(GET)
            assert not (await reader.read()).startswith(b"HTTP")

    run(work())


def test_a_client_has_to_bring_a_certificate_where_some_are_asked_for(files: tuple[str, str, str]) -> None:
    cert, key, _ = files

    async def answer(server: Served, tls: ssl.SSLContext) -> bytes:
        try:
            reader, writer = await server.connect(tls)
            writer.write(GET.replace(b"host:", b"connection: close\r\nhost:"))
            return await reader.read()
        except (ssl.SSLError, ConnectionError):
            return b""

    async def work() -> None:
        async with served(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert) as server:
            tls = ssl.create_default_context(cafile=cert)
            assert not await answer(server, tls)
            tls.load_cert_chain(cert, key)
            assert (await answer(server, tls)).startswith(b"HTTP/1.1 200")

    run(work())


def test_an_encrypted_key_needs_its_password_and_files_that_do_not_fit_are_one_line(
    files: tuple[str, str, str], tmp_path: Path
) -> None:
    cert, key, locked = files
    tls = tls_of(ServerConfig(ssl_certfile=cert, ssl_keyfile=locked, ssl_keyfile_password="secret", ssl_ca_certs=cert))
    assert tls is not None and tls.verify_mode is ssl.CERT_REQUIRED
    assert tls_of(ServerConfig()) is None
    wrong: list[dict[str, Any]] = [
        {"ssl_certfile": cert, "ssl_keyfile": locked},
        {"ssl_certfile": key, "ssl_keyfile": key},
    ]
    wrong += [{"ssl_certfile": str(tmp_path / "none")}, {"ssl_certfile": cert}]
    for each in wrong:
        with pytest.raises(ConfigError, match="ssl_certfile"):
            tls_of(ServerConfig(**each))
    with pytest.raises(ConfigError, match="without a certificate"):
        ServerConfig(ssl_keyfile=key)
