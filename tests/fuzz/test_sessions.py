"""A bounded part of the fuzzing of sessions; ``make fuzz`` runs the whole."""

from __future__ import annotations

from session_fuzzer import fuzz


def test_whatever_strangers_do_the_real_job_forms_and_nobody_else_gets_in() -> None:
    fuzz(examples=4, steps=12)
