"""The reader of compiled programs, on a program written by hand."""

import hlo
import pytest

PROGRAM = """HloModule jit_train, is_scheduled=true, num_partitions=2

FileNames
1 "train.py"

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%fused (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %scaled = f32[2]{0} multiply(%p, %p)
}

%body (s: (s32[], f32[2])) -> (s32[], f32[2]) {
  %s = (s32[], f32[2]{0}) parameter(0)
  %deep = bf16[2,3]{1,0} all-gather(%s), channel_id=3, dimensions={0}
  ROOT %t = (s32[], /*index=1*/f32[2]{0}) tuple(%s, %s)
}

%condition (s: (s32[], f32[2])) -> pred[] {
  %s.1 = (s32[], f32[2]{0}) parameter(0)
  ROOT %less = pred[] compare(%s.1, %s.1), direction=LT
}

%local.1 (q: f32[2]) -> f32[2] {
  %q = f32[2]{0} parameter(0)
  ROOT %f = f32[2]{0} fusion(%q), kind=kLoop, calls=%fused, metadata={op_name="x"}
}

%sync-2_spmd (r: f32[2]) -> f32[2] {
  %r = f32[2]{0} parameter(0)
  %both = (f32[2]{0}, bf16[3]{0}) all-reduce(%r, %r), channel_id=2, to_apply=%sum
  ROOT %w = (s32[], f32[2]{0}) while(%r), condition=%condition, body=%body
}

ENTRY %main.5 (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %flag = s32[] all-reduce(%x), channel_id=1, to_apply=%sum
  ROOT %c = f32[2]{0} conditional(%flag, %x, %x), branch_computations={%local.1, %sync-2_spmd}
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def program():
    return hlo.parse(PROGRAM)


def names(instructions):
    return sorted(instruction.name for instruction in instructions)


def test_opcodes_shapes_and_bytes(program):
    _, both, loop = program.computations["sync-2_spmd"]
    assert (both.opcode, both.shape) == ("all-reduce", "(f32[2]{0}, bf16[3]{0})")
    assert both.bytes == 4 * 2 + 2 * 3
    assert (loop.opcode, loop.called) == ("while", ("condition", "body"))
    _, flag, conditional = program.computations["main.5"]
    assert (flag.shape, flag.bytes, flag.called) == ("s32[]", 4, ("sum",))
    assert conditional.called == ("local.1", "sync-2_spmd")
    assert program.computations["condition"][1].bytes == 1


def test_the_call_graph_reaches_fusions_and_loops(program):
    assert set(program.reachable(["local.1"])) == {"local.1", "fused"}
    assert "body" in program.reachable(["sync-2_spmd"])
    assert set(program.reachable(["main.5"])) == set(program.computations)


def test_collectives_inside_and_outside_of_branches(program):
    assert names(program.collectives([program.entry])) == ["both", "deep", "flag"]
    assert names(program.collectives([program.entry], branches=False)) == ["flag"]
    assert names(program.collectives(["sync-2_spmd"])) == ["both", "deep"]
    assert program.collectives(["local.1"]) == []


@pytest.mark.parametrize(
    ("attribute", "groups"),
    [
        pytest.param("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]], id="listed"),
        pytest.param("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]], id="iota"),
        pytest.param(
            "replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]], id="transposed"
        ),
        pytest.param(
            "replica_groups=mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]], id="mesh"
        ),
        pytest.param(
            "replica_groups=mesh['a'=2,'b'=2,'c'=1] {'c','a'}",
            [[0, 2], [1, 3]],
            id="axes of a mesh",
        ),
        pytest.param(
            "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}",
            [[0, 2], [1, 3]],
            id="devices of a mesh",
        ),
    ],
)
def test_groups(attribute, groups):
    text = PROGRAM.replace("channel_id=1,", f"channel_id=1, {attribute}, to_x={{}},")
    (flag,) = hlo.parse(text).collectives(["main.5"], branches=False)
    assert flag.groups == groups
