"""The texts of ``graphsplit check``. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import indent

from graphsplit.check.compare import Diverged, RunComparison, RunDifference, Unequal
from graphsplit.check.pinpoint import Pinpoint
from graphsplit.check.record import NotedValue, NoteKind, Notes, Operation, What

_SHOWN = 3
_GENERATORS = {"random": "Python's random", "numpy": "NumPy"}
_OURS = (
    "network, loss, loader and callbacks may look at nothing that is not the same in every run and "
    "process: a rank, an environment variable, the clock, a file that is changed. If they do not, "
    "this is a fault of graphsplit: please report it with this output."
)
_THREADS = (
    "let all processes use as many threads: set OMP_NUM_THREADS, and do not call "
    "torch.set_num_threads in some of them alone. Their number changes the bits of sums."
)
_ELSEWHERE = (
    "  operation  none: all of forward is the same. It was changed by the optimizer or a hook, or",
    "             between two steps: by the script, a callback or the data set",
)
_SEEDS = (
    "set the seeds of torch, random and numpy before the network is built, and let neither its "
    "values nor the optimizer's settings depend on a rank."
)


@dataclass(frozen=True)
class Findings:
    """How a check ended.

    Attributes:
        status: The command's exit status.
        text: What it says.
    """

    status: int
    text: str


def findings(comparison: RunComparison, *, asked: int) -> Findings:
    """The text for two runs that both ended well, as far as one pass shows it."""
    compared = _compared(comparison)
    difference = comparison.difference
    if isinstance(difference, Diverged):
        return Findings(1, _told(_diverged(difference), compared, _OURS))
    if difference is not None:
        return Findings(1, difference_text(comparison, difference, Pinpoint()))
    if comparison.num_models == 0:
        return Findings(
            1,
            _told(
                ["the script built no gs.Model, or never called it: there is nothing to compare"],
                "",
                "check a script that trains a gs.Model (train, train_step, step), or a network of "
                "gs.distribute by an optimizer.",
            ),
        )
    if comparison.num_steps == 0:
        return Findings(
            1,
            _told(
                ["the script ended, and no gs.Model was trained: there are no steps to compare"],
                compared,
                "train a gs.Model in the script (train, train_step; after forward_backward, step).",
            ),
        )
    if comparison.num_steps < asked:
        return Findings(
            1,
            _told(
                [
                    f"the script ended after {_count(comparison.num_steps, 'training step')}, "
                    f"{asked} were to be compared; so far all is the same"
                ],
                compared,
                f"ask for fewer (--steps {comparison.num_steps}), or let the script train more.",
            ),
        )
    said = [f"graphsplit check: the same bits. Compared {compared}.", *_left_out(comparison)]
    return Findings(0, "\n".join(said))


def failed(
    *, comparison: RunComparison, job_status: int, plain_status: int, refusals: Sequence[str] = ()
) -> Findings:
    """The text where the job, or the plain loop, did not end well.

    Args:
        comparison: What both sides noted until then.
        job_status: The job's exit status.
        plain_status: That of the plain loop.
        refusals: All that a job would refuse, as far as it was found.
    """
    compared = _compared(comparison)
    if plain_status:
        what = (
            f"the script fails by itself, without a cluster (exit status {plain_status}; the lines "
            f"of [plain] above say why)"
        )
        return Findings(1, _told([what], compared, "mend the script; python SCRIPT fails alike."))
    what = (
        f"a cluster does not run this script to its end (exit status {job_status}; the lines above "
        f"say why), one process does"
    )
    lines = [what]
    difference = comparison.difference
    if isinstance(difference, RunDifference):
        lines += [f"and before that, at {_moment(difference.record)}:", *_unequal(difference.first)]
    elif comparison.num_steps:
        lines.append("until there all is the same")
    lines += _left_out(comparison)
    if refusals:
        lines.append(f"a job refuses {_count(len(refusals), 'thing')} that this script does:")
        for number, text in enumerate(refusals, start=1):
            lines.append(indent(f"{number}. {text}", "  "))
        return Findings(1, _told(lines, compared, "do what each of them says."))
    return Findings(1, _told(lines, compared, "mend what the error above names."))


def difference_text(comparison: RunComparison, difference: RunDifference, where: Pinpoint) -> str:
    """The text for a difference.

    Args:
        comparison: All that was compared.
        difference: The first difference.
        where: The operation it comes from, as far as known.
    """
    lines = [f"not the same: first at {_moment(difference.record)}"]
    lines += _origin(difference.first, where)
    lines += _unequal(difference.first)
    others = _others(difference)
    if others:
        lines.append(f"  also different: {others}")
    return _told(lines, _compared(comparison), _fix(difference))


def _fix(difference: RunDifference) -> str:
    if difference.first.value.kind is NoteKind.THREADS:
        return _THREADS
    return _SEEDS if difference.record.what is What.START else _OURS


def unstable(comparison: RunComparison, difference: RunDifference | Diverged) -> str:
    """Said where the plain loop itself gives other bits when it is run again."""
    if isinstance(difference, RunDifference):
        lines = [
            f"the plain loop gives other bits each time it runs, first at "
            f"{_moment(difference.record)}: {difference.first.value}"
        ]
    else:
        lines = ["the plain loop does something else each time it runs"]
    return _told([*lines, "so nothing can be compared with it"], _compared(comparison), _SEEDS)


def _left_out(comparison: RunComparison) -> list[str]:
    """The values that were not compared, as a further line."""
    if not comparison.unseeded:
        return []
    names = " and ".join(_GENERATORS.get(name, name) for name in comparison.unseeded)
    return [
        f"  not compared: the generator state of {names}, which the script does not seed, or not "
        f"alike in every process"
    ]


def _told(lines: list[str], compared: str, fix: str) -> str:
    text = "\n".join(lines)
    if compared:
        text += f"\n  the same before that: {compared}"
    return f"graphsplit check: {text}\n  Fix: {fix}"


def _compared(comparison: RunComparison) -> str:
    if comparison.num_values == 0:
        return ""
    steps = _count(comparison.num_steps, "training step")
    parts = [steps if comparison.num_steps else "all until the first training step"]
    if comparison.num_calls:
        parts.append(_count(comparison.num_calls, "call") + " of eval and predict")
    if comparison.num_models > 1:
        parts.append(_count(comparison.num_models, "Model"))
    workers = _count(comparison.num_workers, "worker")
    parts.append(f"{_count(comparison.num_values, 'value')} on {workers}")
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _moment(record: Notes) -> str:
    model = f"of Model {record.model}"
    if record.what is What.START:
        return f"the start, before the first training step {model}"
    if record.what is What.STEP:
        return f"training step {record.number} {model}"
    if record.what is What.LOOP_STEP:
        return f"step {record.number} of an optimizer of network {record.model}"
    return f"call {record.number} of {record.what.value} {model}"


def _did(record: Notes | None) -> str:
    return "had ended" if record is None else f"was at {_moment(record)}"


def _diverged(difference: Diverged) -> list[str]:
    return [
        "not the same: the scripts took different ways",
        f"  the plain loop {_did(difference.plain)}",
        f"  worker {difference.worker} {_did(difference.found)}",
    ]


def _origin(first: Unequal, where: Pinpoint) -> list[str]:
    """Module and operation."""
    plain = where.plain
    if plain is not None and where.found is not None and _is_same_line(plain, where.found):
        plain = None
    operation = where.found or plain
    if operation is None:
        module = _module_of(first.value)
        lines = [] if module is None else [f"  module     {module}"]
        return [*lines, *_ELSEWHERE] if where.is_forward_same else lines
    lines = [f"  module     {operation.module or '(network)'}"]
    text = f"backward of {operation.target}" if where.by_gradient else _operation(operation)
    side = f" on worker {where.worker}" if where.worker is not None else ", plain loop"
    lines.append(f"  operation  {text}{side}{_at(operation)}")
    if where.found is not None and plain is not None:
        lines.append(f"  plain loop {plain.name} is the first that no worker has{_at(plain)}")
    return lines


def _is_same_line(one: Operation, other: Operation) -> bool:
    """Whether two operations stand in one line of the user's: ``a.py:3, in f`` and ``a.py:3``."""
    return one.source.partition(",")[0] == other.source.partition(",")[0]


def _operation(operation: Operation) -> str:
    return operation.target or operation.name


def _at(operation: Operation) -> str:
    return f", {operation.source}" if operation.source else ""


def _module_of(value: NotedValue) -> str | None:
    if value.kind not in (NoteKind.PARAMETER, NoteKind.GRADIENT, NoteKind.BUFFER):
        return None
    return value.name.rpartition(".")[0] or "(network)"


def _unequal(unequal: Unequal) -> list[str]:
    value = unequal.value
    worker = "no worker" if unequal.worker is None else f"worker {unequal.worker}"
    lines = [f"  value      {value}: {_shown(unequal.plain)} in the plain loop"]
    lines.append(f"             {_shown(unequal.found)} on {worker}")
    return lines + _elements(unequal.plain, unequal.found)


def _shown(value: NotedValue | None) -> str:
    if value is None:
        return "none"
    if len(value.elements) == 1:
        return f"{value.form} {value.elements[0]}"
    return f"{value.form} (SHA-256 {value.digest[:12]})"


def _elements(plain: NotedValue | None, found: NotedValue | None) -> list[str]:
    """The elements that differ."""
    if plain is None or found is None or plain.form != found.form:
        return []
    pairs = list(zip(plain.elements, found.elements, strict=False))
    if len(pairs) < 2:
        return []
    unequal = [(i, one, two) for i, (one, two) in enumerate(pairs) if one != two]
    if not unequal:
        return ["             the elements read alike: NaNs of different bits"]
    shown = "; ".join(f"[{i}] {one} against {two}" for i, one, two in unequal[:_SHOWN])
    more = "; ..." if len(unequal) > _SHOWN else ""
    return [f"             {len(unequal)} of {len(pairs)} elements: {shown}{more}"]


def _others(difference: RunDifference) -> str:
    """The other differences at that moment, by kind."""
    first = difference.first.value.key
    names: dict[NoteKind, dict[str, None]] = {}
    for unequal in difference.unequal:
        if unequal.value.key != first:
            names.setdefault(unequal.value.kind, {})[unequal.value.name] = None
    parts = []
    for kind, found in names.items():
        shown = ", ".join(filter(None, list(found)[:_SHOWN]))
        more = ", ..." if len(found) > _SHOWN else ""
        parts.append(f"{_count(len(found), kind.value)}{f' ({shown}{more})' if shown else ''}")
    return "; ".join(parts)
