"""A process as ``python train.py`` would be, but that of several one alone tells the same error.

What is wrong with a script is wrong in every process, and before ``gs.init()`` they know nothing of
each other but where they leave their reports. So each runs the script from here, forked or not.
A program by its path, not by its name: importing graphsplit would import torch, and a script may
set variables first that torch reads then.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import sys
import threading
import traceback
import types

_NOT_OF_THE_SCRIPT = (__file__, runpy.__file__, "<frozen runpy>")


def main() -> None:
    """Run the script, or the module behind ``-m``, that the first argument names."""
    status = 1
    try:
        status = run(sys.argv[1:])
    finally:
        leave(status)


def run(arguments: list[str]) -> int:
    """The script or module, and what Python does when it is over."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    status = 0
    try:
        if arguments[0] == "-m":
            sys.path[0] = os.getcwd()
            sys.argv = ["-m", *arguments[2:]]
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        else:
            sys.argv = list(arguments)
            _run_file(arguments[0], module)
    except SystemExit as error:
        status = _status_of(error)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _NOT_OF_THE_SCRIPT:
            trace = trace.tb_next
        _tell(error.with_traceback(trace))
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status


def _tell(error: BaseException) -> None:
    """Print what ended the script; after ``gs.init()`` its hook does."""
    if sys.excepthook is not sys.__excepthook__ or not isinstance(error, Exception):
        sys.excepthook(type(error), error, error.__traceback__)
    else:
        _tell_once(_told(error), f"{type(error).__name__}: {error}")


def _told(error: Exception) -> str:
    """The traceback; without graphsplit's own frames where it has been imported, as afterwards."""
    frames = sys.modules.get("graphsplit.frames")
    if frames is None:
        return "".join(traceback.format_exception(error))
    text: str = frames.users_traceback(error, is_full=frames.shows_all(os.environ))
    return text


def _tell_once(text: str, message: str) -> None:
    """Print a text unless another process of the job has; leave the message for the launcher."""
    sys.argv[:1] = ["graphsplit"]  # the command, which does without torch
    try:
        from graphsplit.reports import who_failed_alike, write_report
        from graphsplit.root_cause import FailureCause
    except ImportError:  # what is told may be just this
        sys.stderr.write(text)
        return
    first, headline = who_failed_alike(os.environ, text), message.partition("\n")[0]
    same = f"[graphsplit] the same error as {first.replace('_', ' ')}: {headline}\n"
    sys.stderr.write(same if first else text)
    write_report(os.environ, FailureCause("exception", message))


def _run_file(path: str, module: types.ModuleType) -> None:
    from importlib.machinery import SourceFileLoader

    sys.path[0] = os.path.dirname(os.path.realpath(path))
    module.__file__ = os.path.abspath(path)
    module.__loader__ = SourceFileLoader("__main__", module.__file__)
    vars(module).update(__builtins__=sys.modules["builtins"], __cached__=None, __annotations__={})
    with open(path, "rb") as file:
        code = compile(file.read(), module.__file__, "exec", dont_inherit=True)
    exec(code, vars(module))


def _status_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    _tell_once(f"{error.code}\n", f"SystemExit: {error.code}")
    return 1


def leave(status: int) -> None:
    """Leave without taking the interpreter apart, which takes a second."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
