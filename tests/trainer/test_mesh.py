import os
import signal
import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from storage.job import RankIdentity
from storage.rendezvous import RendezvousError, interface_towards
from tests.ranks import ALONE
from tests.trainer.distributed import free_port, run_distributed_test, start_ranks
from trainer.parallel.mesh import set_timeout, start_process_group

CPU = torch.device("cpu")


def test_the_interface_is_the_one_that_leads_to_the_master() -> None:
    assert interface_towards("127.0.0.1") == "lo"


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        identity = replace(ALONE, master_port=port)
        with pytest.raises(RendezvousError, match=f"127.0.0.1:{port} .*already in use"):
            start_process_group(identity, device=CPU, timeout_s=5)


def test_ranks_that_never_come_are_not_awaited_for_ever() -> None:
    identity = replace(ALONE, world_size=2, master_port=free_port())
    with pytest.raises(RendezvousError, match=r"rank 0 of 2 .* within train.start_timeout_s 1"):
        start_process_group(identity, device=CPU, timeout_s=1)


def listening(identity: RankIdentity) -> tuple[set[str], str]:
    import psutil

    start_process_group(identity, device=CPU, timeout_s=60)
    sockets = psutil.Process().net_connections("tcp")
    addresses = {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}
    return addresses, os.environ["GLOO_SOCKET_IFNAME"]


@pytest.mark.distributed
def test_a_rank_listens_on_the_masters_side_only() -> None:
    assert run_distributed_test(listening, 2) == [({"127.0.0.1"}, "lo")] * 2


def wait_for_a_stopped_peer(identity: RankIdentity) -> str:
    mesh = start_process_group(identity, device=CPU, timeout_s=60)
    dist.barrier()
    set_timeout(mesh, timeout_s=2)
    if identity.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        dist.all_reduce(torch.zeros(8), group=mesh.get_group())
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.distributed
def test_a_peer_gone_without_a_word_ends_the_wait_at_the_training_time_out() -> None:
    ranks = start_ranks(wait_for_a_stopped_peer, 2)
    try:
        good, error = ranks[0].outcome()
        assert good
        assert "Timed out waiting 2000ms" in error
    finally:
        for rank in ranks:
            rank.kill()
