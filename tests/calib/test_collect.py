"""Ranges: the same bytes in every order and batch, and never those of something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from fixedstate.bundle import Bundle
from fixedstate.calib.collect import collect
from fixedstate.calib.data import Data, write_data
from fixedstate.calib.sites import find_sites, inputs_of, load_graphs
from fixedstate.calib.table import COMMIT, Policy, Table
from fixedstate.errors import CalibrationError

SHORT = Policy(masks=(1.0, 0.5), blocks=3)


@pytest.fixture(scope="module")
def bundle(bundle_path: Callable[..., Path]) -> Bundle:
    """A hybrid with all kinds of products."""
    return Bundle.open(bundle_path("F3"))


@pytest.fixture(scope="module")
def data(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Sequences of several lengths, some with a prompt."""
    rng = np.random.default_rng(11)
    length, vocab = bundle.spec.block_len, bundle.spec.vocab_size
    tokens = [token for token in range(vocab) if token != bundle.spec.mask_id]
    made = []
    for number in range(24):
        ids = rng.choice(tokens, int(rng.integers(length, 4 * length))).tolist()
        made.append((ids, number % 3 * (length // 2 + 1) if len(ids) > 2 * length else 0))
    return write_data(tmp_path_factory.mktemp("data") / "data.jsonl", bundle, made)


@pytest.fixture(scope="module")
def table(bundle: Bundle, data: Data) -> Table:
    return collect(bundle, data, SHORT)


def test_the_table_is_the_same_for_three_orders_and_batch_sizes(
    bundle: Bundle, data: Data, table: Table
) -> None:
    turned = Data(tuple(reversed(data.records)), data.sha256)
    mixed = Data(
        tuple(np.random.default_rng(0).permutation(np.array(data.records, object))), data.sha256
    )
    for order, batch in ((data, 1), (turned, 3), (mixed, 32)):
        assert collect(bundle, order, SHORT, batch=batch).to_bytes() == table.to_bytes()


def test_memory_that_takes_one_activation_at_a_time_gives_the_same(
    bundle: Bundle, data: Data
) -> None:
    few = {"split": "score", "records": 2, "batch": 2}
    whole = collect(bundle, data, SHORT, **few)  # type: ignore[arg-type]
    assert collect(bundle, data, SHORT, memory=30_000, **few).to_bytes() == whole.to_bytes()  # type: ignore[arg-type]


def test_QU_03_a_short_last_batch_counts_as_every_other(
    bundle: Bundle, data: Data, table: Table
) -> None:
    count = len(data.split("calibrate", bundle.spec.block_len))
    assert count % 4
    assert len(table.records) == count


def test_every_pass_that_decoding_visits_is_there(bundle: Bundle, table: Table) -> None:
    visited = {name: set(seen.passes) for name, seen in table.inputs.items()}
    last = [name for name, passes in visited.items() if COMMIT not in passes]
    assert all({"1", "0.5"} <= passes for passes in visited.values())
    # what comes behind the last layer's state is no part of a commit pass
    assert "head.weight" in last
    assert 0 < len(last) < len(visited) / 2
    assert table.unvisited() == ()
    table.check_complete()


def test_ranges_are_those_of_numpy(bundle: Bundle, data: Data) -> None:
    """The first product's input is the norm of an embedding row: known without the graph."""
    made = collect(bundle, data, Policy(masks=(), blocks=1), split="score")
    sites = find_sites(load_graphs(bundle))
    first = next(iter(inputs_of(sites.values())))
    model = ir.load(bundle.path / "commit.onnx")
    weights = {
        name: model.graph.initializers[name].const_value.numpy().astype(np.float64)  # type: ignore[union-attr]
        for name in ("embedding.weight", "layers.0.norm.weight")
    }
    ids = {
        token for record in data.split("score", bundle.spec.block_len, 1) for token in record.ids
    }
    rows = weights["embedding.weight"][sorted(ids)]
    scale = np.sqrt((rows**2).mean(-1, keepdims=True) + bundle.spec.layers[0].norm_eps)
    expected = np.abs(rows / scale * weights["layers.0.norm.weight"]).max()
    assert made.inputs[first].histogram.amax == pytest.approx(expected, rel=1e-5)


def test_real_decoding_can_be_traced(bundle: Bundle, data: Data) -> None:
    policy = Policy(sampler="trace", blocks=2)
    made = collect(bundle, data, policy, records=3)
    assert all("trace" in seen.passes for seen in made.inputs.values())
    assert collect(bundle, data, policy, records=3, batch=1).to_bytes() == made.to_bytes()


def test_a_run_that_was_stopped_goes_on(
    bundle: Bundle, data: Data, table: Table, tmp_path: Path
) -> None:
    file = tmp_path / "table.json"
    collect(bundle, data, SHORT, records=5, batch=2, save=file)
    half = Table.load(file)
    assert len(half.records) == 5
    assert collect(bundle, data, SHORT, resume=half).to_bytes() == table.to_bytes()


def test_tables_of_parts_merge_into_that_of_the_whole(
    bundle: Bundle, data: Data, table: Table
) -> None:
    names = sorted(table.records)
    parts = []
    for half in (names[::2], names[1::2]):
        records = tuple(record for record in data.records if record.id in half)
        parts.append(collect(bundle, Data(records, data.sha256), SHORT))
    merged, other = parts
    merged.merge(other)
    assert merged.to_bytes() == table.to_bytes()
    with pytest.raises(CalibrationError, match="are in both tables") as caught:
        merged.merge(other)
    assert caught.value.code == "TWICE"


def test_QU_01_ranges_of_other_weights_graphs_data_or_rules_are_refused(
    bundle: Bundle, data: Data, table: Table
) -> None:
    other = replace(bundle, weights="0" * 64)
    for change, field in (
        ({"bundle": other}, "model weights is "),
        ({"data": Data(data.records, "1" * 64)}, "data sha256 is "),
        ({"policy": replace(SHORT, seed=1)}, "policy seed is 0, here it is 1"),
        ({"policy": Policy()}, r"policy blocks is 3, here it is 16"),
    ):
        given = {"bundle": bundle, "data": data, "policy": SHORT} | change
        with pytest.raises(CalibrationError, match=field) as caught:
            table.check(given["bundle"], given["data"], given["policy"])  # type: ignore[arg-type]
        assert caught.value.code == "STALE"
        assert "collect the ranges again" in str(caught.value)
    with pytest.raises(CalibrationError, match="policy seed"):
        collect(bundle, data, replace(SHORT, seed=1), resume=table)
    table.check(bundle, data, SHORT)


def test_files_are_read_back_and_changes_found(table: Table, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    table.save(file)
    assert Table.load(file).to_bytes() == table.to_bytes()
    assert Table.load(file).sha256 == table.sha256
    content = json.loads(file.read_text())
    name = next(iter(content["inputs"]))
    for change in (
        {"policy": content["policy"] | {"seed": 5}},
        {"inputs": content["inputs"] | {name: content["inputs"][name] | {"passes": {}}}},
        {"more": 1},
    ):
        file.write_text(json.dumps(content | change))
        with pytest.raises(CalibrationError) as caught:
            Table.load(file)
        assert caught.value.code == "DAMAGED"
    file.write_text(json.dumps(content | {"calibration_table": 2}))
    with pytest.raises(CalibrationError, match="format 2, this version reads 1") as caught:
        Table.load(file)
    assert caught.value.code == "NEWER"


def test_QU_04_what_was_never_reached_is_listed_and_zeros_and_nan_are_refused(
    bundle: Bundle, data: Data
) -> None:
    empty = Table.begin(bundle, data, "calibrate", SHORT, ("one", "two"))
    with pytest.raises(CalibrationError) as caught:
        empty.check_complete()
    assert caught.value.code == "NO_DATA"
    empty.records.add("a")
    empty.add("one", COMMIT, np.array([0.0, 2.0]))
    empty.check_complete()
    assert empty.unvisited() == ("two",)
    empty.add("two", COMMIT, np.zeros(3))
    with pytest.raises(CalibrationError, match="two was zero in every pass") as caught:
        empty.check_complete()
    assert caught.value.code == "ZERO_RANGE"
    empty.add("two", COMMIT, np.array([np.nan]))
    with pytest.raises(CalibrationError, match="two: 1 of its values") as caught:
        empty.check_complete()
    assert caught.value.code == "NONFINITE"


def test_models_that_ranges_cannot_be_taken_of_are_refused(bundle: Bundle, data: Data) -> None:
    full = replace(bundle, spec=replace(bundle.spec, objective="full"))
    half = replace(bundle, precision=replace(bundle.precision, io="float16"))
    for given, reason in ((full, "objective 'full'"), (half, "is fp16: quantise the fp32 bundle")):
        with pytest.raises(CalibrationError, match=reason) as caught:
            collect(given, data)
        assert caught.value.code == "MODEL"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"masks": (0.0,)}, "masks must be above 0"),
        ({"masks": (), "commit": False}, "nothing is seen"),
        ({"blocks": 0}, "blocks must be 1 or more"),
        ({"sampler": "best"}, "sampler 'best' is none of"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict, reason: str) -> None:
    with pytest.raises(CalibrationError, match=reason) as caught:
        Policy(**wrong)
    assert caught.value.code == "POLICY"


@pytest.mark.parametrize("name", ["F1", "F2", "F3", "F4"])
def test_every_product_with_a_weight_is_a_site_of_a_known_kind(
    bundle_path: Callable[..., Path], name: str
) -> None:
    opened = Bundle.open(bundle_path(name))
    sites = find_sites(load_graphs(opened))
    assert all(site.kind for site in sites.values())
    assert {site.layer for site in sites.values()} >= set(range(len(opened.spec.layers)))
    shared: dict[str, set[str]] = {}
    for site in sites.values():
        shared.setdefault(site.input, set()).add(site.kind)
        assert sites[site.input].rows == site.rows
    assert all(len(kinds) == 1 for kinds in shared.values())
    assert [site.columns for site in sites.values() if site.kind == "head"] == [
        opened.spec.vocab_rows
    ]
