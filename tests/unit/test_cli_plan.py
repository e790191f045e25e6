"""`uneven plan show`: its numbers, its text, its picture and its errors."""

import json

import pytest
from typer.testing import CliRunner

from tests.layouts import special_plan
from tests.models import PICTURED
from uneven.cli.plan import numbers_of, plan_app
from uneven.errors import PlanError
from uneven.layout import ParallelPlan, read_plan
from uneven.modelspec import parse_model

STRUCTURE = parse_model(PICTURED).structure


def run(*arguments):
    return CliRunner().invoke(plan_app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(ParallelPlan.from_shares(STRUCTURE, [[1, 1], [1]]).dumps())
    return path


def test_show_prints_shares_and_draws_beside_the_plan(file):
    result = run("show", file)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert lines[0] == "llama, 1,563,360 parameters, 2 replicas, 3 devices"
    assert "replica 0: 2 devices, batch share 2 of 3" in lines
    assert "1 5 of 10 3 of 5 224 of 448 160 of 320 795,360 50.9% 2" in lines
    assert "replica 1: 1 device, batch share 1 of 3" in lines
    assert "2 10 of 10 5 of 5 448 of 448 320 of 320 1,563,360 100.0% 3" in lines
    picture = file.with_name("plan.png")
    assert result.output.replace("\n", "").endswith(f"picture: {picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_show_draws_where_it_is_told(file, tmp_path):
    assert run("show", file, "--out", tmp_path / "elsewhere.svg").exit_code == 0
    assert (tmp_path / "elsewhere.svg").read_text().startswith("<?xml")
    assert not file.with_name("plan.png").exists()


def test_layers_that_differ_are_shown_as_a_range(file):
    file.write_text(special_plan(STRUCTURE, "another in each layer").dumps())
    output = run("show", file, "--out", file.with_suffix(".svg")).output
    assert "3-5 of 10" in output
    assert "112-224 of 448" in output


def test_json_is_all_of_the_output_and_draws_only_when_asked(file, tmp_path):
    result = run("show", file, "--json")
    assert json.loads(result.stdout) == numbers_of(read_plan(file))
    assert not file.with_name("plan.png").exists()
    result = run("show", file, "--json", "--out", tmp_path / "p.svg")
    assert json.loads(result.stdout)["num_devices"] == 3
    assert result.stderr == f"picture: {tmp_path / 'p.svg'}\n"


def test_numbers_of_a_device(file):
    numbers = numbers_of(read_plan(file))
    assert {key: numbers[key] for key in numbers if key != "replicas"} == {
        "family": "llama",
        "num_parameters": 1_563_360,
        "num_replicas": 2,
        "num_devices": 3,
        "total_batch_shares": 3,
    }
    assert [replica["batch_share"] for replica in numbers["replicas"]] == [2, 1]
    assert numbers["replicas"][0]["devices"][1] == {
        "device": 1,
        "vocab": {"least": 160, "most": 160, "total": 320},
        "heads": {"least": 5, "most": 5, "total": 10},
        "kv_heads": {"least": 3, "most": 3, "total": 5},
        "mlp": {"least": 224, "most": 224, "total": 448},
        "num_parameters": 795_360,
        "fraction_of_model": 795_360 / 1_563_360,
        "num_gradient_groups": 2,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b"[]", "expected format 'uneven.plan/1', found 'list'"),
        (b'{"format": "uneven.plan/0"}', "expected format 'uneven.plan/1', found 'uneven.plan/0'"),
        (b'{"format": "uneven.plan/1"}', "malformed plan"),
    ],
)
def test_file_that_is_no_plan_is_refused_with_its_name(content, message, tmp_path):
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError, match=message) as caught:
        run("show", path)
    assert "some.json" in str(caught.value)


def test_folder_is_no_plan(tmp_path):
    with pytest.raises(PlanError, match="Is a directory"):
        run("show", tmp_path)
