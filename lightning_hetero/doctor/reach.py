"""Check: every rank reaches every other one, by its name and at a port that it listens on."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from lightning_hetero.doctor.facts import RankFacts, known
from lightning_hetero.doctor.finding import Finding, Level, not_checked
from lightning_hetero.doctor.places import places, ranks_text

CHECK = "reach"

_AT_ONCE = 16
_LOOK_S = 0.1


@dataclass(frozen=True)
class Reach:
    """How one rank tried to reach another.

    Args:
        rank: who tried.
        peer: whom.
        name: the peer's machine.
        port: where the peer listens.
        by_name: what went wrong under the machine's name; ``None`` if the peer answered.
        by_address: likewise under the peer's address; ``None`` also where it was not needed.
        address: that address.
        seconds: that it took.
    """

    rank: int
    peer: int
    name: str
    port: int
    by_name: str | None
    by_address: str | None
    address: str | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The attempt as JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Reach:
        """The inverse of :meth:`to_dict`."""
        return cls(**known(cls, data))


class Listener:
    """Answers whoever connects with who it is, until closed.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        if socket.has_dualstack_ipv6():
            self._socket = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
        else:
            self._socket = socket.create_server(("", 0), backlog=128)
        self._socket.settimeout(_LOOK_S)
        self.port = int(self._socket.getsockname()[1])
        self._greeting = greeting(rank)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="lightning-hetero doctor", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            with connection:
                try:
                    connection.sendall(self._greeting)
                except OSError:
                    continue  # who asked has gone

    def close(self) -> None:
        """Answer no more."""
        self._ended.set()
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def greeting(rank: int) -> bytes:
    """What a rank's listener says, so that another program at its port is not taken for it."""
    return f"lightning-hetero doctor, rank {rank}\n".encode()


def knock(host: str, port: int, expected: bytes, timeout_s: float) -> str | None:
    """Connect and hear who answers; returns what went wrong, ``None`` if nothing did.

    Args:
        host: name or address.
        port: of the peer.
        expected: what the peer says.
        timeout_s: for the connection and for the answer, each.
    """
    heard = b""
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            while len(heard) < len(expected):
                part = connection.recv(len(expected) - len(heard))
                if not part:
                    break
                heard += part
    except socket.gaierror as error:
        return f"the name {host!r} is not known here ({error.strerror})"
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None if heard == expected else "another program answers there"


def try_peers(own: RankFacts, everyone: Sequence[RankFacts], timeout_s: float) -> list[Reach]:
    """Knock at every other rank's port, by its machine's name and, where that fails, by its address.

    Args:
        own: this rank's facts.
        everyone: all ranks' facts.
        timeout_s: for each attempt.
    """
    peers = [each for each in everyone if each.rank != own.rank and each.port is not None]
    if not peers:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(peers))) as pool:
        return list(pool.map(lambda peer: _try(own, peer, timeout_s), peers))


def longest_s(world_size: int, timeout_s: float) -> float:
    """Seconds that :func:`try_peers` takes at most, names apart: each attempt by name and by address."""
    return 2 * timeout_s * -(-world_size // _AT_ONCE)


def _try(own: RankFacts, peer: RankFacts, timeout_s: float) -> Reach:
    began_s = time.monotonic()
    assert peer.port is not None
    said = greeting(peer.rank)
    by_name = knock(peer.node, peer.port, said, timeout_s)
    by_address = None
    if by_name is not None:
        by_address = (
            knock(peer.address, peer.port, said, timeout_s) if peer.address else "the peer does not know its address"
        )
    taken_s = time.monotonic() - began_s
    return Reach(own.rank, peer.rank, peer.node, peer.port, by_name, by_address, peer.address, taken_s)


def check_reach(
    ranks: Sequence[RankFacts], reaches: Sequence[Reach], missing: Sequence[int] = (), waited_s: float = 0.0
) -> list[Finding]:
    """Ranks that did not come, pairs that do not reach each other, names that mislead.

    Args:
        ranks: facts of the ranks that came.
        reaches: every attempt.
        missing: ranks that did not come.
        waited_s: how long they were waited for.
    """
    if len(ranks) == 1 and not missing:
        step = "run it on every rank, as the training will be: under torchrun or srun"
        return [not_checked(CHECK, places(ranks), "there is one process alone, and no peer to reach", step)]
    findings = []
    if missing:
        what = f"{ranks_text(missing)} of {len(ranks) + len(missing)} did not come within {waited_s:g} s"
        step = (
            "see on its node that the command runs there, with the same MASTER_ADDR and MASTER_PORT, and that this "
            "address is reached from there; --wait gives slow starts more time"
        )
        findings.append(Finding("error", CHECK, ranks_text(missing), what, step))
    by_rank = {each.rank: each for each in ranks}
    tried = {each.rank for each in reaches}
    silent = [each for each in ranks if each.rank not in tried]
    if silent and len(ranks) > 1:
        what = "came, but did not say whom it reaches: it ended, or its connection broke, in the middle"
        findings.append(Finding("error", CHECK, places(silent), what, "see its own output, and run it again"))
    return [*findings, *_failed(reaches, by_rank), *_misleading(ranks)]


def _failed(reaches: Sequence[Reach], by_rank: dict[int, RankFacts]) -> list[Finding]:
    """One finding for each pair of nodes and each thing that went wrong between them."""
    groups: dict[tuple[str, str, bool, str], list[Reach]] = {}
    for each in reaches:
        if each.by_name is not None:
            lost = each.by_address is not None
            why = f"{each.by_name}; by its address {each.address}: {each.by_address}" if lost else each.by_name
            groups.setdefault((by_rank[each.rank].node, each.name, lost, why), []).append(each)
    findings = []
    for (node, peer_node, lost, why), pairs in groups.items():
        named = ", ".join(f"{each.rank} -> {each.peer} (port {each.port})" for each in pairs)
        where = f"from node {node} to node {peer_node}"
        if lost:
            what = f"ranks that cannot reach each other: {named}: {why}"
            step = (
                f"open all ports between the nodes (NCCL and gloo take any), see that {peer_node} is the right machine "
                "by name, and that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the interface between them"
            )
            findings.append(Finding("error", CHECK, where, what, step))
        else:
            what = f"reached by address only: {named}: {why}"
            step = f"give {peer_node} an entry in {node}'s DNS or /etc/hosts, or use addresses as MASTER_ADDR"
            findings.append(Finding("warning", CHECK, where, what, step))
    return findings


def _misleading(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Machines whose own name means the loopback: gloo tells peers the address of its own name."""
    if len({each.node for each in ranks}) < 2:
        return []
    wrong = [each for each in ranks if _is_loopback(each.own_address) and "GLOO_SOCKET_IFNAME" not in each.environment]
    if not wrong:
        return []
    # on GPUs gloo carries no more than objects, if anything
    level: Level = "warning" if all(each.has_gpu for each in wrong) else "error"
    what = f"the machine's own name means {wrong[0].own_address} to itself: gloo tells the others to connect there"
    step = "set GLOO_SOCKET_IFNAME to the interface between the nodes (ip addr), or correct /etc/hosts"
    return [Finding(level, CHECK, places(wrong), what, step)]


def _is_loopback(address: str | None) -> bool:
    try:
        return address is not None and ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
