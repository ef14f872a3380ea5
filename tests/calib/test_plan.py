"""Plans: scored one weight at a time, searched, verified as a whole, and tied to their origin."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from random_sequences import random_data

from fixedstate.bundle import Bundle
from fixedstate.calib.collect import collect
from fixedstate.calib.data import Data
from fixedstate.calib.formats import format_named
from fixedstate.calib.measure import compare
from fixedstate.calib.plan import Plan, search_plan, uniform
from fixedstate.calib.score import Sensitivity, choices, score
from fixedstate.calib.sites import Site, find_sites, load_graphs
from fixedstate.calib.table import Policy, Table
from fixedstate.calib.trial import quantized_engine
from fixedstate.errors import CalibrationError
from fixedstate.runtime.decoder import open_engine

POLICY = Policy(masks=(1.0, 0.5), blocks=2)
FORMATS = ("int8", "int8-weights")


@pytest.fixture(scope="module")
def bundle(bundle_path: Callable[..., Path]) -> Bundle:
    return Bundle.open(bundle_path("F3"))


@pytest.fixture(scope="module")
def sites(bundle: Bundle) -> dict[str, Site]:
    return find_sites(load_graphs(bundle))


@pytest.fixture(scope="module")
def data(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return random_data(bundle, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def table(bundle: Bundle, data: Data) -> Table:
    return collect(bundle, data, POLICY)


@pytest.fixture(scope="module")
def scored(bundle: Bundle, table: Table, data: Data) -> Sensitivity:
    return score(bundle, table, data, FORMATS, records=3)


def measured(bundle: Bundle, data: Data, plan: Plan, split: str = "held-out") -> float:
    """Divergence of a whole plan."""
    graphs = load_graphs(bundle)
    records = data.split(split, bundle.spec.block_len, POLICY.blocks)[:3]
    with quantized_engine(
        bundle, graphs, find_sites(graphs), plan.chosen(), plan.scales, slots=3
    ) as engine:
        return compare(
            bundle,
            lambda slots: open_engine(bundle, threads=1, slots=slots, memory="fast"),
            lambda _: engine,
            records,
            POLICY,
            batch=3,
        ).kl


def test_every_format_of_every_weight_is_scored(
    scored: Sensitivity, sites: dict[str, Site]
) -> None:
    assert set(scored.kl) == set(choices(sites, FORMATS))
    for by_format in scored.kl.values():
        assert set(by_format) == set(FORMATS)
        assert all(0.0 < kl < 1e-2 for kl in by_format.values())
    options = scored.options(sites)
    name = next(iter(options))
    assert options[name]["float"].nbytes == 4 * sites[name].rows * sites[name].columns
    assert options[name]["int8"].nbytes < options[name]["float"].nbytes / 2


def test_scoring_goes_on_where_it_was_stopped(
    bundle: Bundle, table: Table, data: Data, scored: Sensitivity, tmp_path: Path
) -> None:
    file = tmp_path / "scored.json"
    some = dict(list(scored.kl.items())[:-1])
    Sensitivity(scored.table, scored.records, some).save(file)
    again = score(bundle, table, data, FORMATS, records=3, resume=Sensitivity.load(file), save=file)
    assert again.kl == scored.kl == Sensitivity.load(file).kl
    other = Sensitivity("0" * 64, scored.records, {})
    with pytest.raises(CalibrationError, match="another table or other sequences") as caught:
        score(bundle, table, data, FORMATS, records=3, resume=other)
    assert caught.value.code == "STALE"


def test_the_search_stays_within_its_bound_as_a_whole(
    bundle: Bundle, table: Table, data: Data, scored: Sensitivity, sites: dict[str, Site]
) -> None:
    everything = uniform(bundle, table, sites, dict.fromkeys(scored.kl, "int8"), ("ort-cpu",))
    whole = measured(bundle, data, everything)
    bound = 0.5 * whole
    plan = search_plan(
        bundle,
        table,
        sites,
        scored,
        ("ort-cpu",),
        lambda plan: measured(bundle, data, plan),
        max_kl=bound,
    )
    assert measured(bundle, data, plan) <= bound < whole
    assert sum(plan.nbytes(sites).values()) < sum(4 * s.rows * s.columns for s in sites.values())
    small = search_plan(
        bundle,
        table,
        sites,
        scored,
        ("ort-cpu",),
        lambda plan: pytest.fail("bytes need no measuring"),
        max_bytes=sum(one["int8"].nbytes for one in scored.options(sites).values()),
    )
    assert set(small.formats.values()) <= {"int8", "int8-weights"}
    assert set(small.formats) == set(scored.kl)


def test_a_whole_that_never_comes_within_is_refused_with_the_best(
    bundle: Bundle, table: Table, scored: Sensitivity, sites: dict[str, Site]
) -> None:
    with pytest.raises(CalibrationError, match="the nearest of 6 has 1 at ") as caught:
        search_plan(bundle, table, sites, scored, ("ort-cpu",), lambda plan: 1.0, max_kl=1e-3)
    assert caught.value.code == "INFEASIBLE"


def test_targets_are_asked_before_anything_is_measured(
    bundle: Bundle, table: Table, scored: Sensitivity, sites: dict[str, Site]
) -> None:
    with pytest.raises(CalibrationError, match="sm75 has no int8") as caught:
        search_plan(
            bundle,
            table,
            sites,
            scored,
            ("sm75",),
            lambda plan: pytest.fail("it was measured"),
            max_kl=1.0,
        )
    assert caught.value.code == "UNSUPPORTED_TARGET"


def test_plans_are_read_back_and_changes_found(
    bundle: Bundle, table: Table, sites: dict[str, Site], tmp_path: Path
) -> None:
    plan = uniform(bundle, table, sites, dict.fromkeys(sites, "int8"), ("ort-cpu", "sm86"))
    file = tmp_path / "plan.json"
    plan.save(file)
    assert Plan.load(file) == plan
    assert Plan.load(file).sha256 == plan.sha256
    plan.check(bundle)
    with pytest.raises(CalibrationError, match="plan again") as caught:
        plan.check(replace(bundle, weights="0" * 64))
    assert caught.value.code == "STALE"
    content = json.loads(file.read_text())
    for change in ({"rule": "max"}, {"scales": {}}, {"more": 1}):
        file.write_text(json.dumps(content | change))
        with pytest.raises(CalibrationError) as caught:
            Plan.load(file)
        assert caught.value.code == "DAMAGED"


def test_one_activation_has_one_format(
    bundle: Bundle, table: Table, sites: dict[str, Site]
) -> None:
    shared = [name for name, site in sites.items() if site.kind == "qkv"][:2]
    with pytest.raises(CalibrationError, match="give both one format") as caught:
        uniform(bundle, table, sites, dict(zip(shared, ("int8", "fp8"), strict=True)), ())
    assert caught.value.code == "TWO_FORMATS"


def test_steps_of_mamba1_are_left_alone_unless_named(sites: dict[str, Site]) -> None:
    """QU-09: what the scan is made of hurts more than any other weight."""
    steps = {
        name: Site(name, kind, 0, 64, 64, name)
        for name, kind in (("layers.0.mixer.x_proj.weight", "x_proj"), ("b", "dt_proj"))
    }
    assert set(choices({**sites, **steps}, ["int8"])) == set(choices(sites, ["int8"]))
    with pytest.raises(CalibrationError, match="no weight of the kinds") as caught:
        choices(steps, ["int8"])
    assert caught.value.code == "NO_SITES"
    assert set(choices(steps, ["int8"], ["x_proj"])) == {"layers.0.mixer.x_proj.weight"}


def test_more_than_a_graph_can_hold_is_refused(bundle: Bundle) -> None:
    graphs = load_graphs(bundle)
    large = {"layers.0.w": Site("layers.0.w", "up", 0, 65536, 65536, "layers.0.w")}
    chosen = {"layers.0.w": format_named("int8-weights")}
    with (
        pytest.raises(CalibrationError, match="do not fit into a graph") as caught,
        quantized_engine(bundle, graphs, large, chosen, {}, slots=1),
    ):
        pass
    assert caught.value.code == "TOO_LARGE"
