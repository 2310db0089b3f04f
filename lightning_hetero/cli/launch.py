"""Where this process stands among the ranks that a launcher started."""

from __future__ import annotations

import os

from lightning_hetero.doctor.place import Place
from lightning_hetero.errors import HeteroError, raise_all

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")


def launched() -> Place | None:
    """The place that torchrun, or SLURM's ``srun``, gave this process; ``None`` for a process alone.

    Variables set by hand (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) are as good as torchrun's.

    Raises:
        HeteroError: variables are missing, are no numbers, or contradict each other.
    """
    if "WORLD_SIZE" in os.environ:
        return _from_torchrun()
    if os.environ.get("SLURM_NTASKS", "1") != "1":
        return _from_slurm()
    return None


def _from_torchrun() -> Place | None:
    numbers, problems = {}, []
    for name in _TORCHRUN:
        text = os.environ.get(name)
        if text is not None and text.isdigit():
            numbers[name] = int(text)
        elif name != "WORLD_SIZE" and os.environ["WORLD_SIZE"] == "1":
            numbers[name] = 0
        else:
            problems.append(f"{name} is {'not set' if text is None else repr(text)}: set it to a whole number")
    host = os.environ.get("MASTER_ADDR", "")
    if not problems and numbers["WORLD_SIZE"] > 1 and not host:
        problems.append("MASTER_ADDR is not set: set it to the name or address of rank 0's node")
    if not problems and numbers["RANK"] >= max(1, numbers["WORLD_SIZE"]):
        problems.append(f"RANK is {numbers['RANK']}: with WORLD_SIZE={numbers['WORLD_SIZE']} ranks are counted from 0")
    raise_all(HeteroError, "the environment does not say which rank this is", problems)
    if numbers["WORLD_SIZE"] < 2:
        return None
    return Place(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        host=host,
        port=numbers["MASTER_PORT"],
        # torchrun's agent keeps the store of rank 0's address open
        hosted=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
    )


def _from_slurm() -> Place | None:
    # as the Trainer will read it: what it refuses, training would stumble over
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    if not SLURMEnvironment.detect():
        return None
    before = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    try:
        slurm = SLURMEnvironment(auto_requeue=False)
        return Place(slurm.global_rank(), slurm.world_size(), slurm.local_rank(), slurm.main_address, slurm.main_port)
    except (RuntimeError, KeyError, ValueError) as error:
        raise HeteroError(
            f"SLURM's variables do not say which rank this is ({error}): start with srun and --ntasks-per-node, one "
            "task per device; where nodes have different numbers of devices, start torchrun on each node by srun: "
            "docs/launching.md has a script"
        ) from error
    finally:  # asking for the address has set them
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
