"""Which problem sizes the bench measures."""

import pytest

from bench.shapes import SHAPES, Shape, group_of, select


def test_the_groups_have_the_agreed_shapes():
    assert [str(shape) for shape in SHAPES["headline"]] == [
        "4096x4096x4096",
        "8192x14336x4096",
        "8192x4096x1024",
        "2048x6144x4096",
    ]
    assert SHAPES["odd"] == (Shape(1000, 1003, 777),)
    assert len(SHAPES["llama"]) == 5 * 6
    assert Shape(1, 28672, 4096) in SHAPES["llama"]


def test_all_means_every_group_and_each_shape_once():
    shapes = select(["all"])

    assert len(shapes) == len(set(shapes))
    assert set(shapes) == {shape for group in SHAPES.values() for shape in group}


def test_a_shape_of_two_groups_is_measured_once():
    shapes = select(["headline", "llama"])

    assert shapes.count(Shape(2048, 6144, 4096)) == 1 and len(shapes) == 4 + 30 - 2


def test_ms_keep_only_those_m():
    shapes = select(["llama"], [1, 16])

    assert {shape.M for shape in shapes} == {1, 16} and len(shapes) == 10


def test_an_unknown_group_is_named():
    with pytest.raises(ValueError, match="huge"):
        select(["headline", "huge"])


@pytest.mark.parametrize("shape", [Shape(m, 28672, 4096) for m in (1, 16, 128, 256)] + [Shape(1000, 1003, 777)])
def test_small_problems_go_through_graphs(shape):
    assert shape.is_small


@pytest.mark.parametrize("shape", [*SHAPES["headline"], Shape(512, 28672, 4096)])
def test_large_problems_do_not(shape):
    assert not shape.is_small


def test_group_of_names_the_first_group():
    assert group_of(Shape(2048, 6144, 4096)) == "headline"
    assert group_of(Shape(3, 5, 7)) == "other"
