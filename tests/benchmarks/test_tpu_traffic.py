"""What is read off compiled TPU programs, on programs written by hand."""

from pathlib import Path

import compile_steps
import pytest
import rows
import traffic

PAGE = Path(__file__).parents[2] / "benchmarks" / "README.md"

# Two replicas of two chips. What every step does, what a loop does three times (its
# counter goes up by two, to five), and what stands in a loop of as many passes as the
# flag says.
PROGRAM = """HloModule jit_train, is_scheduled=true, num_partitions=4

FileNames
1 "/home/me/model.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%blocks (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %part = f32[8]{0} get-tuple-element(%s), index=1
  %whole = f32[16]{0} all-gather(%part), channel_id=2, replica_groups=[2,2]<=[4], dimensions={0}, metadata={op_name="x/dot" stack_frame_id=1}
  %counter = s32[] get-tuple-element(%s), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%counter, %two)
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %part)
}

%three (s: (s32[], f32[8])) -> pred[] {
  %s.1 = (s32[], f32[8]{0}) parameter(0)
  %count = s32[] get-tuple-element(%s.1), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%count, %limit), direction=LT
}

%sync (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s.2 = (s32[], f32[8]{0}) parameter(0)
  %drift = f32[8]{0} get-tuple-element(%s.2), index=1
  %mean = f32[8]{0} all-reduce(%drift), channel_id=3, replica_groups={{0,2},{1,3}}, to_apply=%three
  %moved = f32[8]{0} collective-permute(%mean), channel_id=4, source_target_pairs={{0,1},{2,3}}
  %all = f32[8]{0} all-reduce(%drift), channel_id=5, replica_groups=[1,4]<=[4], to_apply=%three
  ROOT %t.2 = (s32[], f32[8]{0}) tuple(%s.2, %s.2)
}

%once (s: (s32[], f32[8])) -> pred[] {
  %s.3 = (s32[], f32[8]{0}) parameter(0)
  %count.3 = s32[] get-tuple-element(%s.3), index=0
  ROOT %less.3 = pred[] compare(%count.3, %count.3), direction=LT
}

ENTRY %main.5 (x: f32[8]) -> f32[8] {
  %x = f32[8]{0:T(128)} parameter(0)
  %wide = f32[3,100]{0,1:T(8,128)} fusion(%x), kind=kLoop, calls=%three, metadata={op_name="x/add" stack_frame_id=1}
  %model = (s32[], f32[8]{0}) while(%x), condition=%three, body=%blocks
  %pmax.1 = s32[] all-reduce(%x), channel_id=1, replica_groups={{0,2},{1,3}}, to_apply=%three, metadata={op_name="x/pmax"}
  %least = s32[] minimum(%pmax.1, %pmax.1)
  ROOT %w = (s32[], f32[8]{0}) while(%least), condition=%once, body=%sync
}
"""  # noqa: E501
SENT_BY_RUNTIME = """HloModule jit_train, is_scheduled=true, num_partitions=2

ENTRY %main.5 (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %after-all = token[] after-all()
  %send = (f32[8]{0}, u32[], token[]) send(%x, %after-all), channel_id=2, frontend_attributes={_xla_host_transfer_rendezvous="pmax.7_0",_xla_megascale_target="{1,2}x{0:15}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[8]{0}, u32[], token[]) recv(%after-all), channel_id=1, frontend_attributes={_xla_host_transfer_rendezvous="pmax.7_0"}
  %send-done = token[] send-done(%send), channel_id=2
  %work = f32[8]{0} fusion(%x), kind=kLoop, calls=%main.5
  %recv-done = (f32[8]{0}, token[]) recv-done(%recv), channel_id=1
  ROOT %w = f32[8]{0} while(%recv-done), condition=%main.5, body=%main.5
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def reader():
    return traffic.Reader(PROGRAM, chips=2, slices=1)


def test_where_when_and_how_often(reader):
    found = {
        (x.kind, x.across, x.at_sync, x.times, x.size, x.sharers): x.sent
        for x in reader.transfers()
    }
    assert found == {
        ("all-gather", False, False, 3, 2, 1): 3 * 32,
        ("all-reduce", True, False, 1, 2, 1): 32,
        ("all-reduce", True, True, 1, 2, 1): 32,
        ("collective-permute", False, True, 1, 2, 1): 32,
        # Over all four chips: what passes between the replicas, divided over two chips.
        ("all-reduce", True, True, 1, 2, 2): 16,
    }


def test_what_is_put_together_and_where_it_comes_from(reader):
    (gathered,) = [x for x in reader.transfers() if x.kind == "all-gather"]
    assert (gathered.given, gathered.whole, gathered.shape) == (32, 64, "f32[16]")
    assert (gathered.origin, gathered.source) == ("x/dot", "me/model.py:7")


def test_arrays_are_padded_to_tiles(reader):
    # The layout has the axis of 3 as the last one, which is padded to 128.
    size, shape, origin, source = reader.largest_arrays()[0]
    assert (size, shape) == (4 * 128 * 104, "f32[3,100]")
    assert (origin, source) == ("1 x fusion x/add", "me/model.py:7")


def test_a_flag_for_which_the_chip_waits(reader):
    flag = reader.flag()
    assert flag.form == "all-reduce"
    assert (flag.starts, flag.ends, flag.used) == (3 / 6, 3 / 6, round(5 / 6, 3))
    assert (flag.loops_between, flag.last) == (0, round(2 / 6, 3))


def test_transfers_between_slices():
    reader = traffic.Reader(SENT_BY_RUNTIME, chips=2, slices=2)
    (sent,) = reader.transfers()
    assert (sent.kind, sent.across, sent.size, sent.sent) == ("all-reduce", True, 2, 32)
    flag = reader.flag()
    assert (flag.form, flag.loops_between) == ("send and recv", 1)
    assert (flag.starts, flag.ends, flag.used) == (0.25, 0.75, 0.875)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("add(%counter, %two)", "multiply(%counter, %two)", "its counter by multiply"),
        ("add(%counter, %two)", "add(%counter, %counter)", "its counter by add"),
        ("tuple(%next, %part)", "fusion(%next, %part)", "its counter by fusion"),
        ("(%count, %limit), direction=LT", "(%count, %limit), direction=GE", "GE"),
        ("%count = s32[] get-tuple-element", "%count = s32[] copy", "goes on by"),
    ],
)
def test_a_loop_that_is_not_understood(old, new, message):
    assert old in PROGRAM
    reader = traffic.Reader(PROGRAM.replace(old, new), chips=2, slices=1)
    with pytest.raises(ValueError, match=message):
        reader.transfers()


def test_the_page_has_the_tables_of_the_results():
    text = PAGE.read_text("utf-8").splitlines()
    found = rows.lines(compile_steps.read_results(compile_steps.RESULTS))
    assert [line for line in found if line and line not in text] == []
