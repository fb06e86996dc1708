"""Webhooks: the requests that a receiver gets, those that are repeated, and those that are refused."""

from __future__ import annotations

import base64
import logging
import socket
import ssl
import subprocess
import threading

import pytest
from standardwebhooks import Webhook as Verifier

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.errors import InvalidArgument, WebhookFailed
from airflow_pgchange.events import Event, EventHandlers, publish, subscribe, topical
from airflow_pgchange.events.handler import Delivery
from airflow_pgchange.events.webhooks import GZIP_FROM, webhook
from tests.handling import LATER, hurry
from tests.web import SECONDS, receiving

LOOPBACK = ["127.0.0.0/8", "::1"]
SECRET = "whsec_" + base64.b64encode(b"a secret of 24 characters").decode()


@pytest.fixture
def connection(connect):
    connection = connect()
    subscribe(connection, "g", topical("t"))
    return connection


def delivery(*payloads, attempt=1):
    events = tuple(
        Event("t", payload, id=f"pm{n:022x}", subscriptions=("su",)) for n, payload in enumerate(payloads)
    )
    return Delivery("g", "hook", events, attempt)


def hook(port, host="127.0.0.1", path="/hook", scheme="http", **options):
    return webhook("hook", f"{scheme}://{host}:{port}{path}", **{"allow": LOOPBACK, **options})


def test_each_event_is_posted_once_and_the_group_moves_on(db, connection):
    ids = publish(connection, [Event("t", {"n": n}, {"m": n}) for n in range(20)], returning=True)
    with receiving() as (port, requests):
        done = EventHandlers("g", [hook(port)], db).run("empty")
    assert (done.events, done.failed) == (20, 0)
    got = sorted((event for request in requests for event in request.events), key=lambda event: event["id"])
    assert got == [
        {"id": each, "topic": "t", "payload": {"n": n}, "metadata": {"m": n}} for n, each in enumerate(ids)
    ]
    assert len({request.headers["idempotency-key"] for request in requests}) == 20


def test_a_key_puts_events_of_one_value_into_one_request_in_order(db, connection):
    publish(connection, [Event("t", {"n": n, "k": n % 2}) for n in range(10)])
    with receiving() as (port, requests):
        EventHandlers("g", [hook(port, key=lambda event: event.payload["k"])], db).run("empty")
    numbers = sorted([event["payload"]["n"] for event in request.events] for request in requests)
    assert numbers == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


def test_a_failed_request_is_repeated_under_its_key_and_then_a_dead_letter(db, connection):
    publish(connection, [Event("t", {"n": 1}), Event("t", {"n": 2})])
    with receiving(lambda request: 500 if request.events[0]["payload"]["n"] == 1 else 200) as (
        port,
        requests,
    ):
        handlers = EventHandlers("g", [hook(port, retries=(LATER, LATER))], db)
        done = [handlers.run("empty")]
        while hurry(connection):
            done.append(handlers.run("empty"))
    assert [(each.failed, each.retried, each.given_up) for each in done] == [(1, 1, 0), (1, 1, 0), (1, 0, 1)]
    keys = [r.headers["idempotency-key"] for r in requests if r.events[0]["payload"]["n"] == 1]
    assert (len(keys), len(set(keys))) == (3, 1)
    [letter] = dead_letters.letters(connection)
    assert "webhook hook to 127.0.0.1: it answers 500" in letter.error


def test_422_drops_what_the_receiver_never_wants(db, connection, caplog):
    [dropped] = publish(connection, [Event("t", {"n": 1})], returning=True)
    with receiving(lambda request: 422) as (port, requests):
        done = EventHandlers("g", [hook(port)], db).run("empty")
    assert (len(requests), done.failed, dead_letters.letters(connection)) == (1, 0, [])
    assert f"dropped 1 events from {dropped}" in caplog.text


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_not_followed(status):
    refused = pytest.raises(WebhookFailed, match=f"redirect \\({status}\\), which is not followed")
    with receiving(lambda request: status) as (port, requests), refused:
        await hook(port).run(delivery(1))
    assert [request.path for request in requests] == ["/hook"]


async def test_a_receiver_that_does_not_answer_is_not_waited_for():
    asked, finish = threading.Event(), threading.Event()

    def answer(request):
        asked.set()
        return 200 if finish.wait(SECONDS) else 500

    with receiving(answer) as (port, requests):
        with pytest.raises(WebhookFailed, match=r"no answer within 1 s"):
            await hook(port, timeout=1.0).run(delivery(1))
        assert asked.wait(SECONDS)
        finish.set()
    assert len(requests) == 1


async def test_a_receiver_that_is_not_there_is_a_failure():
    with receiving() as (port, _):
        pass
    with pytest.raises(WebhookFailed, match=r"webhook hook to 127\.0\.0\.1: "):
        await hook(port).run(delivery(1))


async def test_a_number_beyond_every_float_is_posted_as_json():
    with receiving() as (port, requests):
        await hook(port).run(delivery([float("inf"), float("-inf"), 1]))
    assert requests[0].events[0]["payload"] == [10**309, -(10**309), 1]


@pytest.mark.parametrize("more", [False, True])
async def test_a_body_is_compressed_from_1024_bytes(more):
    with receiving() as (port, requests):
        await hook(port).run(delivery(""))
        ballast = GZIP_FROM - len(requests[0].body) - (0 if more else 1)
        await hook(port).run(delivery("x" * ballast))
    assert len(requests[1].body) == (1024 if more else 1023)
    assert requests[1].headers.get("content-encoding") == ("gzip" if more else None)


@pytest.mark.parametrize("payload", ["short", "long" * 1000, "wide \u20ac \U0001f600"])
@pytest.mark.parametrize("secret", [SECRET, lambda: SECRET])
async def test_a_signature_is_verified_by_the_standards_library(payload, secret):
    with receiving() as (port, requests):
        await hook(port, secret=secret).run(delivery(payload))
    [request] = requests
    assert Verifier(SECRET).verify(request.body, request.headers) == {"events": request.events}
    assert request.headers["webhook-id"] == request.headers["idempotency-key"] == delivery(payload).key


async def test_headers_path_and_query_arrive():
    with receiving() as (port, requests):
        await hook(port, path="/a/b?c=d", headers={"Authorization": "Bearer x"}).run(delivery(1))
    [request] = requests
    assert (request.path, request.headers["authorization"]) == ("/a/b?c=d", "Bearer x")
    assert request.headers["host"] == f"127.0.0.1:{port}"
    assert request.headers["content-type"] == "application/json"


async def test_a_url_with_a_query_and_no_path_is_one_of_the_root():
    with receiving() as (port, requests):
        await hook(port, path="?a=b").run(delivery(1))
    assert [request.path for request in requests] == ["/?a=b"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "127.1"]
)
async def test_an_address_that_is_not_public_is_refused(host):
    refused = pytest.raises(WebhookFailed, match="is not public: if it is meant, name its network in allow")
    with receiving() as (port, requests), refused:
        await hook(port, host, allow=()).run(delivery(1))
    assert requests == []


def resolving(monkeypatch, *answers):
    """Let every name resolve to these addresses, one list for each query. Return the number of queries."""
    asked = []

    async def getaddrinfo(self, host, port, **_):
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in answers[len(asked) - 1]]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", getaddrinfo)
    return asked


async def test_a_name_with_one_private_address_among_public_ones_is_refused(monkeypatch):
    asked = resolving(monkeypatch, ["192.0.43.10", "10.0.0.1"])
    with pytest.raises(WebhookFailed, match=r"has the address 10\.0\.0\.1"):
        await hook(80, "example.org", allow=()).run(delivery(1))
    assert asked == ["example.org"]


async def test_the_address_that_was_checked_is_the_one_that_is_connected_to(monkeypatch):
    with receiving() as (port, requests):
        asked = resolving(monkeypatch, ["127.0.0.1"], ["127.0.0.9"])
        await hook(port, "example.org", allow=["127.0.0.1"]).run(delivery(1))
    assert (len(requests), requests[0].headers["host"]) == (1, f"example.org:{port}")
    assert asked == ["example.org"]


@pytest.mark.parametrize("order", [1, -1])
async def test_the_next_address_is_tried_where_one_does_not_answer(monkeypatch, order):
    with receiving() as (port, requests):
        resolving(monkeypatch, ["127.0.0.9", "127.0.0.1"][::order])
        await hook(port, "example.org").run(delivery(1))
    assert len(requests) == 1


@pytest.fixture
def certificate(tmp_path):
    """A receiver's context with a certificate for example.org, and the certificate's path."""
    key, path = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=example.org"
    names = ["-addext", "subjectAltName=DNS:example.org", "-keyout", str(key), "-out", str(path)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key)
    return context, str(path)


async def test_a_certificate_is_checked_against_the_name_not_the_address(certificate, monkeypatch):
    context, path = certificate
    monkeypatch.setenv("SSL_CERT_FILE", path)
    resolving(monkeypatch, ["127.0.0.1"], ["127.0.0.1"])
    with receiving(tls=context) as (port, requests):
        await hook(port, "example.org", scheme="https").run(delivery(1))
        with pytest.raises(WebhookFailed, match="certificate verify failed"):
            await hook(port, "example.net", scheme="https").run(delivery(1))
    assert len(requests) == 1


async def test_a_certificate_that_nobody_vouches_for_is_refused(certificate, monkeypatch):
    context, _ = certificate
    resolving(monkeypatch, ["127.0.0.1"])
    with (
        receiving(tls=context) as (port, requests),
        pytest.raises(WebhookFailed, match="certificate verify failed"),
    ):
        await hook(port, "example.org", scheme="https").run(delivery(1))
    assert requests == []


def test_secrets_are_nowhere_to_be_seen(db, connection, caplog):
    caplog.set_level(logging.DEBUG)
    publish(connection, Event("t"))
    with receiving(lambda request: 500) as (port, requests):
        handler = hook(
            port, path="/hidden-path", secret=SECRET, headers={"X-Key": "hidden-key"}, retries=(LATER,)
        )
        EventHandlers("g", [handler], db).run("empty")
    assert requests[0].headers["x-key"] == "hidden-key"
    assert "it answers 500" in caplog.text
    stored = connection.execute("select metadata::text, payload::text from pgmb.events").fetchall()
    for hidden in ("hidden", SECRET.removeprefix("whsec_")):
        assert hidden not in caplog.text + repr(handler) + str(stored)


@pytest.mark.parametrize("length", [1, 23, 24, 64, 65])
def test_a_secret_has_24_to_64_bytes_as_the_standard_asks_for(length):
    secret = "whsec_" + base64.b64encode(bytes(length)).decode()
    if 24 <= length <= 64:
        webhook("shop", "https://shop.example/", secret=secret)
        return
    with pytest.raises(InvalidArgument, match=f"{length} bytes.*24 to 64") as refused:
        webhook("shop", "https://shop.example/", secret=secret)
    assert secret not in str(refused.value)


@pytest.mark.parametrize("secret", ["whsec_hidden!", "", "whsec_", lambda: 1 / 0])
async def test_a_wrong_secret_is_refused_and_not_shown(secret):
    refusal = pytest.raises(InvalidArgument, match="not base64 text after whsec_|has 0 bytes")
    with receiving() as (port, requests), refusal as refused:
        await hook(port, secret=secret).run(delivery(1))
    assert "hidden" not in str(refused.value)
    assert requests == []


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.org/hidden",
        "example.org/hidden",
        "http:///hidden",
        "http://example.org:0/hidden",
        "http://example.org:port/hidden",
        "http://user:hidden@example.org/",
        "http://example.org/hidden\r\nx: y",
        "http://example.org/hidden path",
        "http://[hidden/",
        "http://hidden..org/",
        "http://" + 64 * "hidden" + ".org/",
    ],
)
def test_a_wrong_url_is_refused_and_not_shown(url):
    with pytest.raises(InvalidArgument, match="webhook hook: ") as refused:
        webhook("hook", url)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    "headers",
    [
        {"x y": "hidden"},
        {"x": "hidden\r\ny: z"},
        {"x": "hidden\u20ac"},
        {"x": "hidden "},
        {"x": " hidden"},
        {"Host": "hidden"},
        {"Webhook-Id": "hidden"},
        {"Idempotency-Key": "hidden"},
    ],
)
def test_a_wrong_header_is_refused_and_not_shown(headers):
    with pytest.raises(InvalidArgument, match="webhook hook: ") as refused:
        webhook("hook", "https://example.org/", headers=headers)
    assert "hidden" not in str(refused.value)


def test_a_subscription_that_is_no_list_of_them_is_refused():
    with pytest.raises(InvalidArgument, match="subscriptions are a list"):
        webhook("hook", "https://example.org/", subscriptions="su1f3870be274f6c49b3e31a")


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout):
    with pytest.raises(InvalidArgument, match="timeout"):
        webhook("hook", "https://example.org/", timeout=timeout)
