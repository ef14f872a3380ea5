"""Bundles whose states and keys are kept in fewer bits: written, compared and followed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from random_sequences import random_data

from fixedstate.bundle import Bundle
from fixedstate.calib.collect import collect
from fixedstate.calib.data import Data, Record
from fixedstate.calib.plan import Plan, uniform
from fixedstate.calib.score import choices
from fixedstate.calib.sites import Site, find_sites, load_graphs
from fixedstate.calib.table import Policy, Table
from fixedstate.export.quantized import drift_of, quantize_bundle
from fixedstate.runtime import Request, Settings, load
from fixedstate.runtime.laws import check_bundle

FORMATS = (("int8row", "float32"), ("float32", "int8"), ("bfloat16", "kivi4"))


@pytest.fixture(scope="module")
def bundle(bundle_path: Callable[..., Path]) -> Bundle:
    return Bundle.open(bundle_path("tiny-hybrid", fused=True))


@pytest.fixture(scope="module")
def sites(bundle: Bundle) -> dict[str, Site]:
    return find_sites(load_graphs(bundle))


@pytest.fixture(scope="module")
def data(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return random_data(bundle, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def table(bundle: Bundle, data: Data) -> Table:
    return collect(bundle, data, Policy(masks=(1.0, 0.5), blocks=2), records=4)


def carried(
    bundle: Bundle, table: Table, sites: dict[str, Site], state: str, kv: str, name: str = ""
) -> Plan:
    formats = dict.fromkeys(choices(sites, (name,)), name) if name else {}
    return replace(uniform(bundle, table, sites, formats, ("ort-cpu",)), state=state, kv=kv)


@pytest.mark.parametrize(("state", "kv"), FORMATS)
def test_a_plan_of_what_is_carried(
    bundle: Bundle,
    table: Table,
    sites: dict[str, Site],
    data: Data,
    tmp_path: Path,
    state: str,
    kv: str,
) -> None:
    """Weights are left as they are; states and keys are smaller, and it decodes and keeps laws."""
    plan = carried(bundle, table, sites, state, kv)
    made, report = quantize_bundle(bundle, plan, table, data, tmp_path / "q", records=2)
    opened = Bundle.open(made.path)
    assert (opened.precision.state, opened.precision.kv) == (state, kv)
    assert opened.weights == bundle.weights
    assert 0 < report.comparison.kl < 2e-3
    smaller = opened.state.state_bytes() < bundle.state.state_bytes()
    assert smaller == (state != "float32")
    fewer = opened.state.kv_bytes_per_token() < bundle.state.kv_bytes_per_token()
    assert fewer == (kv != "float32")
    results = check_bundle(opened, block_counts=(1, 3), seed=1)
    assert all(one.passed for one in results), results
    with load(opened.path, threads=1) as decoder:
        (result,) = decoder.generate(
            [Request((5, 6), Settings(max_new_tokens=32, steps=4, stop_ids=()))]
        )
    assert len(result.token_ids) == 32


def test_products_states_and_keys_together(
    bundle: Bundle, table: Table, sites: dict[str, Site], data: Data, tmp_path: Path
) -> None:
    plan = carried(bundle, table, sites, "int8row", "int8", "int8-weights")
    made, report = quantize_bundle(bundle, plan, table, data, tmp_path / "q", records=2)
    assert report.comparison.kl < 2e-3
    assert all(one.passed for one in check_bundle(made, block_counts=(1, 3), seed=1))
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 200, 6 * bundle.spec.block_len).tolist()
    found = drift_of(bundle, made, (Record("long", tuple(ids)),), at=(1, 5, 6))
    assert list(found.comparison.state) == [1, 5, 6]
    assert all(0 < error < 0.2 for error in found.comparison.state.values())
    assert found.state_bytes < found.float_bytes / 2
