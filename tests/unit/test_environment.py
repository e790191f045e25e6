"""What torchrun and Slurm say by environment variables, and what a shell or batch script leaves there by chance."""

import pytest

from uneven.errors import ConfigError
from uneven.launch.environment import StaticJob, first_host, static_job

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "7",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "night",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODELIST": "gpu[01-09]",
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node01", "node01"),
        ("node[01-03,07]", "node01"),
        ("node[07,01-03]", "node07"),
        ("a1,b[2-3]", "a1"),
        ("b[2-3],a1", "b2"),
        ("gpu[0010-0012]-ib,login", "gpu0010-ib"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("node-3.cluster", "node-3.cluster"),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "[", ",a", "[]"])
def test_a_list_without_a_host_is_refused(nodes: str) -> None:
    with pytest.raises(ConfigError, match=r"expected names as in node\[01-03,07\], found"):
        first_host(nodes)


def test_torchruns_variables() -> None:
    assert static_job(TORCHRUN) == StaticJob(5, 7, 1, "node01", 29500, "night.0", has_store=True)


def test_variables_set_by_hand() -> None:
    found = {key: TORCHRUN[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert static_job(found) == StaticJob(5, 7, 0, "node01", 29500, ".0")


def test_slurms_variables() -> None:
    job = static_job(SLURM)
    assert job == StaticJob(2, 3, 0, "gpu07", 15000 + 16 * (4242 % 900), "4242.1")


def test_a_step_may_be_smaller_than_its_job_and_say_where_to_meet() -> None:
    job = static_job(SLURM | {"SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "3", "MASTER_ADDR": "a", "MASTER_PORT": "7"})
    assert job is not None
    assert (job.world_size, job.host, job.port) == (3, "a", 7)


def test_torchrun_within_slurm_is_torchrun() -> None:
    assert static_job(SLURM | TORCHRUN) == static_job(TORCHRUN)


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"RANK": "0"},
        {"WORLD_SIZE": "4", "MASTER_ADDR": "a"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {key: value for key, value in SLURM.items() if "STEP" not in key},  # a batch script, outside of srun
    ],
)
def test_a_process_that_is_a_job_by_itself(found: dict[str, str]) -> None:
    assert static_job(found) is None


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "no MASTER_ADDR"),
        (TORCHRUN | {"MASTER_PORT": ""}, "no MASTER_PORT"),
        (TORCHRUN | {"RANK": "x"}, "RANK: expected a whole number, found 'x'"),
        (TORCHRUN | {"RANK": "7"}, "rank 7 of 7"),
        (SLURM | {"SLURM_STEP_NODELIST": "", "SLURM_NODELIST": ""}, "SLURM_NODELIST"),
    ],
)
def test_what_contradicts_itself_is_refused(found: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        static_job(found)
