"""Faults drawn by a seed, in jobs from the command line; the benchmark of the same name runs hundreds."""

from benchmarks import chaos


def test_a_job_with_random_faults_ends_as_if_nothing_had_happened() -> None:
    jobs = chaos.main(["--quick"])
    assert [problem for job in jobs for problem in job.problems] == []
    assert sum(job.fired.total() for job in jobs) >= chaos.SHORT.num_faults
    assert sum(len(job.missed) for job in jobs) <= 2
