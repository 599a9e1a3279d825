"""Ranks meet on loopback, and torch's own rendezvous would not keep to it."""

import os
import threading
from datetime import timedelta

import psutil
import torch.distributed as dist
from sglang.srt.environ import envs

from moebius_engine.sglang import rendezvous
from moebius_engine.sglang.ports import free_port


def listening_at(port: int) -> set[str]:
    connections = psutil.Process().net_connections()
    return {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


def test_ranks_meet_and_listen_on_loopback_only():
    port = free_port()
    url, stores = f"moebius://127.0.0.1:{port}?rank={{}}&world_size=2", {}

    def rank(number: int) -> None:
        store, own, ranks = next(rendezvous.meet(url.format(number), timeout=timedelta(seconds=30)))
        stores[own] = store
        assert ranks == 2
        store.set(f"from {number}", str(number))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stores[0].get("from 1") == b"1" and stores[1].get("from 0") == b"0"
    assert listening_at(port) == {"127.0.0.1"}


def test_torchs_own_store_listens_everywhere():
    """The reason for ours, which can go when this fails."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert listening_at(store.port) == {"::"}


def test_what_the_user_has_set_stays(monkeypatch):
    method = envs.SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE.name
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv(method, "")  # so that the end of the test takes away what is set here
    monkeypatch.delenv(method)
    rendezvous.use_loopback(23456)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ[method] == "moebius://127.0.0.1:23456"
