"""Seconds of a collective among P ranks: latency plus bytes over the link, inside a host and between hosts.

g ranks lie on each of h hosts, P = g h. Bytes are what crosses the busiest rank's link in one direction; each formula
is the least that any algorithm can send (R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication
operations in MPICH, 2005), done inside a host first where there are several.
"""

from moebius_engine.costmodel.hardware import Cluster, Link


def all_reduce_s(cluster: Cluster, nbytes: float) -> float:
    """nbytes: of the tensor, which every rank has.

    A reduce-scatter and an all-gather, each of which sends (g - 1) / g of it. Between hosts each rank has the sum of a
    g-th, and reduces it with the h - 1 others of its place in the same way.
    """
    g, h = cluster.per_host, cluster.hosts
    inside = _time(cluster.gpu.nvlink, g, 2 * (g - 1) / g * nbytes)
    return inside + (_time(cluster.nic, h, 2 * (h - 1) / h * nbytes / g) if cluster.nic else 0.0)


def all_gather_s(cluster: Cluster, nbytes: float) -> float:
    """nbytes: what each rank contributes.

    A rank receives that of the h - 1 others of its place from the other hosts, and then what its g - 1 neighbours have
    by then, h pieces each. A reduce-scatter is the same in reverse: nbytes is what each rank ends with.
    """
    g, h = cluster.per_host, cluster.hosts
    inside = _time(cluster.gpu.nvlink, g, (g - 1) * h * nbytes)
    return inside + (_time(cluster.nic, h, (h - 1) * nbytes) if cluster.nic else 0.0)


def all_to_all_s(cluster: Cluster, nbytes: float) -> float:
    """nbytes: what one rank sends, the same to each of the P ranks, itself included.

    (g - 1) / P of it goes over NVLink and (P - g) / P over the NIC, at the same time.
    """
    g, ranks = cluster.per_host, cluster.ranks
    inside = _time(cluster.gpu.nvlink, g, (g - 1) / ranks * nbytes)
    return max(inside, _time(cluster.nic, cluster.hosts, (ranks - g) / ranks * nbytes) if cluster.nic else 0.0)


def _time(link: Link, members: int, nbytes: float) -> float:
    return link.latency_s + nbytes / (link.bytes_per_s * link.collective) if members > 1 else 0.0
