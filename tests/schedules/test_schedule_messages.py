"""Orders of sends and receives where both ends block: which deadlock, which take the wrong tensor, and one that always works."""

from __future__ import annotations

import pytest

from trainwright.errors import SpecError
from trainwright.schedules import SCHEDULES
from trainwright.schedules.messages import Message, blocking_orders, check_messages, receive_before_use, with_messages


def test_1f1b_deadlocks_unless_sends_and_receives_are_posted_together():
    """Why Megatron has send_forward_recv_backward: in steady state both neighbors first send."""
    found = blocking_orders(SCHEDULES["1f1b"].table(4, 8))
    assert found["one by one"].startswith("deadlock: rank 0 waits at 0SEND_F3 for rank 1")
    assert found["send and receive together"] == "fine"


def test_gpipe_never_deadlocks():
    assert set(blocking_orders(SCHEDULES["gpipe"].table(4, 8)).values()) == {"fine"}


def test_both_directions_to_one_neighbor_need_the_same_order_at_both_ends():
    """ZB-V sends activations down and gradients of the second chunk down the same link."""
    found = blocking_orders(SCHEDULES["zb-v"].table(4, 8))
    assert "rank 0 sends 0SEND_F6 where rank 1 expects 7SEND_B0" in found["send and receive together"]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_one_common_order_works_even_one_by_one(name):
    table = SCHEDULES[name].table(4, 8)
    programs = with_messages(table)
    check_messages(programs, table.placement)
    messages = [m for p in programs for m in p if isinstance(m, Message)]
    assert len(messages) == len(set(messages))
    assert {m.other for m in messages} == set(messages)


def test_faults_are_found():
    table = SCHEDULES["1f1b"].table(2, 2)
    good = with_messages(table)

    def broken(edit) -> str:
        programs = [list(p) for p in good]
        edit(programs)
        with pytest.raises(SpecError) as error:
            check_messages(programs, table.placement)
        return str(error.value)

    first = next(i for i, m in enumerate(good[1]) if isinstance(m, Message))
    assert "comes before 1RECV_F0" in broken(lambda p: p[1].pop(first))
    assert "is there twice" in broken(lambda p: p[1].insert(first, p[1][first]))
    assert "comes before what it sends is computed" in broken(lambda p: p[0].insert(0, p[0].pop(1)))
    assert "has no" in broken(lambda p: p[0].pop(1))


def test_steps_hold_what_is_posted_at_once():
    steps = receive_before_use(SCHEDULES["1f1b"].table(2, 4), together=True)
    posted = [tuple(str(m) for m in s) for s in steps[0] if isinstance(s[0], Message)]
    assert ("0SEND_F1", "0RECV_B0") in posted
