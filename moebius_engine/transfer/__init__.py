"""Moving bytes by a plan."""

import logging

import torch.distributed as dist

from moebius_engine.memory.exportable import Memory
from moebius_engine.transfer.base import Transfer
from moebius_engine.transfer.collective import CollectiveTransfer

log = logging.getLogger(__name__)


def pick(
    wanted: str,
    group: dist.ProcessGroup,
    memory: Memory | None = None,
    cpu_group: dist.ProcessGroup | None = None,
    timeout_s: float = 300.0,
) -> Transfer:
    """The transfer to use. Collective; says which one it is, and why.

    wanted: "auto", "direct" or "collective" (SwitchConfig.transfer). group: for the collective one. memory: what the
    ranks share, None if it cannot be shared. cpu_group: the same ranks over a CPU back end. timeout_s: deadline of
    every wait for a peer.

    Raises RuntimeError if "direct" is wanted and does not work here.
    """
    level = logging.INFO
    if wanted == "collective":
        why = "asked for"
    elif memory is None or cpu_group is None:
        why = "the ranks share no device memory"
    else:
        from moebius_engine.transfer.probe import probe  # needs the CUDA driver

        direct, why = probe(memory, cpu_group, timeout_s)
        if direct is not None:
            log.info("transfer: direct (%s)", why)
            return direct
        level = logging.WARNING
    if wanted == "direct":
        raise RuntimeError(f"transfer='direct' does not work here: {why}; use 'auto' or 'collective'")
    log.log(level, "transfer: collective over %s (%s)", dist.get_backend(group), why)
    return CollectiveTransfer(group)
