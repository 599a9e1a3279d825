"""Moving bytes by a plan."""

import logging

import torch.distributed as dist

from moebius_engine.transfer.base import Transfer
from moebius_engine.transfer.collective import CollectiveTransfer

log = logging.getLogger(__name__)


def pick(wanted: str, group: dist.ProcessGroup) -> Transfer:
    """The transfer to use. wanted: "auto" or "collective" (SwitchConfig.transfer)."""
    why = "asked for" if wanted == "collective" else "the only back end so far"
    log.info("transfer: collective over %s (%s)", dist.get_backend(group), why)
    return CollectiveTransfer(group)
