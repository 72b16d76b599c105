"""Alarm lines of a unit's journal: what counts, what only sounds like it."""

from kvfleet.core.proof import alarm_lines

#: vLLM 0.32.0's own start-up warning, as printed under a low hard limit
ULIMIT_HINT = (
    "(APIServer pid=420) WARNING 11-29 19:59:59 [system_utils.py:255] Found ulimit of 20000 and failed to "
    "automatically increase with error current limit exceeds maximum limit. This can cause fd limit errors like "
    "`OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n"
)


def test_a_hint_with_the_same_words_is_no_alarm():
    assert alarm_lines(ULIMIT_HINT) == []


def test_a_real_error_behind_a_long_line_keeps_its_meaning():
    line = "x" * 300 + " OSError: [Errno 24] Too many open files: 'chunk.data'"
    [(shown, meaning)] = alarm_lines(line)
    assert len(shown) == 240
    assert meaning == "the unit's file limit is too low"


def test_colours_go_and_repeats_count_once():
    line = "\x1b[33;20mWARNING\x1b[0m pin_memory failed for chunk 3"
    assert [shown for shown, _ in alarm_lines(f"{line}\n{line}\n")] == ["WARNING pin_memory failed for chunk 3"]
