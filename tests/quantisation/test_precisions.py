"""Every storage precision: error under its closed-form bound, against slow float64 references."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.errors import InputError
from kvtune.profiles.schema import KVPrecision
from kvtune.quantisation import PARTS, HeadPrecision, PrecisionPlan, all_precisions, get_precision
from kvtune.quantisation.int4 import Int4
from kvtune.quantisation.int8 import Int8
from kvtune.quantisation.kivi2 import Kivi2

NAMES = sorted(all_precisions())
LOSSY = [name for name in NAMES if name != "native"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def vectors(heads=2, n=75, dim=40, seed=0, dtype=torch.float32, size=3.0):
    """Normal numbers with one channel that is large in every token."""
    rows = torch.randn(heads, n, dim, generator=torch.Generator().manual_seed(seed)) * size
    rows[..., dim // 3] += 8 * size
    return rows.to(dtype)


def slow_group(numbers, bits):
    """A group quantised in float64, its step unrounded."""
    low, high = min(numbers), max(numbers)
    step = (high - low) / (2**bits - 1)
    return [low if step == 0 else low + step * round((x - low) / step) for x in numbers], step


def e4m3_numbers():
    """Every finite non-negative E4M3 number, from its bits."""
    normal = [2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return sorted([2.0**-6 * m / 8 for m in range(8)] + normal)


def slow_fp8(x, scale):
    """The nearest E4M3 number, saturating; of two as near, the one with the even mantissa is last bit 0."""
    size = min(abs(x) / scale, 448.0)
    table = e4m3_numbers()
    best = min(range(len(table)), key=lambda i: (abs(table[i] - size), i % 2))
    return math.copysign(table[best], x) * scale


@given(
    name=st.sampled_from(NAMES),
    part=st.sampled_from(PARTS),
    dtype=st.sampled_from(sorted(DTYPES)),
    n=st.integers(0, 70),
    dim=st.integers(1, 70),
    exponent=st.integers(-30, 30),
    offset=st.sampled_from([0.0, 1.0, -30.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=250, deadline=None)
def test_the_error_stays_under_the_closed_form_bound(name, part, dtype, n, dim, exponent, offset, seed):
    exponent = max(-14, min(exponent, 9)) if dtype == "float16" else exponent
    rows = torch.randn(2, n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = ((rows + offset) * 2.0**exponent).to(DTYPES[dtype])
    precision = get_precision(name)
    coded = precision.coded(rows, part)
    assert coded.shape == rows.shape and coded.dtype == torch.float32
    assert ((coded.double() - rows.double()).abs() <= precision.error_bound(rows, part).double()).all()
    held = precision.round_trip(rows, part)
    assert ((held.double() - rows.double()).abs() <= precision.error_bound(rows, part).double()).all()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", LOSSY)
def test_the_bound_is_not_slack(name, part):
    rows = vectors(n=256, dim=64, size=40)
    ratio = (get_precision(name).coded(rows, part) - rows).abs() / get_precision(name).error_bound(rows, part)
    assert ratio.nan_to_num().max() > 0.9


@pytest.mark.parametrize(("precision", "bits"), [(Int8(), 8), (Int8(16), 8), (Int4(), 4), (Int4(64), 4)])
def test_integers_equal_a_slow_reference(precision, bits):
    rows = vectors(n=5, dim=100)
    coded = precision.coded(rows, "keys")
    for head in range(2):
        for token in range(5):
            numbers = rows[head, token].double().tolist()
            for start in range(0, 100, precision.group):
                expected, step = slow_group(numbers[start : start + precision.group], bits)
                got = coded[head, token, start : start + precision.group].double()
                # A tie may round either way: then the codes differ by one step.
                off = (got - torch.tensor(expected, dtype=torch.float64)).abs()
                assert (off <= 1e-4 * step).float().mean() > 0.99 and (off <= 1.001 * step).all()


def test_kivi_keys_equal_a_slow_reference_by_channel():
    keys = vectors(n=75, dim=6)
    coded = Kivi2().coded(keys, "keys")
    for head in range(2):
        for channel in range(6):
            for start in (0, 32):
                expected, step = slow_group(keys[head, start : start + 32, channel].double().tolist(), 2)
                off = (
                    coded[head, start : start + 32, channel].double() - torch.tensor(expected).double()
                ).abs()
                assert (off <= 1e-4 * step).all()
    assert torch.equal(coded[:, 64:], keys[:, 64:])


def test_kivi_values_equal_a_slow_reference_by_token():
    values = vectors(n=4, dim=40)
    coded = Kivi2().coded(values, "values")
    for head in range(2):
        for token in range(4):
            for start, stop in ((0, 32), (32, 40)):
                expected, step = slow_group(values[head, token, start:stop].double().tolist(), 2)
                off = (coded[head, token, start:stop].double() - torch.tensor(expected).double()).abs()
                assert (off <= 1e-4 * step).all()


@pytest.mark.parametrize("name", ["fp8", "fp8_unscaled"])
def test_fp8_equals_a_search_among_all_its_numbers(name):
    rows = vectors(n=6, dim=10, size=40)
    rows[0, 0] = torch.tensor([0.0, -0.0, 1e-4, -3e-3, 2**-7, 447.0, 448.0, -449.0, 1e4, 17.0])
    coded = get_precision(name).coded(rows, "keys")
    for head in range(2):
        scale = float(rows[head].abs().max()) / 448 if name == "fp8" else 1.0
        for x, got in zip(rows[head].flatten().tolist(), coded[head].flatten().tolist()):
            assert got == pytest.approx(slow_fp8(x, scale), rel=1e-6, abs=1e-12)


def test_a_scale_saves_fp8_from_saturation():
    rows = vectors(size=100)
    error = {
        name: float((get_precision(name).coded(rows, "keys") - rows).abs().max())
        for name in ("fp8", "fp8_unscaled")
    }
    assert error["fp8"] < rows.abs().max() / 16 < error["fp8_unscaled"]


def test_fp8_scales_come_from_the_calibrated_tokens_alone():
    rows = vectors(n=20)
    rows[0, 15] *= 100
    coded = get_precision("fp8").coded(rows, "keys", 10)
    assert torch.equal(coded[:, :10], get_precision("fp8").coded(rows[:, :10], "keys"))
    assert coded[0, 15].abs().max() <= rows[0, :10].abs().max() * 1.0001
    assert torch.isfinite(coded).all()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", NAMES)
def test_later_tokens_change_no_code(name, part):
    rows = vectors(n=200)
    precision = get_precision(name)
    whole = precision.coded(rows, part, 50)
    for length in (50, 96, 131, 199):
        stop = int(precision.native_from(torch.tensor(length), part))
        assert torch.equal(precision.coded(rows[:, :length], part, 50)[:, :stop], whole[:, :stop])


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", [name for name in LOSSY if not name.startswith("fp8")])
def test_constant_channels_and_two_values_survive(name, part):
    precision = get_precision(name)
    two = torch.where(torch.rand(2, 64, 32, generator=torch.Generator().manual_seed(0)) < 0.5, -7.0, 2.0)
    for dtype in DTYPES.values():
        constant = torch.full((2, 64, 32), 1234.5678).to(dtype)
        assert torch.equal(precision.coded(constant, part), constant.float())
        off = precision.coded(two.to(dtype), part) - two
        assert off.abs().max() <= 0.5 * 9 / (2**precision.bits - 1) + 1e-5
    # The step is exact here: the largest code is the maximum itself.
    assert torch.allclose(precision.coded(two, part), two, atol=1e-5)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("name", NAMES)
def test_one_huge_vector_is_finite_and_harms_only_its_own_group(name, dtype, part):
    rows = vectors(n=96, dim=32, dtype=DTYPES[dtype])
    calm = get_precision(name).coded(rows, part)
    rows[1, 40] *= 1000 if dtype == "float16" else 1e30
    coded = get_precision(name).coded(rows, part)
    assert torch.isfinite(coded).all()
    assert torch.equal(coded[0], calm[0])
    if not name.startswith("fp8"):
        assert torch.equal(coded[1, 64:], calm[1, 64:]) and torch.equal(coded[1, :32], calm[1, :32])


@pytest.mark.parametrize(
    ("bad", "word"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite"), (3e38, "too large")]
)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_number_is_refused_with_its_place(name, part, bad, word):
    rows = vectors()
    rows[1, 17, 4] = bad
    with pytest.raises(InputError, match=f"the {part[:-1]} of head 1, position 17 is {word}"):
        get_precision(name).coded(rows, part)


def test_half_precision_infinity_is_refused_too():
    rows = vectors(dtype=torch.float16)
    rows[0, 3, 1] = math.inf
    with pytest.raises(InputError, match="position 3 is infinite"):
        get_precision("int8").coded(rows, "keys")


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 63, 64, 65, 100])
def test_kivi_holds_the_most_recent_tokens_natively(n):
    rows, precision = vectors(n=n), Kivi2()
    keys, values = (precision.round_trip(rows, part) for part in PARTS)
    coded_keys = max(0, n - 32) // 32 * 32
    assert torch.equal(keys[:, coded_keys:], rows[:, coded_keys:])
    assert torch.equal(values[:, max(0, n - 32) :], rows[:, max(0, n - 32) :])
    assert torch.equal(keys[:, :coded_keys], precision.coded(rows, "keys")[:, :coded_keys])
    if coded_keys:
        assert not torch.equal(keys[:, :coded_keys], rows[:, :coded_keys])


def slow_bytes(name, dim, part, item):
    """Bytes of 32 tokens' keys or values, counted one by one."""
    if name == "native":
        return 32 * dim * item
    if name.startswith("fp8"):
        return 32 * dim
    if name == "kivi2" and part == "keys":
        return sum(32 // 4 + item + item for _ in range(dim))
    bits, group = {"int8": (8, 64), "int4": (4, 32), "kivi2": (2, 32)}[name]
    return 32 * (math.ceil(dim * bits / 8) + sum(2 * item for _ in range(0, dim, group)))


@pytest.mark.parametrize("dim", [8, 64, 80, 128])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_count_scales_and_zeros(name, part, dim):
    for item in (2, 4):
        assert 32 * get_precision(name).token_bytes(dim, part, item) == slow_bytes(name, dim, part, item)


def test_fewer_bits_are_fewer_bytes_and_more_error():
    rows = vectors(n=128, dim=128)
    order = ["native", "int8", "int4", "kivi2"]
    size = [get_precision(name).token_bytes(128, "values") for name in order]
    error = [float((get_precision(name).coded(rows, "values") - rows).norm()) for name in order]
    assert size == sorted(size, reverse=True) and error == sorted(error)


def test_profiles_know_these_names():
    for name in ("native", "fp8", "int8", "int4", "kivi2"):
        assert KVPrecision(keys=name, values=name).keys == get_precision(name).name


def test_unknown_names_and_bad_parameters_are_input_errors():
    with pytest.raises(InputError, match="unknown precision 'int9'"):
        get_precision("int9")
    with pytest.raises(InputError, match="unknown precision"):
        HeadPrecision("fp8", "fb8")
    with pytest.raises(InputError, match="group"):
        Int4(0)
    with pytest.raises(InputError, match="group"):
        Kivi2(group=0)


def test_a_plan_serves_heads_before_layers_before_the_default():
    plan = PrecisionPlan(
        HeadPrecision.both("int4"),
        layers={1: HeadPrecision("int8", "int4")},
        heads={(1, 3): HeadPrecision(), (0, 2): HeadPrecision.both("fp8")},
    )
    assert plan.for_layer(0, (1, 2)) == (HeadPrecision("int4", "int4"), HeadPrecision("fp8", "fp8"))
    assert plan.for_layer(1, (0, 3)) == (HeadPrecision("int8", "int4"), HeadPrecision("native", "native"))
