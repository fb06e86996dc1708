"""Which addresses may be connected to on behalf of others."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from airflow_pgchange.errors import InvalidArgument

Network = IPv4Network | IPv6Network

TRANSLATED = IPv6Network("64:ff9b::/96")
"""The network whose last 32 bits are the IPv4 address that is meant."""
TUNNELLED = {0x0000_5EFE, 0x0200_5EFE}
"""The 32 bits before an IPv4 address by which ISATAP, in any network, sends to that address (RFC 5214)."""
NOT_PUBLIC: tuple[Network, ...] = (
    IPv4Network("192.0.0.0/24"),
    IPv4Network("192.88.99.0/24"),
    # Inside a machine of Azure its host answers there, and gives configuration and credentials.
    IPv4Network("168.63.129.16/32"),
    # IPv4 addresses in the oldest form, which is out of use (RFC 4291).
    IPv6Network("::/96"),
    IPv6Network("64:ff9b:1::/48"),
    IPv6Network("3fff::/20"),
    IPv6Network("fec0::/10"),
)
"""Networks that are not public, although they look so or some versions of Python have ``is_global`` true for them."""


def networks(allowed: Sequence[str]) -> tuple[Network, ...]:
    """Raises InvalidArgument for a text that is not a network."""
    try:
        return tuple(ip_network(each) for each in allowed)
    except ValueError as error:
        raise InvalidArgument(
            f"allow names networks such as 10.1.0.0/16, or single addresses: {error}"
        ) from error


def may_connect(address: str, allowed: Sequence[Network] = ()) -> bool:
    """Whether an address is public, or in one of the networks that are allowed.

    An IPv6 address that stands for an IPv4 one, mapped, translated or tunnelled, is what that is.
    """
    meant = _meant(ip_address(address))
    if any(meant in network for network in allowed):
        return True
    is_tunnelled = meant.version == 6 and (int(meant) >> 32) & 0xFFFF_FFFF in TUNNELLED
    unfit = (
        is_tunnelled
        or meant.is_multicast
        or meant.is_reserved
        or any(meant in network for network in NOT_PUBLIC)
    )
    return meant.is_global and not unfit


def _meant(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    if isinstance(address, IPv4Address):
        return address
    if address in TRANSLATED:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
