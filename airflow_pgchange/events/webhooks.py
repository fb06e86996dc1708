"""Webhooks: a handler of a group that posts events to a URL. Needs the extra ``http``."""

from __future__ import annotations

import asyncio
import base64
import gzip
import logging
import re
import socket
import ssl
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any
from urllib.parse import SplitResult, urlsplit

from airflow_pgchange.errors import ExtraMissing, InvalidArgument, WebhookFailed
from airflow_pgchange.events.addresses import Network, may_connect, networks
from airflow_pgchange.events.event import Event, shown, text_of
from airflow_pgchange.events.handler import Delivery, Handler
from airflow_pgchange.feeds.argument_checks import MOMENT, Seconds, seconds

try:
    import httpcore
    from standardwebhooks import Webhook as Signer
except ImportError as error:
    raise ExtraMissing(
        f"webhooks need {error.name}: pip install 'airflow-provider-pgchange[http]'"
    ) from error

log = logging.getLogger(__name__)

GZIP_FROM = 1024
"""A body of at least this many bytes is sent compressed."""
DROPPED = 422
"""The status with which a receiver permanently rejects events."""
SECRET_BYTES = range(24, 65)
"""Valid sizes of a secret in bytes, by the Standard Webhooks specification."""
RETRIES = (5.0, 60.0, 300.0, 3600.0)
HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
OURS = ("content-encoding", "content-length", "content-type", "host", "idempotency-key", "transfer-encoding")

Secret = str | Callable[[], str]


def each_event(event: Event) -> Hashable:
    """A key that puts each event into its own request."""
    return event.id


def webhook(
    name: str,
    url: str,
    *,
    secret: Secret | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: Seconds = 5.0,
    retries: Sequence[Seconds] = RETRIES,
    key: Callable[[Event], Hashable] | None = each_event,
    threads: int = 4,
    subscriptions: Collection[str] | None = None,
    allow: Sequence[str] = (),
) -> Handler:
    """Return a handler that posts events to a URL: ``{"events": [{"id", "topic", "payload", "metadata"}, ...]}``.

    By default each event has its own request, and ``threads`` requests run in parallel. ``key`` puts events with the same
    key into one request, in order. ``key=None`` sends whole batches, one after the other. A body of 1,024 bytes or more
    is compressed (``Content-Encoding: gzip``). ``Idempotency-Key`` is the same in every attempt, unless the batch is
    split differently; an event's own ``id`` never changes.

    A status of 2xx accepts the events. A status of 422 drops them, with a warning. Any other status, also a redirect, and
    no answer within ``timeout`` are failures. The request is then retried after each pause in ``retries``, and becomes a
    dead letter at last. Guarantee: at least once.

    ``secret`` is ``whsec_`` and 24 to 64 bytes in base64, or a callable that returns it. It signs the uncompressed body
    by the Standard Webhooks specification: ``webhook-id``, ``webhook-timestamp``, ``webhook-signature``. The secret,
    the ``headers`` and the URL's path are never shown or logged.

    The handler connects only to public addresses, and to the networks in ``allow``, such as ``10.1.0.0/16``. It connects
    to the same address that it checked. It does not use proxies of the environment. Raises InvalidArgument for invalid
    arguments.
    """
    timeout_seconds = seconds(f"webhook {name}: timeout", timeout, least=MOMENT, most=timedelta(hours=1))
    run = Webhook(
        name,
        _checked_url(name, url),
        secret,
        _checked_headers(name, headers or {}),
        timeout_seconds,
        networks(allow),
    )
    if isinstance(secret, str):
        run.signer()
    return Handler(
        name,
        run,
        # The request has its own timeout. This later timeout covers blocking calls such as name resolution.
        timeout=timeout_seconds + 5,
        retries=tuple(retries),
        key=key,
        threads=threads,
        subscriptions=subscriptions,
    )


@dataclass(frozen=True)
class Webhook:
    """The callable of a webhook's handler. Create it with ``webhook``."""

    name: str
    url: SplitResult = field(repr=False)
    secret: Secret | None = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    timeout: float
    allowed: tuple[Network, ...]

    async def __call__(self, delivery: Delivery) -> None:
        try:
            async with asyncio.timeout(self.timeout):
                status = await self._post(delivery)
        except TimeoutError:
            raise self._failed(f"no answer within {self.timeout:g} s") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            raise self._failed(str(error) or type(error).__name__) from error
        if status == DROPPED:
            log.warning(
                "webhook %s: dropped %d events from %s, because the receiver answered 422",
                self.name,
                len(delivery.events),
                delivery.events[0].id,
            )
        elif 300 <= status < 400:
            raise self._failed(
                f"it answers with a redirect ({status}), which is not followed: give the new URL"
            )
        elif not 200 <= status < 300:
            raise self._failed(f"it answers {status}")

    def signer(self) -> Signer | None:
        """Return the signer, or None without a secret.

        Raises InvalidArgument for a malformed secret, or one of invalid length. The error does not contain the secret.
        """
        if self.secret is None:
            return None
        try:
            secret = self.secret if isinstance(self.secret, str) else self.secret()
            length = len(base64.b64decode(secret.removeprefix("whsec_"), validate=True))
        # Replace every error, because its text might contain the secret and errors are stored.
        except Exception:  # noqa: BLE001
            raise InvalidArgument(
                f"webhook {self.name}: the secret's callable failed, or the secret is not base64 text after whsec_"
            ) from None
        if length not in SECRET_BYTES:
            raise InvalidArgument(
                f"webhook {self.name}: the secret has {length} bytes, and Standard Webhooks requires 24 to 64: "
                "append the output of `openssl rand -base64 32` to whsec_"
            )
        return Signer(secret)

    async def _post(self, delivery: Delivery) -> int:
        body = text_of({"events": [shown(event) for event in delivery.events]})
        headers = {**self.headers, **self._signed(delivery.key, body)}
        headers |= {
            "host": self.url.netloc,
            "content-type": "application/json",
            "idempotency-key": delivery.key,
        }
        content = body.encode()
        if len(content) >= GZIP_FROM:
            content = gzip.compress(content, 6)
            headers["content-encoding"] = "gzip"
        headers["content-length"] = str(len(content))
        context = self._tls if self.url.scheme == "https" else None
        target = (self.url.path or "/") + (f"?{self.url.query}" if self.url.query else "")
        async with (
            httpcore.AsyncConnectionPool(context, network_backend=CheckedNetwork(self.allowed)) as pool,
            pool.stream(
                "POST",
                httpcore.URL(
                    scheme=self.url.scheme,
                    host=str(self.url.hostname),
                    port=self.url.port,
                    target=target,
                ),
                headers=[(name.encode(), value.encode()) for name, value in headers.items()],
                content=content,
            ) as response,
        ):
            return response.status

    def _signed(self, key: str, body: str) -> dict[str, str]:
        signer = self.signer()
        if signer is None:
            return {}
        now = datetime.now(UTC).replace(microsecond=0)
        return {
            "webhook-id": key,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": signer.sign(key, now, body),
        }

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def _failed(self, reason: str) -> WebhookFailed:
        return WebhookFailed(f"webhook {self.name} to {self.url.hostname}: {reason}")


class CheckedNetwork(httpcore.AnyIOBackend):
    """Connects to the address that it has checked. So a second, different DNS answer has no effect (DNS rebinding)."""

    def __init__(self, allowed: Sequence[Network]) -> None:
        self._allowed = allowed

    async def connect_tcp(
        self, host: str, port: int, *args: Any, **kwargs: Any
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that answers. Raises WebhookFailed if any address of the host is not allowed.

        All must be allowed, because the owner of the name could mix allowed and forbidden addresses.
        """
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in infos))
        for address in addresses:
            if not may_connect(address, self._allowed):
                raise WebhookFailed(
                    f"{host} has the address {address}, which is not public: if it is meant, name its network in allow"
                )
        for address in addresses[:-1]:
            try:
                return await super().connect_tcp(address, port, *args, **kwargs)
            except httpcore.ConnectError:
                log.debug("%s does not answer at %s: trying its next address", host, address)
        return await super().connect_tcp(addresses[-1], port, *args, **kwargs)


def _checked_url(name: str, url: str) -> SplitResult:
    """Parse the URL. Raises InvalidArgument without the URL, because the URL may contain a secret."""
    try:
        parts = urlsplit(url)
        fit = (
            parts.scheme in ("http", "https")
            and parts.hostname
            and parts.hostname.encode("idna")
            and parts.port != 0
            and url.isascii()
        )
    except ValueError:
        fit = False
    if not fit or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise InvalidArgument(f"webhook {name}: the URL must be http(s)://host[:port]/path in ASCII, escaped")
    if "@" in parts.netloc:
        raise InvalidArgument(
            f"webhook {name}: give user and password as a header, authorization, not in the URL"
        )
    return parts


def _checked_headers(name: str, headers: Mapping[str, str]) -> dict[str, str]:
    """Check the headers, and return them with lower-case names. Raises InvalidArgument without their values."""
    for header, value in headers.items():
        lower = header.lower()
        sendable = value.isascii() and value.isprintable() and value == value.strip()
        if not HEADER.fullmatch(header) or not sendable:
            raise InvalidArgument(
                f"webhook {name}: header {header!r} or its value has characters that HTTP does not allow"
            )
        if lower in OURS or lower.startswith("webhook-"):
            raise InvalidArgument(f"webhook {name}: the header {header} is set by the webhook itself")
    return {header.lower(): value for header, value in headers.items()}
