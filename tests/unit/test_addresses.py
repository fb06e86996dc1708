"""The addresses to which a webhook may connect."""

from __future__ import annotations

import pytest

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.events.addresses import may_connect, networks


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "127.0.0.1",
        "127.255.255.254",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.8",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "203.0.113.7",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::1.2.3.4",
        "::8.8.8.8",
        "168.63.129.16",
        "::ffff:168.63.129.16",
        "64:ff9b::168.63.129.16",
        "2002:a83f:8110::1",
        "2606:4700::5efe:10.0.0.1",
        "2606:4700::5efe:8.8.8.8",
        "2606:4700::200:5efe:7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::127.0.0.1",
        "64:ff9b::10.0.0.1",
        "64:ff9b:1::1",
        "2002:7f00:1::",
        "2002:a00:1::1",
        "2001::1",
        "2001:db8::1",
        "3fff::1",
        "3fff:fff:ffff::1",
        "fc00::1",
        "fd12:3456::1",
        "fe80::1",
        "fe80::1%lo",
        "fec0::1",
        "ff02::1",
    ],
)
def test_an_address_that_is_not_public_is_refused_for_webhooks(address):
    assert not may_connect(address)


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1"],
)
def test_a_public_address_is_allowed(address):
    assert may_connect(address)


def test_only_the_networks_that_are_named_are_allowed():
    allowed = networks(["10.1.0.0/16", "fd12::/16", "127.0.0.1"])
    asked = ["10.1.2.3", "::ffff:10.1.2.3", "fd12::1", "127.0.0.1", "10.2.0.1", "fd13::1", "127.0.0.2", "::1"]
    assert [may_connect(each, allowed) for each in asked] == 4 * [True] + 4 * [False]


def test_a_reserved_address_can_be_allowed_by_name():
    allowed = networks(["168.63.129.16", "2606:4700::/32", "::1.2.3.4"])
    asked = ["168.63.129.16", "2606:4700::5efe:10.0.0.1", "::1.2.3.4", "::1.2.3.5"]
    assert [may_connect(each, allowed) for each in asked] == [True, True, True, False]


@pytest.mark.parametrize("wrong", ["10.1.0.1/16", "all", "", "localhost"])
def test_an_invalid_network_is_refused(wrong):
    with pytest.raises(InvalidArgument, match="allow names networks"):
        networks([wrong])
