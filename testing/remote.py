"""An object in a process of its own, whose methods this process calls."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from connectors.errors import TandemError

ANSWER_S = 600.0


class Remote:
    """Proxy of the object that ``make`` creates; ``made`` is that attribute of it, copied then.

    ``make``         can be pickled; the process closes what it returns
    ``environment``  set before ``make`` is called
    ``rest_s``       pause between calls of the object's ``idle``, if it has one
    """

    def __init__(
        self,
        make: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        rest_s: float = 0.001,
        answer_s: float = ANSWER_S,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._answer_s = answer_s
        self._connection, end = context.Pipe()
        given = end, make, arguments, dict(environment or {}), rest_s
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        end.close()
        try:
            self.made = self._answer("creation")
        except BaseException:
            self._process.kill()
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method. Raises RuntimeError if it fails or the process ends, or TimeoutError."""
        self._connection.send((method, arguments))
        answer = self._answer(method)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._connection.close()
        self._process.join(20)
        self._process.kill()
        self._process.join()

    def _answer(self, what: str) -> Any:
        if not self._connection.poll(self._answer_s):
            raise TimeoutError(f"{what} took longer than {self._answer_s:g} s")
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join(5)
            raise RuntimeError(f"the process ended with {self._process.exitcode} during {what!r}") from None


def _serve(
    connection: Connection, make: Callable[..., Any], arguments: Any, environment: dict[str, str], rest_s: float
) -> None:
    os.environ.update(environment)
    made = make(*arguments)
    connection.send(made.made)
    idle = getattr(made, "idle", None)
    while True:
        if idle is not None:
            idle()
            if not connection.poll(rest_s):
                continue
        try:
            method, given = connection.recv()
        except EOFError:
            break
        try:
            connection.send(getattr(made, method)(*given))
        except TandemError as error:
            connection.send(RuntimeError(str(error)))
    made.close()
