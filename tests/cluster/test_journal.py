from __future__ import annotations

import random
import stat
from dataclasses import replace

import pytest

from graphsplit.cluster.scheduler.job.image import JobImage
from graphsplit.cluster.scheduler.job.rules import JobRules
from graphsplit.cluster.scheduler.journal import HEADER, Journal, parse, record_of
from graphsplit.errors import JournalError
from graphsplit.failure import FailureCause

RULES = JobRules(2, 1800, 30, 300, "wait_rejoin", keeps_journal=True)


@pytest.fixture
def image(registration):
    members = {rank: registration(str(rank), endpoints={}) for rank in range(2)}
    return JobImage("ab" * 16, 7, 2, "wait_rejoin", "running", 3, members)


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "new folder" / "scheduler.journal")


def reread(journal, log=None):
    return Journal(journal._path).read(RULES, (log if log is not None else []).append)


def test_without_a_file_there_is_no_job(journal):
    assert reread(journal) is None


def test_the_last_record_counts(journal, image):
    for generation in range(1, 6):
        journal.write(replace(image, generation=generation))
    log: list[str] = []
    assert reread(journal, log) == replace(image, generation=5)
    assert log == []


def test_everything_of_an_image_comes_back_but_its_secrets(journal, image, registration):
    cause = FailureCause("lost", "gone", 1, "h", 3, "step 4", "Traceback\n")
    recovering = replace(image, phase="recovering", members={1: registration("1")}, cause=cause)
    journal.write(recovering)
    assert b"10.0.0.1" not in journal._path.read_bytes()
    assert reread(journal) == replace(recovering, members={1: registration("1", endpoints={})})


def test_a_journal_is_for_this_user_only(journal, image):
    journal.write(image)
    assert stat.S_IMODE(journal._path.stat().st_mode) == 0o600


def test_a_job_that_has_ended_is_not_taken_up_again_and_the_file_is_used_on(journal, image):
    journal.write(replace(image, phase="ended"))
    again = Journal(journal._path)
    assert again.read(RULES, print) is None
    again.write(replace(image, job="cd" * 16))
    assert reread(journal).job == "cd" * 16


def test_a_record_that_was_never_finished_is_dropped_and_reported(journal, image):
    journal.write(image)
    whole = journal._path.read_bytes()
    journal.write(replace(image, generation=4))
    longer = journal._path.read_bytes()
    for end in range(len(whole) + 1, len(longer)):
        journal._path.write_bytes(longer[:end])
        log: list[str] = []
        assert reread(journal, log) == image, end
        assert f"({end - len(whole)} bytes): it is dropped" in log[0]


def test_bytes_that_were_never_written_are_a_torn_end_too(journal, image):
    journal.write(image)
    whole = journal._path.read_bytes()
    journal._path.write_bytes(whole + bytes(4096))
    assert reread(journal) == image
    # A later scheduler goes on where the whole records end.
    again = Journal(journal._path)
    again.read(RULES, lambda line: None)
    again.write(replace(image, generation=9))
    assert reread(journal).generation == 9


def test_any_changed_bit_is_found_and_nothing_is_believed(journal, image):
    for generation in range(1, 4):
        journal.write(replace(image, generation=generation))
    content = journal._path.read_bytes()
    generator = random.Random(1)
    for bit in generator.sample(range(8 * len(content)), 600):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        journal._path.write_bytes(damaged)
        with pytest.raises(JournalError, match=r"is damaged, and nothing in it is believed"):
            reread(journal)


def test_records_that_were_left_out_or_exchanged_are_found(journal, image):
    ends = []
    for generation in range(1, 4):
        journal.write(replace(image, generation=generation))
        ends.append(journal._path.stat().st_size)
    content = journal._path.read_bytes()
    head, first, second, third = (
        content[: len(HEADER)],
        content[len(HEADER) : ends[0]],
        content[ends[0] : ends[1]],
        content[ends[1] :],
    )
    for parts in ((first, third), (second, third), (first, third, second), (first, first)):
        with pytest.raises(JournalError):
            parse(head + b"".join(parts))


def test_the_message_names_the_file_and_the_way_out(journal, image):
    journal.write(image)
    journal._path.write_bytes(b"something else")
    with pytest.raises(JournalError) as caught:
        reread(journal)
    text = str(caught.value)
    assert str(journal._path) in text
    assert "MS_RECOVERY_PATH" in text
    assert "does not begin as a journal" in text
    assert "Fix: " in text


def test_a_record_that_is_no_image_is_refused(journal):
    journal._path.parent.mkdir()
    problems = {
        b"[]": "it is not an object",
        b"{": "Expecting property name",
        b'{"format": 1}': "it has format 1; this version of graphsplit reads 2",
        b'{"format": 2, "members": 3}': "the image of a job: .* is missing",
    }
    for payload, problem in problems.items():
        journal._path.write_bytes(HEADER + record_of(payload, 0))
        with pytest.raises(JournalError, match=f"the last record: {problem}"):
            reread(journal)


def test_a_job_of_another_shape_is_not_taken_up(journal, image):
    journal.write(image)
    for rules in (replace(RULES, num_workers=3), replace(RULES, recovery="restart")):
        with pytest.raises(JournalError, match=r"of a job that has not ended, with"):
            Journal(journal._path).read(rules, print)


def test_the_file_is_written_anew_before_it_grows_large(journal, image):
    journal.write(image)
    one = journal._path.stat().st_size
    journal._end = 9 << 20
    journal.write(replace(image, generation=8))
    assert journal._path.stat().st_size == one
    assert reread(journal).generation == 8
