from __future__ import annotations

import json

from kvtune.policies import all_policies, get_policy


def test_json_lists_every_policy_with_its_defaults(cli):
    ran = cli("policies", "--json")
    assert ran.exit_code == 0 and ran.err == ""
    document = json.loads(ran.out)
    assert [policy["name"] for policy in document] == list(all_policies())
    for row in document:
        assert set(row) == {"name", "title", "source", "parameters", "budget"}
        assert row["title"] and row["source"]
        assert row["budget"] is None or row["budget"] in row["parameters"]
        assert get_policy(row["name"], row["parameters"]).parameters() == get_policy(row["name"]).parameters()


def test_the_list_can_be_typed_back(cli):
    ran = cli("policies")
    assert ran.exit_code == 0
    for name, policy in all_policies().items():
        assert f"{name}: {policy.title}\n" in ran.out
        for key, value in get_policy(name).parameters().items():
            assert f"--set {key}={value}" in ran.out


def test_quiet_lists_nothing(cli):
    assert cli("policies", "--quiet").out == ""
