"""How files and flags become one configuration."""

from pathlib import Path

from uneven.config import load_config


def test_flags_of_the_division_replace_the_files_division_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[parallel]\nshares = [[2, 1], [1]]\nbatch_shares = [2, 1]\nexperts = "whole"\n')
    given = load_config(file, flags={"parallel.replicas": [3, 1]}).parallel
    assert (given.replicas, given.shares, given.batch_shares, given.experts) == ((3, 1), None, None, "whole")
    kept = load_config(file).parallel
    assert kept.shares == ((2.0, 1.0), (1.0,))
