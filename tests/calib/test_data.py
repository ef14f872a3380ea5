"""Token data: splits that never overlap, tokens of the right model, damage refused by its line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fixedstate.bundle import Bundle
from fixedstate.calib.data import SPLITS, Data, Record, read_data, write_data
from fixedstate.errors import CalibrationError


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    tests = Path(__file__).resolve().parent.parent
    return Bundle.open(tests / "data" / "golden" / "schema-2" / "bundle")


def sequences(count: int, length: int = 50) -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(7)
    return [(rng.integers(3, 30, length).tolist(), 5) for _ in range(count)]


def refused(file: Path, bundle: Bundle) -> CalibrationError:
    with pytest.raises(CalibrationError) as caught:
        read_data(file, bundle)
    return caught.value


def test_what_is_written_is_read(tmp_path: Path, bundle: Bundle) -> None:
    given = sequences(40)
    file = tmp_path / "data.jsonl"
    made = write_data(file, bundle, [*given, given[0]])
    found = read_data(file, bundle)
    assert found == made
    assert len(found.records) == 40
    assert {record.ids for record in found.records} == {tuple(ids) for ids, _ in given}


def test_splits_are_disjoint_and_do_not_depend_on_the_rest(tmp_path: Path, bundle: Bundle) -> None:
    many = write_data(tmp_path / "many", bundle, sequences(200))
    names = {split: {r.id for r in many.records if r.split == split} for split in SPLITS}
    assert sum(map(len, names.values())) == 200
    few = write_data(tmp_path / "few", bundle, sequences(30))
    assert all(record.id in names[record.split] for record in few.records)


def test_a_fifth_of_all_sequences_is_in_each_of_the_smaller_splits() -> None:
    found = Counter(Record(str(number), ()).split for number in range(10_000))
    for split, share in zip(SPLITS, (0.6, 0.2, 0.2), strict=True):
        assert found[split] / 10_000 == pytest.approx(share, abs=0.02)


def test_the_order_of_lines_is_no_part_of_the_hash(tmp_path: Path, bundle: Bundle) -> None:
    file = tmp_path / "data.jsonl"
    made = write_data(file, bundle, sequences(20))
    first, *lines = file.read_text().splitlines()
    file.write_text("\n".join([first, *reversed(lines)]))
    assert read_data(file, bundle) == made
    file.write_text("\n".join([first, *lines[1:]]))
    assert read_data(file, bundle).sha256 != made.sha256


def test_sequences_are_cut_to_whole_blocks(tmp_path: Path, bundle: Bundle) -> None:
    data = write_data(tmp_path / "data", bundle, sequences(40, 50))
    for name in SPLITS:
        assert {len(record.ids) for record in data.split(name, 8)} == {48}
        assert {len(record.ids) for record in data.split(name, 8, blocks=2)} == {16}
    with pytest.raises(ValueError, match="split 'test' is none of"):
        data.split("test", 16)


def test_QU_04_a_split_without_a_usable_sequence_is_an_error(
    tmp_path: Path, bundle: Bundle
) -> None:
    for given in ([], [([4] * 7, 0)], [([4] * 10, 8)]):
        data = write_data(tmp_path / "data", bundle, given)
        for name in SPLITS:
            with pytest.raises(CalibrationError, match="give more or longer sequences") as caught:
                data.split(name, 8)
            assert caught.value.code == "NO_DATA"
    alone = Data((Record("a", (1,) * 32, 31),), "")
    assert len(alone.split(alone.records[0].split, 16)) == 1


@pytest.mark.parametrize(
    ("key", "value"), [("vocab", 999), ("mask_id", 3), ("tokenizer_sha256", "0" * 64)]
)
def test_tokens_of_another_model_are_refused(
    tmp_path: Path, bundle: Bundle, key: str, value: object
) -> None:
    file = tmp_path / "data.jsonl"
    write_data(file, bundle, sequences(5))
    first, *lines = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps({**json.loads(first), key: value}), *lines]))
    err = refused(file, bundle)
    assert err.code == "DATA_MODEL"
    assert f"{key} {value!r}" in str(err)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no JSON object"),
        ('{"id": "a", "ids": [1]}', "lacks the keys ['prompt_len']"),
        ('{"id": "a", "ids": [1], "prompt_len": 0, "text": "x"}', "unknown keys ['text']"),
        ('{"id": 3, "ids": [1], "prompt_len": 0}', "id must be a text; got 3"),
        ('{"id": "a", "ids": [1.5], "prompt_len": 0}', "must be a list of whole numbers"),
        ('{"id": "a", "ids": [true], "prompt_len": 0}', "must be a list of whole numbers"),
        ('{"id": "a", "ids": [1], "prompt_len": 2}', "prompt_len must be between 0 and 1; got 2"),
        ('{"id": "a", "ids": [-1], "prompt_len": 0}', "id -1 is no token of text"),
        ('{"id": "a", "ids": [100000], "prompt_len": 0}', "id 100000 is no token of text"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, bundle: Bundle, line: str, reason: str) -> None:
    file = tmp_path / "data.jsonl"
    write_data(file, bundle, [])
    file.write_text(file.read_text() + line + "\n")
    err = refused(file, bundle)
    assert (err.code, f"{file}, line 2") == ("DATA", f"{file}, line 2")
    assert str(err).startswith(f"{file}, line 2")
    assert reason in str(err)


def test_masks_in_the_data_are_refused(tmp_path: Path, bundle: Bundle) -> None:
    mask = bundle.spec.mask_id
    with pytest.raises(CalibrationError, match=f"id {mask} is no token of text"):
        write_data(tmp_path / "data.jsonl", bundle, [([1, mask], 0)])
    assert not (tmp_path / "data.jsonl").exists()


def test_a_file_that_is_none_is_refused(tmp_path: Path, bundle: Bundle) -> None:
    assert refused(tmp_path / "missing", bundle).code == "DATA"
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert refused(tmp_path / "binary", bundle).code == "DATA"
    (tmp_path / "empty").write_text("")
    assert refused(tmp_path / "empty", bundle).code == "DATA"
    (tmp_path / "other").write_text('{"calib_data": 2}\n')
    assert "has calib_data 2, this version reads 1" in str(refused(tmp_path / "other", bundle))


def test_the_same_name_twice_and_the_same_tokens_in_two_splits_are_refused(
    tmp_path: Path, bundle: Bundle
) -> None:
    file = tmp_path / "data.jsonl"
    write_data(file, bundle, [])
    header = file.read_text()
    by_split = {Record(str(n), ()).split: str(n) for n in range(100)}
    lines = [Record(by_split[name], (1, 2, 3)).to_dict() for name in SPLITS[:2]]
    file.write_text(header + "".join(json.dumps(line) + "\n" for line in lines))
    err = refused(file, bundle)
    assert err.code == "SPLIT_OVERLAP"
    assert "hold the same tokens" in str(err)
    file.write_text(header + 2 * (json.dumps(lines[0]) + "\n"))
    assert "stands there twice" in str(refused(file, bundle))
