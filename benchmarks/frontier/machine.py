"""Frontier as the simulator sees it: published figures of its links, and the constants that are fitted."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.frontier.tables import GCDS_PER_NODE, ViT
from lightning_hetero.cluster import Cluster, Device, Fabric, Link
from lightning_hetero.costs import ModelCosts, UnitTiming
from lightning_hetero.simulator.memory import StateBytes
from lightning_hetero.simulator.shard_events import Overheads

DEVICE = "MI250X-GCD"

MEMORY_BYTES = 64 * 2**30

STATE = StateBytes(parameter=4, gradient=4, optimizer=8, gathered=2, reduced=2)
"""of FSDP in bfloat16 over 32-bit parameters and AdamW"""

# Published, and taken as they are (data/README.md; Frontier's user guide, OLCF).
PAIR_BYTES_PER_S = 200e9  # the two GCDs of a card, Infinity Fabric
NODE_BYTES_PER_S = 50e9  # the slowest hop of a ring through the GCDs of a node
NIC_BYTES_PER_S = 25e9  # Slingshot-11
NICS = 4

BACKWARD_PASSES = 2
"""a backward goes through a block twice: for its inputs and for its weights"""

ADAMW_BYTES = 80
"""bytes of memory that torch's AdamW (a loop over flat 32-bit parameters) reads and writes for each: decay 8, first
moment 12, second moment 8 + 12, its root 8, bias correction 8, epsilon 8, update 16"""


@dataclass(frozen=True)
class Constants:
    """What no published figure gives. Each is one number for all models, modes and numbers of nodes.

    Args:
        matmul_flops_per_s: what matrix products reach on a GCD.
        token_s: seconds that a token takes in each pass of a block however wide it is: kernels that work row by row
            (norms and their weight gradients, softmax).
        memory_bytes_per_s: of a GCD's memory, in the optimizer's step. Not fitted: 0.8 of the published 1.6 TB/s, as
            streaming benchmarks reach; the tables do not tell it apart from ``contention_bytes_per_s``.
        contention_bytes_per_s: bytes of communication that cost a GCD a second of compute.
        hop_s: latency of a hop of a ring.
        half_bandwidth_nodes: nodes at work that leave each node half of its network bandwidth.
        process_bytes: memory of a GCD that no model accounts for: the batch, libraries' work space.
    """

    matmul_flops_per_s: float
    token_s: float
    memory_bytes_per_s: float
    contention_bytes_per_s: float
    hop_s: float
    half_bandwidth_nodes: float
    process_bytes: float


FITTED = Constants(
    matmul_flops_per_s=83.2e12,
    token_s=0.515e-6,
    memory_bytes_per_s=1.3e12,
    contention_bytes_per_s=110e9,
    hop_s=46.3e-6,
    half_bandwidth_nodes=6.69,
    process_bytes=0.25e9,
)
"""what ``--fit`` finds, rounded"""


def cluster(nodes: int, constants: Constants) -> Cluster:
    """So many nodes of 8 GCDs."""
    hop = constants.hop_s
    return Cluster(
        f"Frontier, {nodes} nodes",
        tuple(
            Device(DEVICE, f"node{rank // GCDS_PER_NODE}", MEMORY_BYTES, None) for rank in range(nodes * GCDS_PER_NODE)
        ),
        within_pair=Link(PAIR_BYTES_PER_S, hop),
        within_node=Link(NODE_BYTES_PER_S, hop),
        between_nodes=Fabric(NIC_BYTES_PER_S, hop, NICS, constants.half_bandwidth_nodes),
    )


def timings(model: ViT, costs: ModelCosts, constants: Constants) -> dict[str, tuple[UnitTiming, ...]]:
    """Seconds of every unit on a GCD, per image."""
    found = []
    for unit in costs.units:
        tokens_s = model.tokens * constants.token_s if unit.is_block else 0.0
        forward_s = unit.forward_flops / constants.matmul_flops_per_s + tokens_s
        backward_s = unit.backward_flops / constants.matmul_flops_per_s + BACKWARD_PASSES * tokens_s
        found.append(UnitTiming(0.0, forward_s, 0.0, backward_s))
    return {DEVICE: tuple(found)}


def overheads(constants: Constants) -> Overheads:
    """Of the optimizer and of communication."""
    return Overheads(
        optimizer_s_per_parameter={DEVICE: ADAMW_BYTES / constants.memory_bytes_per_s},
        contention_bytes_per_s=constants.contention_bytes_per_s,
    )
