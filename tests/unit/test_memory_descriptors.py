"""Descriptors between processes of one user: sent, received, and refused to and from others."""

import os
import socket

import pytest

from moebius_engine.memory import descriptors
from moebius_engine.memory.descriptors import Mailbox, peer_user, send


@pytest.fixture
def mailbox():
    one = Mailbox(rank=0, timeout_s=0.5)
    yield one
    one.close()


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_descriptor_arrives_with_its_message(mailbox, pipe):
    send({0: mailbox.name}, rank=1, message=["a"], descriptors=[pipe[1]], timeout_s=5)
    ((message, (got,)),) = mailbox.receive([1]).values()
    os.write(got, b"x")
    os.close(got)
    assert message == ["a"] and os.read(pipe[0], 1) == b"x"


def test_another_user_is_turned_away_and_those_of_this_one_still_come(mailbox, pipe, monkeypatch):
    strangers = iter([os.geteuid() + 1])
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{mailbox.name}")
        stranger.sendall(b'[1, "forged"]')
        send({0: mailbox.name}, rank=1, message="real", descriptors=[pipe[1]], timeout_s=5)
        monkeypatch.setattr(descriptors, "peer_user", lambda one: next(strangers, os.geteuid()))
        ((message, (got,)),) = mailbox.receive([1]).values()
    os.close(got)
    assert message == "real"


def test_what_only_others_send_is_as_if_nothing_came(mailbox, monkeypatch):
    send({0: mailbox.name}, rank=1, message="forged", descriptors=[0], timeout_s=5)
    monkeypatch.setattr(descriptors, "peer_user", lambda one: os.geteuid() + 1)
    with pytest.raises(TimeoutError, match=r"no descriptors of ranks \[1\]"):
        mailbox.receive([1])


def test_nothing_is_sent_to_another_users_mailbox(mailbox, pipe, monkeypatch):
    monkeypatch.setattr(descriptors, "peer_user", lambda one: os.geteuid() + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        send({0: mailbox.name}, rank=1, message="secret", descriptors=[pipe[1]], timeout_s=5)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as another user")
def test_the_kernel_says_who_connects():
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{os.getpid()}-credentials")
        server.listen()
        child = os.fork()
        if not child:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(f"\0{os.getppid()}-credentials")
                client.recv(1)
            os._exit(0)
        connection, _ = server.accept()
        with connection:
            assert peer_user(connection) == 65534
        os.waitpid(child, 0)
