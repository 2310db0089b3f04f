"""What every hetero strategy does: find its cluster, start its ranks, end them together, count samples."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lightning_hetero.cluster import Cluster
from lightning_hetero.errors import ClusterError, HeteroError, UnsupportedError, raise_all
from lightning_hetero.strategies import lightning_adapter, rank_count, torch_adapter
from lightning_hetero.strategies.arguments import read_cluster
from lightning_hetero.strategies.failure import FailureWatch, RankFailedError
from lightning_hetero.strategies.parent import ParentWatch, watch_launcher

_PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")
_FP16 = "16-mixed"
_PRECISION_NAMES = {
    None: "32-true",
    32: "32-true",
    64: "64-true",
    "32": "32-true",
    "64": "64-true",
    16: "16-mixed",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
}


_ADOPTED = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "precision_plugin",
    "num_nodes",
    "cluster",
    "_backend",
    "_checkpoint_io",
    "_launcher",
    "_layer_sync",
    "_lightning_module",
    "_timeout",
    "_watch",
)
"""what a strategy has from its Trainer and its start"""


class HeteroStrategy(ParallelStrategy):
    """Base of the strategies; not to be used by itself.

    Args:
        cluster: the devices, one per rank; a path is read as YAML, None takes the file that the environment variable
            ``LIGHTNING_HETERO_CLUSTER`` names, else what the ranks discover.
        timeout: for collectives, and so for a rank that never comes.
        process_group_backend: default: nccl for CUDA and ROCm devices, gloo for CPU.
    """

    waits_for_messages = False
    """whether a rank's units wait for messages of other ranks, as a pipeline's stages do"""

    def __init__(
        self,
        cluster: Cluster | str | Path | None = None,
        *,
        timeout: timedelta = timedelta(minutes=30),
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.num_nodes = 1
        self._timeout = timeout
        self._backend = process_group_backend
        self.cluster: Cluster | None = read_cluster(cluster)
        if self.cluster is not None and self.cluster.emulate and not parallel_devices:
            # an emulated cluster sets the number of processes: on CPU, devices="auto" would be one
            local = int(os.environ.get("LOCAL_WORLD_SIZE", self.cluster.world_size))
            self.parallel_devices = [torch.device("cpu")] * local
        self._watch: FailureWatch | None = None
        self._launcher_watch: ParentWatch | None = None

    @property
    def is_distributed(self) -> bool:
        """True: Lightning asks strategies it does not know (else it ignores ``sync_dist``)."""
        return True

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    def rank_samples(self) -> int:
        """Return this rank's samples of the training batch at hand; those that pass through it, in a pipeline."""
        raise NotImplementedError

    def pipeline_index(self) -> int:
        """Return the index of this rank's pipeline; -1 where each rank computes its samples alone."""
        return -1

    # -- processes -----------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        # the last thing that Trainer.__init__ does with a strategy, before any process is started
        assert self.cluster_environment is not None
        arguments = lightning_adapter.trainer_arguments()
        launched = rank_count.launched_on_node(self.cluster_environment)
        is_auto = rank_count.number_of_devices(arguments.get("devices")) is None
        if launched is not None and is_auto and isinstance(self.accelerator, CPUAccelerator):
            # nodes may have different numbers of ranks, and "auto" is one on CPU
            self.parallel_devices = [torch.device("cpu")] * launched
        self._check_trainer(arguments)
        self._launcher_watch = watch_launcher()
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = lightning_adapter.SubprocessLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def _check_trainer(self, arguments: dict[str, Any]) -> None:
        unfit = self._rank_problems(arguments)
        unsupported = [
            *self._precision_problems(arguments),
            *self._layer_problems(arguments),
            *self._option_problems(arguments),
        ]
        kind = ClusterError if unfit else UnsupportedError
        raise_all(kind, f"the Trainer does not fit {type(self).__name__}", [*unsupported, *unfit])

    def _layer_problems(self, arguments: dict[str, Any]) -> list[str]:
        if not (arguments.get("sync_batchnorm") and isinstance(self.accelerator, CPUAccelerator)):
            return []
        return ["sync_batchnorm=True: torch has SyncBatchNorm for GPUs only; leave it out on CPU, or use GroupNorm"]

    def _option_problems(self, arguments: dict[str, Any]) -> list[str]:
        """Return what the strategy's own options ask of these ranks in vain."""
        return []

    def _rank_problems(self, arguments: dict[str, Any]) -> list[str]:
        devices, environment = arguments.get("devices"), self.cluster_environment
        problems = []
        if environment is not None and environment.creates_processes_externally:
            problems += rank_count.node_problems(self.local_rank, self.num_processes, devices)
        if self.cluster is not None:
            problems += rank_count.cluster_problems(
                self.cluster, devices, self.num_nodes, self.world_size, self.accelerator
            )
        return problems

    def _precision_name(self, arguments: dict[str, Any]) -> str:
        """Return the precision that was asked for in its long form; a plugin may be given without the argument."""
        asked = arguments.get("precision") or getattr(self.precision_plugin, "precision", None)
        return str(_PRECISION_NAMES.get(asked, asked))

    def _precision_problems(self, arguments: dict[str, Any]) -> list[str]:
        # the argument first: on CPU Lightning makes a bf16 plugin of 16-mixed; a plugin may be given without one
        asked = [arguments.get("precision"), getattr(self.precision_plugin, "precision", None)]
        names = (*_PRECISIONS, _FP16) if isinstance(self.accelerator, CUDAAccelerator) else _PRECISIONS
        bad = [precision for precision in asked if _PRECISION_NAMES.get(precision, precision) not in names]
        if not bad:
            return []
        return [
            f"precision={bad[0]!r} is not supported: fp16 needs a loss scaler, which there is for 16-mixed on CUDA "
            "devices alone, and Lightning turns 16-mixed on CPU into bf16-mixed without asking. Use one of "
            + ", ".join(names)
        ]

    def set_world_ranks(self) -> None:
        """Tell the cluster environment who this process is (torchrun's and SLURM's know better and ignore it)."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def backend_for(self, device: torch.device) -> str:
        """Return the backend of the process group where the user asks for none."""
        return "nccl" if device.type == "cuda" else "gloo"

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build modules on the host, or on meta where asked: not whole on each device, which holds a part of them.

        Args:
            empty_init: whether to build on meta, without memory and values.
        """
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    def setup_environment(self) -> None:
        """Start the process group and the watch over the other ranks."""
        super().setup_environment()
        assert self.cluster_environment is not None
        reset_seed()
        self.set_world_ranks()
        self._share_cores()
        backend = self._backend or self.backend_for(self.root_device)
        device_id = self.root_device if self.root_device.type != "cpu" else None
        lightning_adapter.init_process_group(
            self.cluster_environment, backend, timeout=self._timeout, device_id=device_id
        )
        self._watch = FailureWatch(
            torch_adapter.default_store(), self.global_rank, self.world_size, where=lambda: f"in {self._where()}"
        )
        self._watch.start()
        if self._launcher_watch is not None:
            self._launcher_watch.stop()  # the ranks watch each other from here on
        assert self.lightning_module is not None
        lightning_adapter.keep_users_samplers(self.lightning_module.trainer)
        if self.cluster is not None and self.cluster.world_size != self.world_size:
            raise ClusterError(
                f"cluster {self.cluster.name!r} has {self.cluster.world_size} devices, but {self.world_size} ranks "
                "were started: one rank per device; change the cluster file or the launcher's number of processes"
            )
        self.environment_is_there()

    def environment_is_there(self) -> None:
        """Hear that the process group is up."""

    def adopt(self, other: HeteroStrategy) -> None:
        """Take over the processes that ``other`` has started, its devices and its module, before any set-up."""
        for name in _ADOPTED:
            setattr(self, name, getattr(other, name))
        other._watch = None
        self.environment_is_there()

    def _share_cores(self) -> None:
        """Give each rank its part of the node's cores.

        Lightning does so in the process that launches the others only; they would all take every core, and fight.
        """
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_processes))
        if local > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))

    def teardown(self) -> None:
        """Release what the run held; the module keeps its shards, as with Lightning's ModelParallelStrategy."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Bring all ranks down with the first failing rank's message.

        Raises:
            RankFailedError: when this rank failed only because another did.
        """
        if self._watch is None:
            return
        first = self._watch.first_failure()
        if first is None and not isinstance(exception, HeteroError) and _is_lost_connection(exception):
            # the rank that closed the connection may still be writing why, or was killed
            first = self._watch.wait_for_cause()
        own = first is None or first.startswith(f"rank {self.global_rank} ")
        if own:
            self._watch.publish(exception, f"in {self._where()}")
        if dist.is_initialized() and self.world_size > 1:
            if self.global_rank == 0:
                # the store ends with rank 0: let the others read
                self._watch.wait_until_seen(self.world_size)
            torch_adapter.abort_process_group()
        if first is not None and not own and not isinstance(exception, HeteroError):
            self._watch.stop()  # Lightning does not tear down after an error here
            raise RankFailedError(first) from exception

    def _where(self) -> str:
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is None or trainer.state.stage is None:
            return "set-up"
        return f"{trainer.state.stage.value}, step {trainer.global_step}"

    # -- collectives ---------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if not dist.is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return ``src``'s object on every rank."""
        if not dist.is_initialized() or self.world_size == 1:
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank."""
        if not dist.is_initialized() or self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def gather_numbers(self, number: int) -> tuple[int, ...]:
        """Return every rank's whole number, in rank order, on every rank."""
        own = torch.tensor([number], dtype=torch.int64, device=self.root_device)
        if not dist.is_initialized() or self.world_size == 1:
            return (number,)
        numbers = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(numbers, own)
        return tuple(int(value) for value in torch.cat(numbers).tolist())

    def gather_vector(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, as many from each, in rank order, on every rank; in 64-bit where there is."""
        if not dist.is_initialized() or self.world_size == 1:
            return [list(values)]
        dtype = torch.float64 if self.root_device.type != "mps" else torch.float32
        own = torch.tensor(list(values), dtype=dtype, device=self.root_device)
        vectors = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(vectors, own)
        numbers: list[list[float]] = torch.stack(vectors).tolist()
        return numbers

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of a vector over all ranks; in 64-bit where the device has it."""
        total = values.detach().to(torch.float64 if self.root_device.type != "mps" else torch.float32).clone()
        if dist.is_initialized() and self.world_size > 1:
            total = total.to(self.root_device)  # what is logged may be on the host, where NCCL takes nothing
            dist.all_reduce(total)
        return total.to(values.device, values.dtype)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return every rank's tensor, stacked in a new first dimension.

        Raises:
            UnsupportedError: where shapes differ, as they do when ranks' batches do; torch would hang or mix them up.
        """
        everyone = group is None or group is dist.group.WORLD
        shapes = self.gather_objects(list(tensor.shape)) if everyone else []
        if any(shape != shapes[0] for shape in shapes):
            raise UnsupportedError(
                f"all_gather of tensors of different shapes, by rank {', '.join(map(str, shapes))}: "
                "ranks have batches of different sizes. Pad them to one size, use a torchmetrics object, or "
                "self.trainer.strategy.gather_objects(tensor.cpu()), a list by rank"
            )
        if sync_grads or not everyone or self.world_size == 1:
            return super().all_gather(tensor, group, sync_grads)
        # torch 2.14 deprecates what Lightning calls
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor.detach().contiguous())
        return torch.stack(gathered)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over ranks, each rank counting once; what ``self.log`` logs is weighted elsewhere."""
        if isinstance(tensor, Tensor):
            there = tensor.to(self.root_device)  # NCCL takes nothing that is on the host
            return lightning_adapter.reduce_over_ranks(there, group, reduce_op=reduce_op).to(tensor.device)
        return tensor

    def model_to_device(self) -> None:
        """Move what is not sharded to this rank's device."""
        assert self.model is not None
        self.model.to(self.root_device)


def _is_lost_connection(exception: BaseException) -> bool:
    text = str(exception).lower()
    return isinstance(exception, RuntimeError) and any(
        word in text for word in ("connection", "gloo", "nccl", "socket", "timed out", "peer")
    )
