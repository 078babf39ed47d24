"""CTkvr's larger options against small float64 retellings: k-means, offline, SimHash, split and merge."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from policy_inputs import DIM, GROUP, HEADS, LAYER, queries, tensors

from kvtune.errors import InputError
from kvtune.policies import get_policy
from kvtune.policies.ctkvr_centroids import kmeans_centroids, retrieved_mass
from kvtune.policies.ctkvr_dynamic import Stretch, next_centroids
from kvtune.policies.ctkvr_lists import InvertedLists, nearest
from kvtune.policies.ctkvr_offline import learn_centroids, load_centroids, save_centroids
from kvtune.policies.ctkvr_rescoring import as_int8
from kvtune.policies.ctkvr_simhash import BITS, signatures, thin

N = 300
SMALL = {"top_k": 30, "n_centroids": 8, "rho": 40, "nprobe": 2, "sink": 4, "local": 16}


def grouped(count: int, seed: int = 2) -> torch.Tensor:
    """Queries [H, count, G, d]."""
    return queries(count, seed).transpose(0, 1)


def unit(rows: torch.Tensor) -> torch.Tensor:
    """[n, G, d] with unit rows, side by side [n, G·d], float64."""
    rows = rows.double()
    return (rows / rows.norm(dim=-1, keepdim=True)).flatten(1)


def slow_kmeans(rows, count, weights):
    """Weighted spherical k-means of [W, G, d], one query at a time."""
    flat = unit(rows)
    starts = [(2 * i + 1) * len(rows) // (2 * count) for i in range(count)]
    centroids = [flat[s] for s in starts]
    for _ in range(10):
        home = [max(range(count), key=lambda c: float(row @ centroids[c])) for row in flat]
        for c in range(count):
            total = sum((weights[i] * flat[i] for i in range(len(rows)) if home[i] == c), torch.zeros(()))
            if total.ndim:
                centroids[c] = total / total.norm()
    means = []
    for c in range(count):
        mine = [i for i in range(len(rows)) if home[i] == c]
        total = sum(weights[i] for i in mine)
        mean = (
            sum((weights[i] * rows[i].double() for i in mine), torch.zeros(())) / total
            if mine
            else rows[starts[c]]
        )
        means.append(mean.double())
    return torch.stack(means)


@pytest.mark.parametrize("weighted", [False, True])
def test_kmeans_equals_the_slow_one(weighted):
    rows = grouped(40)
    weights = torch.rand(HEADS, 40, generator=torch.Generator().manual_seed(5)) if weighted else None
    found = kmeans_centroids(rows, 6, weights)
    for head in range(HEADS):
        pull = [1.0] * 40 if weights is None else weights[head].tolist()
        assert torch.allclose(found[head].double(), slow_kmeans(rows[head], 6, pull), atol=1e-5)


def test_kmeans_keeps_every_query_where_there_are_fewer_than_centroids():
    rows = grouped(5)
    assert torch.allclose(kmeans_centroids(rows, 9), rows, atol=1e-6)
    assert kmeans_centroids(rows[:, :0], 9).shape == (HEADS, 0, GROUP, DIM)


def test_weights_pull_the_centroid():
    rows = grouped(2)
    weights = torch.tensor([[1.0, 3.0]] * HEADS)
    assert torch.allclose(
        kmeans_centroids(rows, 1, weights)[:, 0], (rows[:, 0] + 3 * rows[:, 1]) / 4, atol=1e-6
    )
    assert kmeans_centroids(rows, 2, torch.zeros(HEADS, 2)).isfinite().all()


def test_attention_weight_is_the_probability_outside_the_steady_zone():
    keys, _ = tensors(60)
    rows = grouped(3)
    found = retrieved_mass(rows, keys, 4, 16, LAYER)
    for head in range(HEADS):
        for w in range(3):
            shares = [
                torch.softmax(keys[head].double() @ rows[head, w, g].double() * LAYER.scaling, 0)[4:44].sum()
                for g in range(GROUP)
            ]
            assert float(found[head, w]) == pytest.approx(float(sum(shares) / GROUP), abs=1e-6)


@pytest.mark.parametrize("kind", ["kmeans", "attention_weighted"])
def test_the_policy_clusters_its_query_window(kind):
    policy = get_policy("ctkvr", {**SMALL, "centroids": kind, "query_window": 24})
    assert policy.prompt_window == 24
    keys, values = tensors(N)
    index = policy.build(keys, values, grouped(24).transpose(1, 2), LAYER)
    weights = retrieved_mass(grouped(24), keys, 4, 16, LAYER) if kind == "attention_weighted" else None
    wanted = kmeans_centroids(grouped(24), 8, weights)
    assert torch.allclose(index.stretches[0].lists.centroids, wanted)


def test_offline_centroids_come_back_from_their_file(tmp_path):
    learned = learn_centroids([grouped(20, seed).transpose(1, 2) for seed in (3, 4)], 8)
    path = save_centroids(tmp_path / "centroids.npz", {LAYER.layer: learned, 5: learned * 2})
    assert [file.name for file in tmp_path.iterdir()] == ["centroids.npz"]
    assert load_centroids(path, LAYER).equal(learned)
    policy = get_policy("ctkvr", {**SMALL, "centroids": "offline", "offline": str(path)})
    assert policy.prompt_window == 0
    keys, values = tensors(N)
    index = policy.build(keys, values, queries(0).permute(1, 2, 0, 3), LAYER)
    assert index.stretches[0].lists.centroids.equal(learned)
    both = torch.cat([grouped(20, 3), grouped(20, 4)], 1)
    assert learned.equal(kmeans_centroids(both, 8))


def test_bad_centroid_files_are_refused(tmp_path):
    good = learn_centroids([grouped(20).transpose(1, 2)], 8)
    cases = {
        "absent": (tmp_path / "absent.npz", "no centroids can be read"),
        "other layer": (save_centroids(tmp_path / "a.npz", {1: good}), "layer 3"),
        "dimension": (save_centroids(tmp_path / "b.npz", {3: good[..., :4]}), "shape"),
        "not finite": (save_centroids(tmp_path / "c.npz", {3: good * math.nan}), "finite"),
        "text": (tmp_path / "d.npz", "no centroids can be read"),
        "objects": (tmp_path / "e.npz", "no centroids can be read"),
        "one array": (tmp_path / "f.npy", "no centroids can be read"),
    }
    cases["text"][0].write_text("hello")
    np.savez(cases["objects"][0], layer_3=np.array([{}], dtype=object))
    np.save(cases["one array"][0], np.zeros(3))
    for path, message in cases.values():
        with pytest.raises(InputError, match=message):
            load_centroids(path, LAYER)
    keys, values = tensors(20)
    policy = get_policy("ctkvr", {"centroids": "offline", "offline": str(tmp_path / "g.npz")})
    save_centroids(tmp_path / "g.npz", {3: good[:1]})
    with pytest.raises(InputError, match="1 kv heads"):
        policy.build(keys, values, queries(0).permute(1, 2, 0, 3), LAYER)
    with pytest.raises(InputError):
        learn_centroids([], 8)


def test_simhash_agreement_estimates_the_angle():
    keys, _ = tensors(400)
    signs = signatures(keys)[0]
    centred = keys[0].double() - keys[0].double().mean(0)
    cosines = torch.nn.functional.cosine_similarity(centred[:200], centred[200:]).clamp(-1, 1)
    agreement = (signs[:200] == signs[200:]).double().mean(1)
    assert float((agreement - (1 - torch.arccos(cosines) / math.pi)).abs().mean()) < 0.06
    assert signs.shape == (400, BITS) and set(signs.unique().tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("similarity", [0.6, 0.75, 0.93])
def test_thinned_lists_drop_what_a_better_token_nearly_repeats(similarity):
    keys, _ = tensors(120)
    keys[:, 60:] = keys[:, :60] + 0.02
    signs = signatures(keys)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.stack([torch.randperm(120, generator=generator)[:50] for _ in range(HEADS * 5)])
    tokens = tokens.view(HEADS, 5, 50)
    tokens[0, 0, 45:] = -1
    found = thin(tokens, signs, similarity)
    dropped = 0
    for head in range(HEADS):
        for c in range(5):
            row = [t for t in tokens[head, c].tolist() if t >= 0]
            kept = [
                t
                for rank, t in enumerate(row)
                if not any(
                    (signs[head, t] == signs[head, better]).sum() >= similarity * BITS
                    for better in row[:rank]
                )
            ]
            assert found[head, c].tolist() == kept + [-1] * (50 - len(kept))
            dropped += len(row) - len(kept)
    assert dropped > 0


def test_simhash_saves_scores():
    plain, thinned = (get_policy("ctkvr", {**SMALL, "simhash": s}) for s in (0.0, 0.75))
    keys, values = tensors(N + 1)
    bytes_read = []
    for policy in (plain, thinned):
        index = policy.build(keys[:, :N], values[:, :N], grouped(8).transpose(1, 2), LAYER)
        policy.append(index, keys[:, N:], values[:, N:], torch.tensor([N]))
        bytes_read.append(int(policy.select(index, queries(1), torch.tensor([N])).scan_bytes.sum()))
    assert bytes_read[1] < bytes_read[0]


def test_int8_error_is_within_half_a_step():
    keys, _ = tensors(50)
    keys[0, 3] = 0
    keys[1, 4] *= 1e6
    error = (as_int8(keys).double() - keys.double()).abs().amax(-1)
    assert (error <= keys.double().abs().amax(-1) / 254 * (1 + 1e-5)).all()
    assert as_int8(keys)[0, 3].eq(0).all()


def stretch_of(centroids, rows, probed) -> Stretch:
    """One kv head: centroids [C, G, d], queries [I, G, d], probes [I, P]."""
    lists = InvertedLists(centroids[None], torch.zeros(1, len(centroids), 0, dtype=torch.int64))
    return Stretch(lists, queries=rows[:, None], probed=torch.tensor(probed)[:, None])


def test_a_hot_list_splits_into_a_slot_that_two_cold_ones_free():
    """Uses 4, 1, 0, 0 (mean 1.25): list 0 splits, 2 and 3 merge, 1 stays."""
    centroids = grouped(4, seed=6)[0]
    first, second = grouped(2, seed=7)[0]
    rows = torch.stack([first, second, first + 0.01, second + 0.01, centroids[1], first])
    stretch = stretch_of(centroids, rows, [[0], [0], [0], [0], [1], [-1]])
    found = next_centroids(stretch)[0]
    assert torch.allclose(found[1], centroids[1])
    assert torch.allclose(found[2], (centroids[2] + centroids[3]) / 2)
    halves = sorted([found[0].sum().item(), found[3].sum().item()])
    wanted = sorted([(first + 0.005).sum().item(), (second + 0.005).sum().item()])
    assert halves == pytest.approx(wanted, abs=1e-4)


def test_a_merge_is_weighted_by_uses_and_takes_the_most_similar():
    """Uses 9, 0, 1, 1 (mean 2.75): 1 is coldest, its closest is 3; 3 counts twice."""
    centroids = grouped(4, seed=6)[0]
    centroids[3] = centroids[1] * 1.1 + 0.01
    rows = grouped(11, seed=8)[0]
    found = next_centroids(stretch_of(centroids, rows, [[0]] * 9 + [[2], [3]]))[0]
    assert torch.allclose(found[1], (centroids[1] + 2 * centroids[3]) / 3, atol=1e-6)
    assert torch.allclose(found[2], centroids[2])


def test_nothing_changes_without_uses_or_where_queries_are_alike():
    centroids = grouped(4, seed=6)[0]
    unseen = stretch_of(centroids, grouped(3)[0], [[-1]] * 3)
    assert next_centroids(unseen)[0].equal(centroids)
    alike = stretch_of(centroids, centroids[:1].expand(8, -1, -1), [[0]] * 8)
    assert next_centroids(alike)[0].equal(centroids)


def run_dynamic(policy, steps, chunk, index=None):
    keys, values = tensors(N + steps)
    if index is None:
        index = policy.build(keys[:, :N], values[:, :N], grouped(8).transpose(1, 2), LAYER)
    query, positions = queries(steps, seed=9), torch.arange(N, N + steps)
    query[: steps // 2] += 3 * query[:1]
    found = []
    for start in range(0, steps, chunk):
        part = slice(start, start + chunk)
        missing = slice(index.store.length, max(index.store.length, N + min(start + chunk, steps)))
        if missing.start < missing.stop:
            policy.append(
                index, keys[:, missing], values[:, missing], torch.arange(missing.start, missing.stop)
            )
        selection = policy.select(index, query[part], positions[part])
        rows = selection.positions.sort(-1).values
        found += [[row[row >= 0].tolist() for row in step] for step in rows]
    return index, found


@pytest.mark.parametrize("chunk", [1, 7, 20, 31])
def test_dynamic_lists_do_not_depend_on_how_steps_are_grouped(chunk):
    policy = get_policy("ctkvr", {**SMALL, "dynamic": 20})
    index, together = run_dynamic(policy, 70, 70)
    assert len(index.stretches) == 4
    before, after = (index.stretches[i].lists.centroids for i in (0, 1))
    assert not before.equal(after)
    assert run_dynamic(policy, 70, chunk)[1] == together
    assert run_dynamic(policy, 70, chunk, index)[1] == together


def test_a_late_step_seen_first_does_not_spoil_the_lists():
    policy = get_policy("ctkvr", {**SMALL, "dynamic": 20})
    _, together = run_dynamic(policy, 70, 70)
    keys, values = tensors(N + 70)
    index = policy.build(keys[:, :N], values[:, :N], grouped(8).transpose(1, 2), LAYER)
    policy.append(index, keys[:, N:], values[:, N:], torch.arange(N, N + 70))
    policy.select(index, queries(70, seed=9)[-1:], torch.tensor([N + 69]))
    assert run_dynamic(policy, 70, 10, index)[1] == together


def test_decode_made_tokens_leave_the_tail_at_the_next_stretch():
    policy = get_policy("ctkvr", {**SMALL, "dynamic": 20})
    keys, values = tensors(N + 60)
    index = policy.build(keys[:, :N], values[:, :N], grouped(8).transpose(1, 2), LAYER)
    policy.append(index, keys[:, N:], values[:, N:], torch.arange(N, N + 60))
    positions = torch.tensor([N + 19, N + 20, N + 59])
    selection = policy.select(index, queries(3), positions)
    for step, start in enumerate((N, N + 5, N + 40)):
        row = selection.positions[step, 0, : selection.resident]
        assert row[row >= 0].tolist() == [*range(4), *range(start, int(positions[step]) + 1)]
    assert int(index.stretches[2].lists.tokens.max()) >= N
    probes = nearest(index.stretches[2].lists.centroids, queries(3)[2:], 2)
    assert index.stretches[2].probed[19].equal(probes[0])
