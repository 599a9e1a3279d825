"""Engines that start together, and connections that come and go, leave each engine its ports."""

import itertools
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.sglang import ports
from moebius_engine.sglang.ports import PortBlock, free_port

PORT = st.integers(1, 65535)


def test_engines_that_start_together_have_blocks_of_their_own():
    with ThreadPoolExecutor(16) as pool:
        blocks = list(pool.map(lambda _: PortBlock(), range(16)))
    bases = sorted(block.base for block in blocks)
    assert all(after - before >= 240 for before, after in itertools.pairwise(bases))
    for block in blocks:
        block.close()


def test_a_block_is_held_until_it_is_closed():
    """SGLang binds its ports seconds after the choice."""
    block = PortBlock()
    with pytest.raises(ValueError, match=f"port={block.base}: port .* is in use, perhaps by an engine"):
        PortBlock(block.base)
    block.close()
    block.close()
    PortBlock(block.base).close()


@pytest.mark.parametrize("offset", [0, 233, 238, 239])
def test_a_port_of_sglangs_that_is_taken(offset):
    base = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + offset))
        with pytest.raises(ValueError, match=f"port={base}: port {base + offset} is in use"):
            PortBlock(base)
    PortBlock(base).close()  # it was given up when it was refused


def test_an_outgoing_connection_takes_no_port_of_a_block():
    """Found in a run of these tests: base 55520 was free, and port 55756 taken by the time SGLang bound it."""
    low, high = ports._ephemeral_ports()
    block = PortBlock()
    assert block.rendezvous < low or block.base > high
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert low <= client.getsockname()[1] <= high
    block.close()


@given(PORT, PORT)
def test_blocks_outside_a_range(low, high):
    low, high = sorted((low, high))
    bases = range(20000, 55000, 240)
    chosen = ports._outside(bases, low, high)
    clear = [base for base in bases if max(base, low) > min(base + 239, high)]
    assert chosen == (clear or list(bases))
