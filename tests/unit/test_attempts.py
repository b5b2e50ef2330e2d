"""A worker's memory of attempts: idempotent, fenced, bounded."""

from cluster.attempts import AttemptBook, Verdict
from cluster.types import AttemptKey, RequestId


def _key(request: str, attempt: int = 1) -> AttemptKey:
    return AttemptKey(RequestId(request), attempt)


def test_repeated_submit_is_a_duplicate_until_it_is_over():
    book = AttemptBook()
    assert book.admit(_key("a"), 0.0) is Verdict.NEW
    assert book.admit(_key("a"), 1.0) is Verdict.DUPLICATE
    book.close(_key("a"), 2.0)
    assert book.admit(_key("a"), 3.0) is Verdict.OVER


def test_lower_attempts_are_fenced_by_higher_ones():
    book = AttemptBook()
    assert book.admit(_key("a", 2), 0.0) is Verdict.NEW
    assert book.admit(_key("a", 1), 0.0) is Verdict.STALE
    assert book.admit(_key("a", 3), 0.0) is Verdict.NEW


def test_cancel_before_submit_leaves_a_tombstone_that_expires():
    book = AttemptBook(ttl_s=60.0)
    book.close(_key("a"), 0.0)
    assert book.admit(_key("a"), 59.0) is Verdict.OVER
    assert book.admit(_key("a"), 121.0) is Verdict.NEW


def test_memory_is_bounded():
    book = AttemptBook(max_entries=100)
    for index in range(10_000):
        book.close(_key(f"unknown-{index}"), 0.0)
        assert book.admit(_key(f"known-{index}"), 0.0) is Verdict.NEW
        book.close(_key(f"known-{index}"), 0.0)
    assert book.num_entries <= 2 * 100 + 1
