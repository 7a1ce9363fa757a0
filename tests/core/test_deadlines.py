"""Named deadlines: one per key, earliest first, no leftovers."""

from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.deadlines import Deadlines

KEYS = st.sampled_from("abcde")
STEPS = st.lists(
    st.tuples(st.just("arm"), KEYS, st.floats(0, 100))
    | st.tuples(st.just("cancel"), KEYS, st.just(0.0))
    | st.tuples(st.just("pop"), KEYS, st.floats(0, 100)),
    max_size=60,
)


@given(STEPS)
def test_deadlines_do_what_a_dictionary_would_f1(steps: list[tuple[str, str, float]]) -> None:
    deadlines, model = Deadlines(), {}
    for what, key, at in steps:
        if what == "arm":
            deadlines.arm(key, at)
            model[key] = at
        elif what == "cancel":
            deadlines.cancel(key)
            model.pop(key, None)
        else:
            earliest = min(model.values(), default=None)
            due = deadlines.pop_due(at)
            if earliest is None or earliest > at:
                assert due is None
            else:
                assert model.pop(due) == earliest
        assert deadlines.next() == min(model.values(), default=None)
        assert len(deadlines) == len(model)
        assert {key: deadlines.at(key) for key in "abcde"} == {
            key: model.get(key) for key in "abcde"
        }


def test_the_earliest_is_popped_first_and_equal_ones_in_the_order_of_arming() -> None:
    deadlines = Deadlines()
    for key, at in (("late", 3.0), ("first", 1.0), ("second", 1.0)):
        deadlines.arm(key, at)
    assert [deadlines.pop_due(5.0) for _ in range(4)] == ["first", "second", "late", None]


def test_a_deadline_that_is_rearmed_for_ever_takes_bounded_memory_f23() -> None:
    deadlines = Deadlines()
    for step in range(10_000):
        deadlines.arm("renewed", float(step))
    assert len(deadlines._heap) <= 200


def test_a_deadline_is_due_at_its_time_and_not_before() -> None:
    deadlines = Deadlines()
    deadlines.arm("key", 2.0)
    assert deadlines.pop_due(1.999) is None
    assert deadlines.pop_due(2.0) == "key"
