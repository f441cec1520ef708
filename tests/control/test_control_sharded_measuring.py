"""What 2 and 4 ranks measure: every element once, one result, and nobody waits for ever."""

import math

import pytest
from ranks_run import found_on


@pytest.fixture(scope="module", params=[2, 4])
def found(request):
    return found_on(request.param)


def on_all(found, name):
    """What all ranks found, which must be the same to the bit."""
    by_rank = found[name]
    assert "error" not in by_rank[0], by_rank[0]["error"]
    assert all(one == by_rank[0] for one in by_rank), by_rank
    return by_rank[0]


def norms(measured):
    return [one["norm"] for one in measured]


def test_b25_a_sharded_and_a_plain_gradient_have_one_norm(found):
    assert norms(on_all(found, "b25_sharded_and_plain")) == [pytest.approx(math.sqrt(59))]


def test_b27_the_cosine_is_of_the_whole_vector_not_of_a_shard(found):
    by_mesh, by_name = on_all(found, "b27_cosine_over_shards")
    assert by_mesh["cosine"] == pytest.approx(-0.28, abs=1e-15)
    assert by_name == by_mesh


def test_b27_empty_shards_of_small_parameters_are_fine(found):
    sizes = found["b27_num_elements"]
    assert sizes == [1] + [0] * (len(sizes) - 1)
    (one,) = on_all(found, "b27_one_element")
    assert one["norm"] == pytest.approx(math.sqrt(31))
    assert one["cosine"] == pytest.approx(1.0)


def test_b28_what_is_replicated_counts_once(found):
    assert norms(on_all(found, "b28_sharded_and_replicated")) == [pytest.approx(math.sqrt(33))]


def test_b29_experts_count_where_they_are_and_idle_ranks_hang_nobody(found):
    distinct_names, same_name, no_token, no_expert, beside = norms(on_all(found, "b29_experts"))
    assert distinct_names == same_name == pytest.approx(math.sqrt(120))
    assert no_token == no_expert == pytest.approx(math.sqrt(20))
    assert beside == pytest.approx(math.sqrt(121))


def test_a_plain_parameter_that_one_rank_alone_has_counts_there(found):
    num_ranks = len(found["stages"])
    wanted = math.sqrt(sum((1.0 + rank) ** 2 for rank in range(num_ranks)))
    assert norms(on_all(found, "stages")) == [pytest.approx(wanted)]


def test_every_layout_over_several_meshes_gives_the_norm_of_the_whole_tensor():
    *one_tensor, own, model = norms(on_all(found_on(4), "several_meshes"))
    assert one_tensor == [pytest.approx(math.sqrt(204))] * 6
    assert own == pytest.approx(math.sqrt(204 + 4 * 204))
    assert model == pytest.approx(math.sqrt(3 * 204 + 1))


def test_a_strided_shard_is_a_shard():
    assert norms(on_all(found_on(4), "strided")) == [pytest.approx(math.sqrt(204))]


def test_a_partial_gradient_is_refused_by_name(found):
    assert on_all(found, "partial").startswith(
        "the gradient of parameter 'a' has placement Partial"
    )


def test_b34_what_is_not_finite_on_one_rank_is_not_finite_for_all(found):
    *bad, after = on_all(found, "one_rank_non_finite")
    assert [one["finite"] for one in bad] == [False] * 4
    assert after["norm"] == pytest.approx(math.sqrt(2))


def test_a_rank_without_any_gradient_takes_part(found):
    first, last, everywhere, none = on_all(found, "one_rank_without_gradients")
    assert first == last == none
    assert first["norm"] == pytest.approx(math.sqrt(18))
    assert not everywhere["has_gradient"]


def test_an_error_of_one_rank_is_raised_on_all_and_the_next_step_works(found):
    *texts, everywhere = on_all(found, "one_rank_fails")
    assert (
        texts
        == [
            "its own problem (on rank 1; all ranks stop with it)",
            "found on the way (on rank 1; all ranks stop with it)",
        ]
        * 2
    )
    assert everywhere == "the problem of all"


def test_what_must_not_differ_between_ranks_is_named_on_all_of_them(found):
    *texts, after = on_all(found, "differences")
    wanted = [
        "rank 0 has mode 0, rank 1 mode 1",
        "rank 0 has mode 0, rank 1 mode 1",
        "rank 0 decides on 2 scopes, rank 1 on 1",
        "parameter 'a' has shape [1] on rank 0 and [2] on rank 1",
        "parameter 'a' is in local_parameters on one of ranks 0 and 1",
    ]
    for text, part in zip(texts, wanted, strict=True):
        assert part in text
    assert after["norm"] == 1.0


def test_a_mesh_that_reaches_beyond_the_process_group_is_refused():
    inside = found_on(4)["beyond_the_group"][:2]
    text = "'a' lies on ranks [0, 1, 2, 3], and process_group has only [0, 1]"
    assert all(text in one for one in inside)


def test_a_copy_with_a_gradient_on_some_ranks_only_is_counted_once(found):
    assert norms(on_all(found, "gradient_on_some")) == [13.0] * 4


def test_parameters_and_scopes_may_come_and_go(found):
    one, two, again, three, *lists = on_all(found, "changes")
    assert norms([one, two, again, three]) == [pytest.approx(math.sqrt(n)) for n in (1, 2, 1, 3)]
    num_ranks = len(found["changes"])
    for answer, num_lists in zip(lists, (3, 40, 3, 100), strict=True):
        assert answer["norms"] == [float(i) for i in range(num_lists)]
        assert answer["sums"] == [num_ranks * (num_ranks - 1) / 2, num_ranks]


def test_b32_a_step_is_one_all_reduce_and_makes_nothing_larger_than_a_shard(found):
    watched = on_all(found, "b32_one_small_all_reduce")
    assert watched["collectives"] == ["allreduce_.default"]
    assert watched["largest"] <= 1000 * 100


def test_a_part_in_another_dtype_is_wrapped_as_the_whole_it_belongs_to(found):
    dtype, of_sum, values = on_all(found, "wrapped")
    assert dtype == of_sum == "torch.bfloat16"
    assert values == [[2.0 * (2 * row + 1), 2.0 * (2 * row + 2)] for row in range(5)]


def test_a_sharded_broadcast_view_is_written_like_any_gradient(found):
    was_view, values, (measured,) = on_all(found, "broadcast_view")
    assert was_view
    assert values == [[0.5, 0.5]] * 4
    assert measured["norm"] == pytest.approx(math.sqrt(8 * 0.25))


def test_all_ranks_know_the_coarsest_rounding(found):
    assert on_all(found, "roundings") == [2.0**-7, 0.0]


def test_b13_sparse_gradients_count_once_or_on_each_rank_as_dense_ones_do(found):
    num_ranks = len(found["sparse"])
    (measured,) = on_all(found, "sparse")
    assert measured["norm"] == pytest.approx(math.sqrt(2 * 4 + 2 + num_ranks * 2 * 4))
    assert measured["gp"] == pytest.approx(6 + num_ranks * 4)
    lengths = measured["norm"] * math.sqrt(10 + num_ranks * 10)
    assert measured["cosine"] == pytest.approx(measured["gp"] / lengths)


def test_a_process_group_of_some_ranks_leaves_the_others_alone(found):
    (alone, together), (same,), *others = found["a_group_of_some_ranks"]
    assert alone["norm"] == 0.0
    assert together == same
    assert together["norm"] == pytest.approx(math.sqrt(5))
    assert others == [[]] * len(others)
    assert found["not_a_member"][0] is None
    assert all("not a member" in text for text in found["not_a_member"][1:])
