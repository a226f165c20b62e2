"""Errors of unauthenticated clients must not fill the log."""

from ringfold.runtime.log_limit import MAX_LINES, MAX_REPEATS, PERIOD_NS, LogRateLimiter


def test_a_text_is_logged_a_few_times_in_a_period() -> None:
    limit = LogRateLimiter()
    taken = [limit.take(now, "a wrong token") for now in range(100)]
    assert taken == [""] * MAX_REPEATS + [None] * (100 - MAX_REPEATS)
    assert limit.take(100, "another text") == f" ({100 - MAX_REPEATS} similar lines were not logged)"
    assert limit.take(PERIOD_NS, "a wrong token") == ""


def test_texts_that_clients_choose_have_a_common_limit() -> None:
    limit = LogRateLimiter()
    taken = [limit.take(5, f"a frame of {number} bytes") for number in range(1_000)]
    assert sum(line is not None for line in taken) == MAX_LINES
    assert limit.take(5 + PERIOD_NS, "a frame of 7 bytes") == f" ({1_000 - MAX_LINES} similar lines were not logged)"
