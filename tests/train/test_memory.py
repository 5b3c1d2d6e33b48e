"""The largest batch that fits, computed from GPU memory figures."""

from clipmill.train.engine.failures import largest_fit, memory_error

GB = 10**9


def test_it_is_at_most_half_of_what_did_not_fit_and_a_power_of_two() -> None:
    assert largest_fit(256, before_bytes=2 * GB, peak_bytes=80 * GB, total_bytes=80 * GB) == 128
    assert largest_fit(100, before_bytes=2 * GB, peak_bytes=80 * GB, total_bytes=80 * GB) == 32
    assert largest_fit(2, before_bytes=2 * GB, peak_bytes=80 * GB, total_bytes=80 * GB) == 1


def test_it_is_less_where_weights_leave_little_room() -> None:
    # In an earlier step, 64 samples took 100 GB, or 1.5625 GB each. 72 - 40 GB are left, which is enough for 20
    # samples.
    assert largest_fit(64, before_bytes=40 * GB, peak_bytes=140 * GB, total_bytes=80 * GB) == 16


def test_nothing_fits_where_one_sample_does_not() -> None:
    assert largest_fit(1, before_bytes=2 * GB, peak_bytes=80 * GB, total_bytes=80 * GB) is None
    assert largest_fit(8, before_bytes=79 * GB, peak_bytes=80 * GB, total_bytes=80 * GB) is None


def test_the_error_names_the_flags() -> None:
    figures = {"before_bytes": 2 * GB, "peak_bytes": 78 * GB, "total_bytes": 80 * GB}
    error = memory_error(batch=1024, share=256, microbatch=256, **figures)
    assert "out of GPU memory: a forward and backward pass over 256 samples needs more than 80 GB" in str(error)
    assert error.hint is not None
    assert "--microbatch 128" in error.hint and "--batch 1024" in error.hint and "use --batch 512" in error.hint
    alone = memory_error(batch=4, share=1, microbatch=1, **figures)
    assert alone.hint is not None and "--parallel.strategy fsdp" in alone.hint
