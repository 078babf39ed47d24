"""Hardware files: round trips, atomic writes, and every kind of bad file; the presets."""

from __future__ import annotations

import copy
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from machines import PLAIN, STAGES, machine

from kvtune.errors import InputError
from kvtune.hardware import parse_hardware, read_hardware, save_hardware, to_yaml
from kvtune.profiles.hardware_presets import load_hardware, preset_names

ROOT = Path(__file__).parents[2]


def changed(path: str, value: object) -> dict:
    """The plain machine with one key replaced (or removed, for ``...``)."""
    data = copy.deepcopy(PLAIN)
    *parents, last = path.split(".")
    place = data
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


def test_round_trip(tmp_path):
    hardware = machine(stages={**STAGES, "estimation": "in_attend"}, disk={"read_bytes_per_second": 1e9})
    path = save_hardware(hardware, tmp_path / "new" / "m.yaml")
    assert read_hardware(path) == hardware
    assert path.read_text(encoding="utf-8") == to_yaml(hardware)
    assert [file.name for file in path.parent.iterdir()] == ["m.yaml"]
    assert machine(stages=yaml.safe_load(to_yaml(hardware))["stages"]).stages == hardware.stages


def test_a_file_that_exists_is_kept(tmp_path):
    path = save_hardware(machine(), tmp_path / "m.yaml")
    with pytest.raises(InputError, match=r"m\.yaml exists"):
        save_hardware(machine(name="other"), path)
    assert read_hardware(path).name == "plain"
    save_hardware(machine(name="other"), path, overwrite=True)
    assert read_hardware(path).name == "other"


@pytest.mark.parametrize(
    ("path", "value", "message", "hint"),
    [
        ("xyzzy", "red", "unknown key 'xyzzy'", "known: kvtune_hardware, name"),
        ("launch.kernel_u", 1.0, "unknown key 'launch.kernel_u'", "did you mean 'kernel_us'?"),
        ("stages", {"scna": {}}, "unknown key 'stages.scna'", "did you mean 'scan'?"),
        ("stages", {"scan": {"fixed": 1.0}}, "unknown key 'stages.scan.fixed'", "did you mean 'fixed_us'?"),
        ("name", ..., "the key 'name' is missing", None),
        ("device_memory.bytes", ..., "the key 'device_memory.bytes' is missing", None),
        ("device_memory.bytes", 1.5, "'device_memory.bytes' must be a whole number", None),
        ("device_memory.bytes", True, "'device_memory.bytes' must be a whole number, not true", None),
        ("device_memory.bytes", 0, "'device_memory.bytes' must be greater than or equal to 1, not 0", None),
        ("matmul_flops_per_second", "1e14", "must be a number, not '1e14'", "write it as 100000000000000.0"),
        ("matmul_flops_per_second", -1.0, "must be greater than 0, not -1.0", None),
        ("matmul_flops_per_second", float("nan"), "'matmul_flops_per_second' must be a finite number", None),
        ("launch", [1], "'launch' must be keys and values, not a list", None),
        ("launch.kernel_us", None, "'launch.kernel_us' must be a number, not nothing", None),
        ("source.kind", "hearsay", "'source.kind' must be 'measured' or 'data sheet', not 'hearsay'", None),
        ("source.document", ..., "a data sheet is named under 'document'", None),
        ("source.kind", "measured", "what was measured has a date and versions", None),
        ("host_to_device.pinned", [], "'host_to_device.pinned' must not be empty", None),
        ("host_to_device.pinned", PLAIN["host_to_device"]["pinned"][::-1], "must ascend in size", None),
        ("kvtune_hardware", 2, "has hardware format 2; this kvtune reads up to 1", "upgrade kvtune"),
        ("kvtune_hardware", "1", "'kvtune_hardware' must be a version number, not '1'", None),
        ("kvtune_hardware", ..., "the key 'kvtune_hardware' is missing", None),
    ],
)  # fmt: skip
def test_bad_keys_are_one_sentence(path, value, message, hint):
    with pytest.raises(InputError) as caught:
        parse_hardware(changed(path, value), "m.yaml")
    assert message in caught.value.message and "\n" not in caught.value.message
    assert caught.value.message.startswith("m.yaml")
    if hint:
        assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no hardware description"),
        ("- 1", "is no hardware description"),
        ("a: [1", "is not valid YAML"),
        ("a: 1\nb: 2\na: 3", "the key 'a' appears twice"),
        ("a: &x [1]\nb: *x", "an alias"),
        ("a: &x [*x]", "an alias"),
        ("a: !!python/name:os.system", "is not valid YAML"),
        ("a: 2020-99-99", "is not valid YAML"),
        ("a: " + "[" * 2000, "nested too deeply"),
        ("kvtune_hardware: 1\n? [a]\n: b", "is not valid YAML"),
    ],
)
def test_bad_text_is_one_sentence(tmp_path, text, message):
    path = tmp_path / "m.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_hardware(path)
    assert message in caught.value.message and "\n" not in caught.value.message


def test_bad_files(tmp_path):
    with pytest.raises(InputError, match="there is no hardware file"):
        read_hardware(tmp_path / "m.yaml")
    with pytest.raises(InputError, match="is a folder"):
        read_hardware(tmp_path)
    (tmp_path / "m.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8 text"):
        read_hardware(tmp_path / "m.yaml")


def test_an_unquoted_date_is_read(tmp_path):
    text = to_yaml(machine(source={"kind": "measured", "date": "2026-11-29", "versions": {"torch": "2"}}))
    path = tmp_path / "m.yaml"
    path.write_text(text.replace("'2026-11-29'", "2026-11-29"), encoding="utf-8")
    assert read_hardware(path).source.date == "2026-11-29"


def test_presets():
    assert preset_names() == ["a100-80gb", "a10g", "h100", "h200", "l40s"]


@pytest.mark.parametrize("name", preset_names())
def test_each_preset_loads_by_its_name_and_round_trips(name):
    hardware = load_hardware(name.upper())
    assert hardware.name == name and hardware.host_to_device is not None
    assert parse_hardware(yaml.safe_load(to_yaml(hardware))) == hardware
    assert hardware.source.kind == ("measured" if name == "h200" else "data sheet")
    assert hardware.source.note
    assert hardware.source.kind == "measured" or "launch" in hardware.source.assumed
    memory = hardware.device_memory
    assert memory.copy_bytes_per_second <= 1.05 * memory.read_bytes_per_second  # each measured apart
    assert hardware.transfer_seconds(1e9) > 1e9 / memory.copy_bytes_per_second


def test_presets_rank_as_their_data_sheets_do():
    found = {name: load_hardware(name) for name in preset_names()}
    by_memory = sorted(found, key=lambda name: found[name].device_memory.read_bytes_per_second)
    assert by_memory == ["a10g", "l40s", "a100-80gb", "h100", "h200"]
    by_products = sorted(found, key=lambda name: found[name].matmul_flops_per_second)
    assert by_products[:3] == ["a10g", "a100-80gb", "l40s"]


def test_presets_are_installed():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = tool["package-data"]["kvtune.profiles"]
    for path in (ROOT / "profiles" / "hardware").iterdir():
        assert any(fnmatch(f"hardware/{path.name}", pattern) for pattern in patterns), path.name


def test_a_file_is_loaded_by_its_path(tmp_path, monkeypatch):
    save_hardware(machine(), tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    assert load_hardware("mine.yaml") == load_hardware(tmp_path / "mine.yaml") == machine()


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("b200", "unknown hardware 'b200'", "known: a100-80gb, a10g, h100, h200, l40s; or name a YAML file"),
        ("", "unknown hardware ''", "known"),
        ("none.yaml", "there is no hardware file none.yaml", "kvtune calibrate"),
        ("no/such", "there is no hardware file no/such", None),
    ],
)
def test_unknown_hardware(tmp_path, monkeypatch, name, message, hint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        load_hardware(name)
    assert caught.value.message == message
    if hint:
        assert hint in (caught.value.hint or "")
