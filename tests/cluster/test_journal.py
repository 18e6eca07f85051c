from __future__ import annotations

import os
import random
import stat
from dataclasses import replace

import pytest

from graphsplit.cluster.scheduler.job.image import JobImage
from graphsplit.cluster.scheduler.job.rules import JobRules
from graphsplit.cluster.scheduler.journal import HEADER, Journal, content_of, parse
from graphsplit.errors import JournalError
from graphsplit.failure import FailureCause
from graphsplit.security.private_files import PART

RULES = JobRules(2, 1800, 30, 300, "wait_rejoin", keeps_journal=True)


@pytest.fixture
def image(registration):
    members = {rank: registration(str(rank), endpoints={}) for rank in range(2)}
    return JobImage("ab" * 16, 7, 2, "wait_rejoin", "running", 3, members)


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "new folder" / "scheduler.journal")


def reread(journal):
    return Journal(journal._path).read(RULES)


def test_without_a_file_there_is_no_job(journal):
    assert reread(journal) is None


def test_the_last_state_counts_and_the_file_does_not_grow(journal, image):
    sizes = set()
    for generation in range(1, 6):
        journal.write(replace(image, generation=generation))
        sizes.add(journal._path.stat().st_size)
    assert reread(journal) == replace(image, generation=5)
    assert len(sizes) == 1


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
    assert again.read(RULES) is None
    again.write(replace(image, job="cd" * 16))
    assert reread(journal).job == "cd" * 16


@pytest.mark.parametrize("cut_off", ["fsync", "replace"])
def test_a_write_that_is_cut_off_leaves_the_state_before(journal, image, monkeypatch, cut_off):
    journal.write(image)

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, cut_off, killed)
        with pytest.raises(KeyboardInterrupt):
            journal.write(replace(image, generation=4))
    assert reread(journal) == image
    # A part that a killed writer has left is in nobody's way.
    journal._path.with_name(journal._path.name + PART).write_bytes(HEADER)
    assert reread(journal) == image
    Journal(journal._path).write(replace(image, generation=9))
    assert reread(journal).generation == 9


def test_any_changed_bit_is_found_and_nothing_is_believed(journal, image):
    journal.write(image)
    content = journal._path.read_bytes()
    generator = random.Random(1)
    for bit in generator.sample(range(8 * len(content)), 600):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        journal._path.write_bytes(damaged)
        with pytest.raises(JournalError, match=r"is damaged, and nothing in it is believed"):
            reread(journal)


def test_a_file_that_was_cut_short_or_made_longer_is_found(journal, image):
    journal.write(image)
    content = journal._path.read_bytes()
    for other in (*(content[:end] for end in range(len(content))), content + b"\0", content * 2):
        with pytest.raises(JournalError):
            parse(other)


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
        b"[]": "is .*, no object",
        b"{": "is no JSON: Expecting property name",
        b'{"members": 3}': ": .* is missing",
    }
    for payload, problem in problems.items():
        journal._path.write_bytes(content_of(payload))
        with pytest.raises(JournalError, match=f"the image of a job ?{problem}"):
            reread(journal)


def test_a_job_of_another_shape_is_not_taken_up(journal, image):
    journal.write(image)
    for rules in (replace(RULES, num_workers=3), replace(RULES, recovery="restart")):
        with pytest.raises(
            JournalError, match=r"(?s)of a job that has not ended, with.*  Fix: start it with"
        ):
            Journal(journal._path).read(rules)


def test_a_job_that_is_started_again_may_have_another_number_of_workers(journal, image):
    journal.write(replace(image, recovery="restart"))
    restarted = replace(RULES, recovery="restart")
    assert Journal(journal._path).read(restarted) is not None
    assert Journal(journal._path).read(replace(restarted, num_workers=3)) is None
