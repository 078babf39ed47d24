"""Fingerprints: a profile holds for the weights it was tuned on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtune.errors import InputError
from kvtune.policies.full import Full
from kvtune.policies.wave_index import WaveIndex
from kvtune.profiles.checks import check_model, check_trace, plan_of


def test_same_weights_pass_and_others_are_named_with_both_fingerprints(profile):
    own = profile.model.fingerprint
    check_model(profile, SimpleNamespace(id="elsewhere/same", fingerprint=own))
    check_trace(profile, SimpleNamespace(model="elsewhere/same", fingerprint=own))
    for check, other in (
        (check_model, SimpleNamespace(id="another", fingerprint="beef")),
        (check_trace, SimpleNamespace(model="another", fingerprint="beef")),
    ):
        with pytest.raises(InputError) as caught:
            check(profile, other)
        for text in (profile.model.id, own, "another", "beef"):
            assert text in caught.value.message


def test_plan_serves_each_layer_as_the_profile_says(profile):
    geometry = profile.geometry.to_model()
    plan = plan_of(profile.resolve(16384))
    served = [plan.for_layer(geometry.layer(index)) for index in range(4)]
    assert served == [Full(), Full(), WaveIndex(retrieval=0.05), WaveIndex()]
