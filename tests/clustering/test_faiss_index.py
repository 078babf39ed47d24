"""The Faiss wrapper against direct Faiss calls and against exact products; every bad input."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from kvtune.clustering.faiss_index import FaissIndex, faiss_kmeans, train_codebook
from kvtune.clustering.key_index import KINDS, IndexSpec
from kvtune.errors import InputError

faiss = pytest.importorskip("faiss")
N, DIM, Q, K = 900, 16, 37, 10
FAISS_KINDS = [kind for kind in KINDS if kind != "kmeans"]


def vectors(n, seed=0, dim=DIM):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) + 0.5


KEYS, QUERIES = vectors(N), vectors(Q, seed=1)


def built(kind, keys=KEYS, metric="inner_product", **parameters):
    return FaissIndex.build(keys, IndexSpec.of(kind, parameters, metric))


def direct(kind, metric):
    """The same index made by hand."""
    if kind == "flat":
        index = faiss.IndexFlat(DIM, metric)
    elif kind == "ivf":
        index = faiss.index_factory(DIM, "IVF20,Flat", metric)
        index.cp.seed, index.nprobe = 0, 3
    elif kind == "hnsw":
        index = faiss.IndexHNSWFlat(DIM, 8, metric)
        index.hnsw.efConstruction, index.hnsw.efSearch = 30, 25
    else:
        index = faiss.IndexPQ(DIM, 4, 5, metric)
        index.pq.cp.seed = 0
    faiss.omp_set_num_threads(1)
    index.train(KEYS.numpy())
    index.add(KEYS.numpy())
    return index


SETTINGS = {
    "flat": {},
    "ivf": {"nlist": 20, "nprobe": 3},
    "hnsw": {"M": 8, "efConstruction": 30, "efSearch": 25},
    "pq": {"subvectors": 4, "bits": 5},
}


@pytest.mark.parametrize("kind", FAISS_KINDS)
@pytest.mark.parametrize("metric", ["inner_product", "l2"])
def test_answers_as_faiss_does(kind, metric):
    ours = built(kind, metric=metric, **SETTINGS[kind]).search(QUERIES, K)
    inner = metric == "inner_product"
    theirs = direct(kind, faiss.METRIC_INNER_PRODUCT if inner else faiss.METRIC_L2)
    scores, ids = theirs.search(QUERIES.numpy(), K)
    assert np.array_equal(ours.ids, ids)
    assert np.allclose(ours.scores, scores if inner else -scores, rtol=1e-5)


def test_flat_is_the_exact_inner_product():
    exact = QUERIES.double() @ KEYS.double().T
    found = built("flat").search(QUERIES, K)
    assert np.array_equal(found.ids, torch.argsort(exact, descending=True)[:, :K].numpy())
    assert (found.scan_bytes == N * DIM * 4).all()


@pytest.mark.parametrize("kind", ["ivf", "hnsw", "pq"])
def test_a_query_is_answered_alike_alone_and_in_company(kind):
    index = built(kind, **SETTINGS[kind])
    together = index.search(QUERIES, K)
    for row in range(Q):
        alone = index.search(QUERIES[row : row + 1], K)
        assert np.array_equal(alone.ids[0], together.ids[row])
        assert alone.scores[0].tobytes() == together.scores[row].tobytes()
        assert alone.scan_bytes[0] == together.scan_bytes[row]


@pytest.mark.parametrize("kind", FAISS_KINDS)
def test_two_builds_answer_alike(kind):
    first, second = (built(kind, **SETTINGS[kind]).search(QUERIES, K) for _ in range(2))
    assert np.array_equal(first.ids, second.ids) and np.array_equal(first.scores, second.scores)


def test_scan_bytes_of_lists_count_centroids_and_probed_vectors():
    index, theirs = built("ivf", **SETTINGS["ivf"]), direct("ivf", faiss.METRIC_INNER_PRODUCT)
    _, lists = theirs.quantizer.search(QUERIES.numpy(), 3)
    for row, probed in enumerate(lists.tolist()):
        vectors_read = sum(theirs.invlists.list_size(number) for number in probed)
        assert index.search(QUERIES, K).scan_bytes[row] == 20 * DIM * 4 + vectors_read * (DIM * 4 + 4)


def test_scan_bytes_of_a_graph_lie_between_the_answer_and_everything():
    index = built("hnsw", **SETTINGS["hnsw"])
    found = index.search(QUERIES, K)
    assert (found.scan_bytes >= 25 * DIM * 4).all()
    wide = index.search(QUERIES, K, {"efSearch": 200})
    assert wide.scan_bytes.mean() > 2 * found.scan_bytes.mean()


def test_scan_bytes_of_codes_and_half_precision():
    assert built("pq", **SETTINGS["pq"]).search(QUERIES, 1).scan_bytes[0] == N * 3 + 32 * DIM * 4
    assert built("flat", KEYS.bfloat16()).search(QUERIES, 1).scan_bytes[0] == N * DIM * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_precision_is_cast(dtype):
    keys = KEYS.to(dtype)
    found = built("flat", keys).search(QUERIES.to(dtype), K)
    exact = QUERIES.to(dtype).float() @ keys.float().T
    assert np.allclose(found.scores, exact.topk(K).values.numpy(), rtol=1e-5)


def test_absent_neighbours_are_minus_one_and_minus_infinity():
    found = built("flat", KEYS[:6]).search(QUERIES, K)
    assert (found.ids[:, 6:] == -1).all() and np.isneginf(found.scores[:, 6:]).all()
    assert (found.ids[:, :6] >= 0).all() and np.isfinite(found.scores[:, :6]).all()
    few = built("ivf", nlist=300, nprobe=1).search(QUERIES, 50)
    assert (few.ids == -1).any() and np.array_equal(few.ids == -1, np.isneginf(few.scores))


def test_no_queries_no_answers():
    found = built("ivf").search(QUERIES[:0], K)
    assert found.ids.shape == (0, K) and found.scan_bytes.shape == (0,)


def test_probing_every_list_is_exact():
    found = built("ivf", nlist=20, nprobe=999).search(QUERIES, K)
    assert np.array_equal(found.ids, built("flat").search(QUERIES, K).ids)


def test_thin_training_is_noted_not_printed(capfd):
    assert built("ivf", nlist=20).notes == []
    index = built("ivf", KEYS[:100], nlist=64)
    assert index.notes == ["100 keys train 64 lists; Faiss advises 39 per list"]
    built("pq", KEYS[:70])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
def test_broken_vectors_are_located(value, word):
    keys = KEYS.clone()
    keys[77, 3] = value
    with pytest.raises(InputError, match=rf"key 77 is {word} \(channel 3\)"):
        built("flat", keys)
    with pytest.raises(InputError, match=f"query 0 is {word}"):
        built("flat").search(keys[77:78], K)


@pytest.mark.parametrize(
    ("kind", "parameters", "sentence"),
    [
        ("ivf", {"nlist": 64}, "needs at least 64 keys to train; there are 20"),
        ("pq", {"bits": 6}, "needs at least its 64 centroids' number of keys to train; there are 20"),
        ("pq", {"subvectors": 3}, "head dimension of 16 does not divide into 3 subvectors"),
    ],
)
def test_too_few_keys_and_odd_dimensions_are_explained(kind, parameters, sentence):
    with pytest.raises(InputError, match=sentence) as raised:
        built(kind, KEYS[:20], **parameters)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("arguments", "sentence", "hint"),
    [
        (("ivff",), "unknown kind of index 'ivff'", "ivf"),
        (("ivf", {"nprob": 3}), "unknown parameter of index kind 'ivf' 'nprob'", "nprobe"),
        (("hnsw", {"efsearch": 3}), "unknown parameter of index kind 'hnsw' 'efsearch'", "efSearch"),
        (("flat", {"nprobe": 3}), "index kind 'flat' has no parameters, so no 'nprobe'", None),
        (("ivf", {}, "cosine"), "unknown metric 'cosine'", "inner_product"),
        (("kmeans", {}, "l2"), "by inner product only", None),
        (("ivf", {"nprobe": 0}), "nprobe of index kind 'ivf' must be 1 or more, not '0'", None),
        (("ivf", {"nprobe": True}), "must be 1 or more, not 'True'", None),
        (("ivf", {"nprobe": 2.5}), "must be 1 or more, not '2.5'", None),
        (("pq", {"bits": 17}), "must be 1…16, not '17'", None),
    ],
)
def test_unknown_names_and_values_are_refused(arguments, sentence, hint):
    with pytest.raises(InputError) as raised:
        IndexSpec.of(*arguments)
    assert sentence in raised.value.message
    assert hint is None or hint in (raised.value.hint or "")


def test_shapes_that_do_not_fit_are_refused():
    index = built("flat")
    with pytest.raises(InputError, match="have 8 channels; the index has 16"):
        index.search(QUERIES[:, :8], K)
    with pytest.raises(InputError, match=r"must be a floating-point tensor \[N, d\]"):
        built("flat", KEYS[None])
    with pytest.raises(InputError, match="must be a floating-point tensor"):
        built("flat", KEYS.long())
    with pytest.raises(InputError, match="no keys to index"):
        built("ivf", KEYS[:0])
    with pytest.raises(InputError, match="1 neighbour or more"):
        index.search(QUERIES, 0)


def test_without_faiss_the_way_to_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match="not installed") as raised:
        built("flat")
    assert "pip install" in (raised.value.hint or "")


@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="this Faiss has a GPU")
def test_a_cpu_build_says_that_it_ignores_the_gpu():
    index = FaissIndex.build(KEYS, IndexSpec.of("flat"), device="cuda")
    assert index.notes == ["this Faiss is built for the CPU: the index lies there"]
    assert np.array_equal(index.search(QUERIES, K).ids, built("flat").search(QUERIES, K).ids)


@pytest.mark.gpu
@pytest.mark.skipif(not hasattr(faiss, "StandardGpuResources"), reason="needs faiss-gpu")
@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_gpu_finds_what_the_cpu_finds_and_hands_large_answers_over(kind):
    keys = vectors(5000)
    spec = IndexSpec.of(kind, {"nprobe": 999} if kind == "ivf" else {})
    on_gpu = FaissIndex.build(keys, spec, device="cuda")
    exact = built("flat", keys)
    assert on_gpu.notes == [] or kind == "ivf"
    assert np.array_equal(on_gpu.search(QUERIES, K).ids, exact.search(QUERIES, K).ids)
    assert np.array_equal(on_gpu.search(QUERIES, 3000).ids, exact.search(QUERIES, 3000).ids)
    assert "3000 neighbours exceed a GPU's 2048: the CPU searches" in on_gpu.notes


@pytest.mark.parametrize("kind", FAISS_KINDS)
def test_saved_and_loaded_index_answers_alike(kind, tmp_path):
    index = built(kind, **SETTINGS[kind])
    index.save(tmp_path / "keys.faiss")
    loaded = FaissIndex.load(tmp_path / "keys.faiss", index.spec, index.item_bytes)
    first, second = index.search(QUERIES, K), loaded.search(QUERIES, K)
    assert np.array_equal(first.ids, second.ids) and np.array_equal(first.scan_bytes, second.scan_bytes)


def test_a_file_that_is_no_index_is_named(tmp_path):
    (tmp_path / "keys.faiss").write_bytes(b"not an index")
    with pytest.raises(InputError, match=r"keys.faiss' is not a Faiss index"):
        FaissIndex.load(tmp_path / "keys.faiss", IndexSpec.of("flat"), 4)


def test_kmeans_beats_its_own_start_and_assigns_to_the_nearest():
    centroids, nearest = faiss_kmeans(KEYS, 12, iterations=8)
    distance = torch.cdist(KEYS.double(), centroids.double())
    assert torch.equal(distance.argmin(1), nearest)
    one_pass, _ = faiss_kmeans(KEYS, 12, iterations=1)
    assert distance.amin(1).square().sum() < torch.cdist(KEYS, one_pass).amin(1).square().sum()
    with pytest.raises(InputError, match="20 keys cannot form 21 clusters"):
        faiss_kmeans(KEYS[:20], 21)


def test_codebook_is_that_of_faiss():
    index = direct("pq", faiss.METRIC_L2)
    theirs = faiss.vector_to_array(index.pq.centroids).reshape(4, 32, 4)
    assert np.array_equal(train_codebook(KEYS, 4, 5).numpy(), theirs)


def test_empty_lists_do_not_use_up_the_probes():
    keys = torch.where(torch.arange(200) % 2 == 0, 1.0, -1.0)[:, None].expand(200, DIM)
    index = built("ivf", keys, nlist=25, nprobe=1)
    found = index.search(QUERIES, 100)
    assert (found.ids >= 0).any(1).all()
    assert (built("ivf", keys, nlist=25, nprobe=25).search(QUERIES, 100).ids >= 0).all()
