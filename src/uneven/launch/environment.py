"""What torchrun and Slurm tell a process by its environment. The only place where the environment is read."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from uneven.errors import ConfigError

FIRST_SLURM_PORT, NUM_SLURM_PORTS, SLURM_PORTS_APART = 15000, 900, 16
"""Below the ports that systems give to outgoing connections; jobs that follow each other lie apart."""


@dataclass(frozen=True, slots=True)
class StaticJob:
    """A process that somebody else started as one rank of a job: `rank` of `world_size`, `local_rank` on its host.

    Rank 0 is reached at `host` and `port`; with `has_store`, torchrun's agent serves a store there.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    job_id: str
    has_store: bool = False


def static_job(environment: Mapping[str, str] | None = None) -> StaticJob | None:
    """What the environment (by default this process's) says; None for a process that is a job by itself."""
    found = os.environ if environment is None else environment
    if {"RANK", "WORLD_SIZE"} <= found.keys():
        job = _from_torchrun(found)
    elif {"SLURM_PROCID", "SLURM_NTASKS"} <= found.keys() and any(map(is_of_a_step, found)):
        job = _from_slurm(found)
    else:
        return None
    if not 0 <= job.rank < job.world_size:
        raise ConfigError(f"the environment says rank {job.rank} of {job.world_size}; ranks count from 0")
    return job if job.world_size > 1 else None


def is_of_a_step(name: str) -> bool:
    """Whether only srun sets this variable: a batch script has most others too, and is one process."""
    return name.startswith(("SLURM_STEP", "SLURM_SRUN_COMM"))


def _from_torchrun(found: Mapping[str, str]) -> StaticJob:
    is_alone = _number(found, "WORLD_SIZE") == 1
    return StaticJob(
        rank=_number(found, "RANK"),
        world_size=_number(found, "WORLD_SIZE"),
        local_rank=_number(found, "LOCAL_RANK", default=0),
        host="" if is_alone else _text(found, "MASTER_ADDR"),
        port=0 if is_alone else _number(found, "MASTER_PORT"),
        job_id=f"{found.get('TORCHELASTIC_RUN_ID', '')}.{found.get('TORCHELASTIC_RESTART_COUNT', 0)}",
        has_store=found.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_slurm(found: Mapping[str, str]) -> StaticJob:
    nodes = next((found[name] for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST") if found.get(name)), "")
    job = _number(found, "SLURM_JOB_ID", default=0)
    port = FIRST_SLURM_PORT + SLURM_PORTS_APART * (job % NUM_SLURM_PORTS)
    return StaticJob(
        rank=_number(found, "SLURM_PROCID"),
        world_size=_number(found, "SLURM_STEP_NUM_TASKS", default=_number(found, "SLURM_NTASKS")),
        local_rank=_number(found, "SLURM_LOCALID", default=0),
        host=found.get("MASTER_ADDR") or first_host(nodes),
        port=_number(found, "MASTER_PORT", default=port),
        job_id=f"{job}.{found.get('SLURM_STEP_ID', '')}",
    )


def first_host(nodes: str) -> str:
    """The first of Slurm's list: node01 of "node[01-03,07],login"."""
    first = re.match(r"(?:[^,\[\]]|\[\d[^\[\]]*\])+", nodes)
    if first is None:
        raise ConfigError(f"SLURM_NODELIST: expected names as in node[01-03,07], found {nodes!r}")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group())


def _text(found: Mapping[str, str], name: str) -> str:
    if not found.get(name):
        raise ConfigError(f"the environment has RANK and WORLD_SIZE, as from torchrun, but no {name}")
    return found[name]


def _number(found: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    if default is not None and not found.get(name):
        return default
    text = _text(found, name)
    if not text.isdecimal():
        raise ConfigError(f"the environment's {name}: expected a whole number, found {text!r}")
    return int(text)
