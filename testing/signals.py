"""Signals of programs that serve until they are stopped."""

import signal

from app.run import STOP_SIGNALS


def interrupt_on_signals() -> None:
    """Make STOP_SIGNALS raise KeyboardInterrupt.

    A shell script starts background jobs with SIGINT ignored, and Python keeps that.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)
