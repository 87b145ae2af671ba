"""What the demo prints, from figures that are made up."""

from __future__ import annotations

import io

import pytest
from progress import Progress
from report import bars, shown_url, table

COLD = {
    "stage": "cold",
    "label": "cold",
    "accept_length": 8.0,
    "storage_tokens": 0,
    "draft_hits": 0,
    "lost_drafts": 0,
    "time_to_first_token_s": 0.1234,
    "tokens_per_s": 1234.5,
    "new_tokens": 200,
    "output_equal": True,
}
LOST = COLD | {
    "stage": "draft_lost",
    "label": "draft lost",
    "accept_length": 1.0,
    "storage_tokens": 1088,
    "lost_drafts": 17,
}


def test_the_table_lines_up():
    lines = table([COLD, LOST]).splitlines()
    assert len(lines) == 4
    assert lines[0].endswith("output")
    assert " ".join(lines[2].split()) == "cold 8.00 0 tokens - 123 ms 1,234 200 tokens"
    expected = "draft lost 1.00 1,088 tokens 0 hit, 17 lost 123 ms 1,234 equal"
    assert " ".join(lines[3].split()) == expected
    assert len(lines[2]) <= len(lines[1])


def test_an_output_that_differs_catches_the_eye():
    assert table([COLD, LOST | {"output_equal": False}]).endswith("DIFFERS")


@pytest.mark.parametrize(("ascii_only", "full"), [(False, "█"), (True, "#")])
def test_bars_are_as_long_as_their_figures(ascii_only, full):
    head, cold, lost = bars([COLD, LOST], 8, ascii_only=ascii_only).splitlines()
    assert "at most 8" in head
    assert (cold.count(full), lost.count(full)) == (40, 5)
    assert ascii_only != any(ord(character) > 127 for character in cold + lost)


def test_a_url_is_shown_without_its_secrets():
    shown = shown_url("s3://user:secret@host:9000/bucket/prefix?token=secret")
    assert shown == "s3://host:9000/bucket/prefix"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    progress = Progress(stream)
    progress.begin("cold")
    progress.detail("serving")
    progress.tick()
    progress.end("done")
    progress.drop()
    assert stream.getvalue() == "cold ...\n  done (0.0 s)\n"


def test_progress_on_a_terminal_rewrites_one_line():
    stream = Terminal()
    progress = Progress(stream)
    progress.begin("cold")
    progress.detail("serving")
    progress.end("done")
    progress.begin("restored")
    progress.drop()
    text = stream.getvalue()
    assert "cold, serving (0 s)" in text
    assert text.count("\n") == 1
    assert text.endswith("\r\x1b[K"), "an unfinished line is cleared before an error is shown"
