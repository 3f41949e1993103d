"""HTTPS, client certificates, and web pages of other origins."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.cli.options import ListenOptions
from baton.errors import ConfigError
from baton.openai.http.access import REQUEST_ID, Access
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import FakeEngine, served

TLS = Path(__file__).parent / "tls"
CERT, KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")  # self-signed, for localhost, only for tests
PAGE = "https://page.example"


def app_of(directory: Path, **access: Any) -> aiohttp.web.Application:
    return build_app(FakeEngine(directory), Tokenizer.load(directory), access=Access(**access))


def trusting(certificate: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=CERT)
    if certificate is not None:
        context.load_cert_chain(certificate, KEY)
    return context


# Python 3.10 warns of a client's connection whose handshake failed.
failing_handshakes = pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")


@failing_handshakes
async def test_a_server_with_a_certificate_answers_over_https(directory: Path, session: aiohttp.ClientSession) -> None:
    async with served(app_of(directory, ssl_certfile=CERT, ssl_keyfile=KEY)) as url:
        assert url.startswith("https://127.0.0.1:")
        body = {"prompt": "Say:", "max_tokens": 5, "stream": True}
        async with session.post(f"{url}/v1/completions", json=body, ssl=trusting()) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.get(f"{url}/health")
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"{url.replace('https', 'http')}/health")
        # Failed handshakes have done no harm.
        async with session.get(f"{url}/health", ssl=trusting()) as response:
            assert response.status == 200


@failing_handshakes
async def test_clients_need_a_certificate(directory: Path, session: aiohttp.ClientSession) -> None:
    app = app_of(directory, ssl_certfile=CERT, ssl_keyfile=KEY, ssl_ca_certs=CERT, ssl_cert_reqs=2)
    async with served(app) as url:
        async with session.get(f"{url}/health", ssl=trusting(CERT)) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"{url}/health", ssl=trusting())


@pytest.mark.parametrize(
    ("access", "field"),
    [
        ({"ssl_keyfile": KEY}, "ssl_keyfile"),
        ({"ssl_ca_certs": CERT}, "ssl_ca_certs"),
        ({"ssl_certfile": "/nowhere", "ssl_keyfile": KEY}, "ssl_certfile"),
        ({"ssl_certfile": CERT}, "ssl_certfile"),
        ({"ssl_certfile": CERT, "ssl_keyfile": KEY, "ssl_cert_reqs": 2}, "ssl_cert_reqs"),
        ({"ssl_certfile": CERT, "ssl_keyfile": KEY, "ssl_ca_certs": "/nowhere"}, "ssl_ca_certs"),
    ],
)
def test_unusable_certificates_are_refused_at_the_start(access: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        Access(**access).tls()
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        ListenOptions(**access).access()


async def test_pages_of_other_origins(directory: Path, session: aiohttp.ClientSession) -> None:
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    app = app_of(directory, allowed_origins=(PAGE,), api_keys=("secret",))
    async with served(app) as url:
        # A browser sends a preflight request first, without the key.
        async with session.options(f"{url}/v1/chat/completions", headers=asks) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert response.headers["Access-Control-Allow-Headers"] == "authorization"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
        body = {"prompt": "Say:", "max_tokens": 5, "stream": True}
        for key, status in (("secret", 200), ("other", 401)):
            headers = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                assert response.status == status
                assert response.headers["Access-Control-Allow-Origin"] == PAGE
                assert response.headers["Access-Control-Expose-Headers"] == REQUEST_ID
                assert response.headers["Vary"] == "Origin"
        for origin in ("https://page.example.org", "null", f"{PAGE}:8443"):
            async with session.options(f"{url}/v1/models", headers={**asks, "Origin": origin}) as response:
                assert response.status != 204
                assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize(("allowed", "told"), [((), None), (("*",), PAGE)])
async def test_no_page_and_every_page(
    directory: Path, session: aiohttp.ClientSession, allowed: tuple[str, ...], told: str | None
) -> None:
    async with served(app_of(directory, allowed_origins=allowed)) as url:
        async with session.get(f"{url}/v1/models", headers={"Origin": PAGE}) as response:
            assert response.headers.get("Access-Control-Allow-Origin") == told
        async with session.get(f"{url}/v1/models") as response:
            assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize("text", ["*", '"*"', "[1]", "{}"])
def test_origins_are_a_json_list(text: str) -> None:
    assert ListenOptions(allowed_origins='["*"]').access().allowed_origins == ("*",)
    with pytest.raises(ConfigError, match=r"^allowed_origins: must be a JSON list"):
        ListenOptions(allowed_origins=text).access()
