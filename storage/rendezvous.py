"""How the ranks of a job find each other: the same for a training and for a check of the network.

Loads no torch, so that both of its users may; what they build on it is torch's own.
"""

from __future__ import annotations

import socket

import psutil

from storage.errors import HeadraceError
from storage.job import RankIdentity


class RendezvousError(HeadraceError):
    """The ranks could not meet."""


def address_towards(address: str) -> str:
    """The address from which this host reaches `address`. Nothing is sent there."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        own: str = probe.getsockname()[0]
        return own


def interface_towards(address: str) -> str:
    """The interface whose address this host uses to reach `address`.

    Gloo would resolve the host's name, which Debian maps to 127.0.1.1 and which several network
    namespaces of one host share.

    Raises:
        RendezvousError: no interface has that address.
    """
    own = address_towards(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == own for known in addresses):
            return name
    raise RendezvousError(
        f"no interface of this host has the address {own} that it would reach {address} from; "
        "name one in cluster.env GLOO_SOCKET_IFNAME"
    )


def open_listener(identity: RankIdentity) -> int | None:
    """A listening socket's descriptor on rank 0, None elsewhere; for torch's TCP store to take.

    It listens on the master address alone; torch's own would listen on all addresses.
    """
    if identity.rank != 0:
        return None
    listener = socket.create_server(
        (identity.master_addr, identity.master_port),
        family=_family(identity.master_addr),
        backlog=1024,
    )
    return listener.detach()


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, None)[0][0]
