"""The journal makes one sequence of what several workers send."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.types import FinishReason
from router.generation import ChoiceDelta
from router.journal import ChoiceJournal, Journal

ANSWER = tuple(range(100, 120))


def test_appends_in_order_and_reports_only_new_tokens():
    journal = ChoiceJournal(3, 20)
    assert journal.record(0, [100]) == ChoiceDelta(3, (100,))
    assert journal.record(0, [100, 101]) == ChoiceDelta(3, (101,))
    assert journal.record(0, [100, 101]) is None
    assert journal.token_ids == [100, 101]


def test_early_tokens_wait_for_the_gap_and_the_finish_waits_with_them():
    journal = ChoiceJournal(0, 20)
    assert journal.record(2, [102, 103], FinishReason.LENGTH) is None
    assert journal.finish is None
    assert journal.record(0, [100, 101]) == ChoiceDelta(0, ANSWER[:4], FinishReason.LENGTH)


def test_finish_without_tokens_ends_the_choice():
    journal = ChoiceJournal(0, 20)
    journal.record(0, [100])
    assert journal.record(1, [], FinishReason.STOP) == ChoiceDelta(0, (), FinishReason.STOP)
    assert journal.record(1, [101]) is None


def test_tokens_past_the_announced_end_are_dropped():
    journal = ChoiceJournal(0, 20)
    journal.record(1, [101, 102])
    assert journal.record(0, [100], FinishReason.STOP) == ChoiceDelta(0, (100,), FinishReason.STOP)
    assert journal.num_tokens == 1


def test_other_token_at_a_known_position_is_counted_and_ignored():
    journal = ChoiceJournal(0, 20)
    journal.record(0, [100, 101])
    assert journal.record(1, [999, 102]) == ChoiceDelta(0, (102,))
    assert (journal.conflicts, journal.token_ids) == (1, [100, 101, 102])


def test_memory_is_bounded_by_max_tokens():
    journal = ChoiceJournal(0, 4)
    journal.record(1, range(10_000))
    assert journal.num_early == 3
    journal.record(-5, [1])
    assert journal.num_early == 3
    assert journal.num_tokens == 0


def test_stop_string_truncates_and_ends():
    journal = Journal(2, 20)
    journal[0].record(0, [100, 101, 102])
    journal[0].stop(2, FinishReason.STOP)
    assert journal.num_tokens == 2
    assert not journal.finished
    journal[1].record(0, [7], FinishReason.LENGTH)
    assert journal.finished
    assert journal.num_tokens == 3


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(1, 20)), max_size=40))
def test_any_delivery_order_yields_the_answer_once(spans):
    journal = ChoiceJournal(0, len(ANSWER))
    seen: list[int] = []
    for start, end in [*spans, (0, len(ANSWER))]:
        finish = FinishReason.LENGTH if end >= len(ANSWER) else None
        delta = journal.record(start, ANSWER[start:end], finish)
        seen += delta.token_ids if delta else ()
    assert tuple(seen) == ANSWER
    assert journal.finish is FinishReason.LENGTH
    assert journal.conflicts == 0
