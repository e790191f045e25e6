"""What several hosts decide alike from what each of them said: devices, divisions, addresses, differences."""

from collections.abc import Sequence

import pytest

from uneven.cli.launch import parse_endpoint
from uneven.errors import ConfigError
from uneven.launch.agreement import code_fingerprint, differences
from uneven.launch.peers import Peers
from uneven.launch.site import Host, Site, address_of, reachable


def site(*num_devices: int | None, index: int = 0, names: Sequence[str] | None = None, is_rank: bool = False) -> Site:
    names = names or [f"node{i}" for i in range(len(num_devices))]
    hosts = tuple(Host(name, f"10.0.0.{i}", n) for i, (name, n) in enumerate(zip(names, num_devices, strict=True)))
    return Site(Peers(names, index=index, kind="rank" if is_rank else "host", lines={}), hosts, is_rank)


@pytest.mark.parametrize(
    ("wanted", "num_devices", "counts"),
    [
        ((None,), 3, (3,)),
        ((None, None), 3, (2, 1)),
        ((None, None, None), 7, (3, 2, 2)),
        ((2, 1), 3, (2, 1)),
        ((1, 2), 3, (1, 2)),
        ((4, None, None), 9, (4, 3, 2)),
        ((None, 1), 8, (7, 1)),
    ],
)
def test_devices_are_dealt_to_hosts_in_order(wanted, num_devices, counts) -> None:
    assert site(*wanted).deal(num_devices) == counts
    devices = [10 + n for n in range(num_devices)]
    dealt = [device for index in range(len(wanted)) for device in site(*wanted, index=index).devices_here(devices)]
    assert dealt == devices


@pytest.mark.parametrize(("wanted", "num_devices"), [((2, 2), 3), ((2, None), 2), ((None, None, None), 2), ((4,), 3)])
def test_a_plan_that_does_not_fit_the_hosts_is_refused(wanted, num_devices) -> None:
    with pytest.raises(ConfigError, match=rf"the plan has {num_devices} devices, but --nproc-per-node is: ") as caught:
        site(*wanted).deal(num_devices)
    if len(wanted) == 2:
        assert f"host 0 (node0) 2, host 1 (node1) {wanted[1] or 'none given'}" in str(caught.value)


def test_a_plan_for_other_processes_than_were_started_is_refused() -> None:
    with pytest.raises(ConfigError, match="the plan has 3 devices, but 2 processes were started, one for each device"):
        site(1, 1, is_rank=True).deal(3)


def test_without_a_division_each_host_is_a_replica() -> None:
    assert site(None).default_degrees() is None
    assert site(4).default_degrees() == (4,)
    assert site(2, None, 3).default_degrees() == (2, 1, 3)
    assert site(1, 1, 1, names=["a", "a", "b"], is_rank=True).default_degrees() == (2, 1)
    assert site(1, 1, 1, names=["a", "a", "a"], is_rank=True).default_degrees() == (3,)


def test_ranks_dealt_to_hosts_in_turn_are_one_replica() -> None:
    assert site(1, 1, 1, 1, names=["a", "b", "a", "b"], is_rank=True).default_degrees() == (4,)


def test_cores_are_shared_by_the_ranks_of_a_host() -> None:
    names = ["a", "a", "b"]
    assert [site(1, 1, 1, names=names, is_rank=True, index=i).num_neighbours for i in range(3)] == [2, 2, 1]
    assert site(2, 1).num_neighbours == 1


def test_an_address_of_the_loopback_is_that_of_the_first_host() -> None:
    hosts = [Host("a", "10.0.0.1"), Host("a", "127.0.1.1"), Host("b", "10.0.0.2"), Host("a", "::1")]
    assert [host.address for host in reachable(hosts)] == ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.1"]
    alone = [Host("a", "127.0.0.1"), Host("a", "127.0.0.1")]
    assert reachable(alone) == alone


def test_an_interface_stands_for_its_address() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert address_of("10.1.2.3") == "10.1.2.3"
    assert address_of("node7.cluster") == "node7.cluster"


def test_what_differs_is_told_with_both_values_and_whose_they_are() -> None:
    found = [{"train.lr": "0.1", "corpus": "a"}, {"train.lr": "0.1", "corpus": "a"}, {"train.lr": "0.2", "corpus": "a"}]
    names = ["host 0 (x)", "host 1 (y)", "host 2 (z)"]
    assert differences(found, names=names) == ["train.lr: 0.1 on host 0 (x), 0.2 on host 2 (z)"]
    assert differences([{}, {"new": "1"}], names=names[:2]) == ["new: nothing on host 0 (x), 1 on host 1 (y)"]
    assert differences(found[:2], names=names[:2]) == []


def test_the_code_has_versions_and_a_digest() -> None:
    found = code_fingerprint()
    assert list(found) == [*(f"version of {x}" for x in ("uneven", "torch", "transformers")), "source code of uneven"]
    assert found == code_fingerprint()


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("node01:29500", ("node01", 29500)),
        ("10.0.0.1", ("10.0.0.1", 29400)),
        ("[fd00::1]:80", ("fd00::1", 80)),
        ("[fd00::1]", ("fd00::1", 29400)),
    ],
)
def test_endpoints(text: str, endpoint: tuple[str, int]) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize("text", ["", ":80", "a:0", "a:65536", "a:b"])
def test_endpoints_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a host and a port"):
        parse_endpoint(text)
