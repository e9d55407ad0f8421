"""Cluster profiles: what is shipped loads, what is written reads back, mistakes name their key and file."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from hetsync.emulation.cluster import (
    Cluster,
    DeviceGroup,
    Link,
    LognormalJitter,
    PairLink,
    QuantileJitter,
    QuantileModel,
    Slowdown,
    TraceJitter,
    load_cluster,
    save_cluster,
    shipped_clusters,
)
from hetsync.errors import UserError

SHIPPED = {
    "alibaba-jitter", "heavy-jitter", "homogeneous", "quickstart", "slow-link", "t4-v100-a100",
    "v100-p100-k80",
}  # fmt: skip
SMALL = {"name": "x", "source": "s", "devices": [{"name": "d", "count": 2}]}


def write(folder, content):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_all_profiles_are_shipped():
    assert set(shipped_clusters()) >= SHIPPED


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_shipped_profile_has_its_name_a_source_and_eight_devices(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert len(cluster.source) > 10
    assert cluster.size == 8


@pytest.mark.parametrize("name", ["v100-p100-k80", "t4-v100-a100"])
def test_measured_speeds_are_the_ratios_of_the_measured_rates(name):
    devices = load_cluster(name).devices
    slowest = min(d.samples_per_second["resnet50"] for d in devices)
    for device in devices:
        assert device.speed == pytest.approx(device.samples_per_second["resnet50"] / slowest, rel=0.01)
        assert device.memory_bytes == device.memory_gib * 2**30


def test_ranks_get_devices_in_listed_order():
    cluster = load_cluster("quickstart")
    assert [cluster.device_of(rank).speed for rank in range(8)] == [4, 4, 2, 2, 1, 1, 1, 1]
    with pytest.raises(UserError, match="quickstart has 8 devices, none for rank 8: start at most 8 ranks"):
        cluster.device_of(8)


@pytest.mark.parametrize(
    "jitter",
    [
        None,
        LognormalJitter(0.25),
        TraceJitter("/data/trace.csv", batch_time_column="batch_time_norm", hold=3),
        QuantileJitter((QuantileModel((0.0, 0.5, 1.0), (0.9, 1.0, 1.2), 0.5),), hold=4),
    ],
)
def test_what_is_saved_reads_back(tmp_path, jitter):
    cluster = Cluster(
        name="mine",
        source="measured, ± of five runs",
        devices=(DeviceGroup("a", 2, 1.5, 16.0, {"cnn": 1e-5}), DeviceGroup("b")),
        link=Link(1e-5, 1e9),
        jitter=jitter,
        events=(Slowdown(1, 3.0, 1000, 2000),),
    )
    path = tmp_path / "mine.yaml"
    save_cluster(cluster, path)
    assert load_cluster(str(path)) == cluster
    assert [p.name for p in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_failed_save_leaves_the_old_profile(tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text("old")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*mine\.yaml: No space left"):
        save_cluster(load_cluster("quickstart"), path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("mine.yaml", "old")]


def test_a_trace_lies_beside_its_profile(tmp_path):
    jitter = {"distribution": "trace", "path": "trace.csv"}
    cluster = load_cluster(write(tmp_path, SMALL | {"jitter": jitter}))
    assert cluster.jitter == TraceJitter(str(tmp_path / "trace.csv"))


def test_numbers_without_a_point_are_numbers(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("{name: x, source: s, devices: [{name: d}], link: {bytes_per_second: 1e9}}")
    assert load_cluster(str(path)).link == Link(bytes_per_second=1e9)


def test_a_link_costs_latency_and_bytes_or_a_fraction_of_compute():
    assert Link(0.5, 100.0).seconds(50, ranks=2, slice_seconds=9.0) == 1.0
    assert Link(0.5, 100.0).seconds(50, ranks=4, slice_seconds=9.0) == 1.25
    assert Link(0.5, 100.0).seconds(50, ranks=1, slice_seconds=9.0) == 0.0
    assert Link().seconds(10**9, ranks=2, slice_seconds=9.0) == 0.0
    assert Link(compute_fraction=0.5).seconds(10**9, ranks=2, slice_seconds=9.0) == 4.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speed": 1}, "mine.yaml: there is no key speed; remove it, or use name, source, devices"),
        ({"devices": [{"name": "d", "count": 10**12}]}, "count is 1000000000000: it must be at least 1 and at most"),
        ({"devices": [{"name": "d", "memory_gib": 1e300}]}, "memory_gib is 1e+300: it must be above 0 and below"),
        ({"devices": [{"name": "d", "speed": 1e-300}]}, "devices[0].speed is 1e-300: it must be above 0, from 1e-06"),
        ({"jitter": {"distribution": [1]}}, "jitter.distribution is [1]: it must be lognormal, trace"),
        ({"devices": "x" * 10**6}, "(1,000,000 characters): it must be a list"),
        ({"name": 3}, "mine.yaml: name is 3: it must be text"),
        ({"devices": []}, "mine.yaml: devices is []: it must be at least one"),
        ({"devices": "two"}, "mine.yaml: devices is two: it must be a list"),
        ({"devices": [{"count": 1}]}, "mine.yaml: devices[0].name is missing"),
        ({"devices": [{"name": "d", "speed": "fast"}]}, "devices[0].speed is fast: it must be a number"),
        ({"devices": [{"name": "d", "speed": float("nan")}]}, "speed is nan: it must be a number"),
        ({"devices": [{"name": "d", "count": True}]}, "devices[0].count is True: it must be a whole number"),
        ({"devices": [{"name": "d", "count": 0}]}, "devices[0].count is 0: it must be at least 1"),
        ({"devices": [{"name": "d", "speed": -1}]}, "devices[0].speed is -1.0: it must be above 0"),
        ({"devices": [{"name": "d", "samples_per_second": {"m": 0}}]}, "[0].samples_per_second.m is 0.0"),
        ({"devices": [{"name": "d", "samples_per_second": 5}]}, "second is 5: it must be a mapping"),
        ({"link": {"compute_fraction": 0.5, "latency_seconds": 1}}, "compute_fraction is 0.5: it must be"),
        ({"jitter": {"sigma": 0.5}}, "jitter.distribution is null: it must be lognormal, trace or quantiles"),
        ({"jitter": {"distribution": "lognormal", "sigma": -1}}, "jitter.sigma is -1.0: it must be"),
        ({"jitter": {"distribution": "quantiles", "models": [{"probabilities": [0, 1], "factors": [2, 1]}]}},
         "jitter.models[0].factors is [2.0, 1.0]: it must be ascending"),
        ({"events": [{"rank": 0, "factor": 2, "after_samples": 9, "until_samples": 9}]}, "above after_"),
        ({"step_seconds": -0.01}, "mine.yaml: step_seconds is -0.01: it must be at least 0"),
    ],
)  # fmt: skip
def test_mistakes_name_the_file_and_the_key(tmp_path, change, words):
    with pytest.raises(UserError) as error:
        load_cluster(write(tmp_path, SMALL | change))
    assert words in str(error.value)
    assert "mine.yaml" in str(error.value)


def test_a_key_that_is_spelled_wrongly_comes_before_what_is_missing(tmp_path):
    """Without a source, and with a device whose count is not read."""
    with pytest.raises(UserError, match=r"there is no key devices\[0\]\.cuont \(did you mean count\?\)"):
        load_cluster(write(tmp_path, {"name": "x", "devices": [{"cuont": 3}]}))


def test_missing_files_and_names_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no cluster profile quickstrat: give the path .* quickstart"):
        load_cluster("quickstrat")
    with pytest.raises(UserError, match=r"cannot read cluster profile .*absent.yaml"):
        load_cluster(str(tmp_path / "absent.yaml"))
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(UserError, match=r"cannot read cluster profile .*bad.yaml"):
        load_cluster(str(tmp_path / "bad.yaml"))
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(UserError, match=r"list.yaml: it holds \[1\] instead of keys"):
        load_cluster(str(tmp_path / "list.yaml"))


WITHIN = {"between": ["d", "d"]}


@pytest.mark.parametrize(
    ("links", "others", "words"),
    [
        ([{"between": ["d"]}], {}, "links[0].between is ['d']: it must be two names of device groups or hosts"),
        ([{"between": ["d", "f"]}], {}, "[0].between has f, which is neither a device group nor a host: use d"),
        ([WITHIN, WITHIN], {}, "links[1].between is ['d', 'd']: it must be there once"),
        ([WITHIN | {"bytes_per_second": 0}], {}, "links[0].bytes_per_second is 0.0: it must be above 0"),
        ([WITHIN], {"link": {"compute_fraction": 0.5}}, "link.compute_fraction is 0.5: it must be left out"),
        ([WITHIN], {"devices": [{"name": "d", "host": "d"}]}, "has d, which is a device group and a host"),
    ],
)
def test_mistakes_in_links_by_pair(tmp_path, links, others, words):
    with pytest.raises(UserError) as error:
        load_cluster(write(tmp_path, SMALL | others | {"links": links}))
    assert words in str(error.value)


TWO_HOSTS = Cluster(
    "two hosts",
    "made up",
    (DeviceGroup("a", 2, host="one"), DeviceGroup("b", 1, host="one"), DeviceGroup("c", 2, host="two")),
    Link(1e-3, 1e6),
    links=(
        PairLink(("a", "c"), 0.1, 50.0),
        PairLink(("one", "two"), 0.2, 100.0),
        PairLink(("one", "one"), 0.0, None),
    ),
)


@pytest.mark.parametrize(
    ("pair", "link"),
    [
        ((0, 3), Link(0.1, 50.0)),  # the first that lies between
        ((3, 0), Link(0.1, 50.0)),
        ((2, 4), Link(0.2, 100.0)),
        ((0, 1), Link()),
        ((1, 2), Link()),
        ((3, 4), Link(1e-3, 1e6)),  # the rest
    ],
)
def test_links_by_pair(pair, link):
    assert TWO_HOSTS.link_between(*pair) == link


def test_an_allreduce_takes_the_slowest_link_of_its_ring():
    assert TWO_HOSTS.ring_link(range(5)) == Link(0.2, 50.0)
    assert replace(TWO_HOSTS, link=Link(0.3, 40.0)).ring_link(range(5)) == Link(0.3, 40.0)
    assert TWO_HOSTS.ring_link([0, 1, 2]) == Link()
    assert TWO_HOSTS.ring_link([3]) == Link(1e-3, 1e6)
    assert replace(TWO_HOSTS, links=()).ring_link(range(5)) == Link(1e-3, 1e6)
    assert load_cluster("quickstart").ring_link(range(8)) == Link()


def test_links_by_pair_read_back(tmp_path):
    save_cluster(TWO_HOSTS, tmp_path / "two.yaml")
    assert load_cluster(str(tmp_path / "two.yaml")) == TWO_HOSTS
