"""The IP addresses to which webhooks may connect. Others are refused, to prevent server-side request forgery."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from airflow_pgchange.errors import InvalidArgument

Network = IPv4Network | IPv6Network

TRANSLATED = IPv6Network("64:ff9b::/96")
"""NAT64: the last 32 bits of these addresses are an IPv4 address (RFC 6052)."""
TUNNELLED = {0x0000_5EFE, 0x0200_5EFE}
"""ISATAP: in any network, an address with these 32 bits before an IPv4 address leads to that address (RFC 5214)."""
NOT_PUBLIC: tuple[Network, ...] = (
    IPv4Network("192.0.0.0/24"),
    IPv4Network("192.88.99.0/24"),
    # Azure's host answers its virtual machines at this address, and returns configuration and credentials.
    IPv4Network("168.63.129.16/32"),
    # IPv4-compatible IPv6 addresses, which are deprecated (RFC 4291).
    IPv6Network("::/96"),
    IPv6Network("64:ff9b:1::/48"),
    IPv6Network("3fff::/20"),
    IPv6Network("fec0::/10"),
)
"""Networks that are not public, although ``is_global`` is true for them, at least in some versions of Python."""


def networks(allowed: Sequence[str]) -> tuple[Network, ...]:
    """Parse networks and single addresses. Raises InvalidArgument for other texts."""
    try:
        return tuple(ip_network(each) for each in allowed)
    except ValueError as error:
        raise InvalidArgument(
            f"allow names networks such as 10.1.0.0/16, or single addresses: {error}"
        ) from error


def may_connect(address: str, allowed: Sequence[Network] = ()) -> bool:
    """Return whether an address is public, or in an allowed network.

    An IPv6 address that contains an IPv4 address (mapped, 6to4 or NAT64) is judged as that IPv4 address.
    """
    target = _target(ip_address(address))
    if any(target in network for network in allowed):
        return True
    is_tunnelled = target.version == 6 and (int(target) >> 32) & 0xFFFF_FFFF in TUNNELLED
    unfit = (
        is_tunnelled
        or target.is_multicast
        or target.is_reserved
        or any(target in network for network in NOT_PUBLIC)
    )
    return target.is_global and not unfit


def _target(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    if isinstance(address, IPv4Address):
        return address
    if address in TRANSLATED:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
