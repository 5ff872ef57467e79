"""Compare answers of a running service's pairs with one engine's: `tandem audit`.

Digests prove that the KV of a prompt arrived unchanged, not that it was the right KV. This command
sends prompts of random facts and compares the logprobs of each answer with those that one engine
computes from prompt and answer in one prefill, without transferred or cached KV. Answers of decode
alone show how much rounding may differ. If the service has API keys, `TANDEM_OPERATOR_KEYS` must
begin with one of its operator keys.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.service_client import URL, ServiceError, ask

REQUEST_S = 300.0
FACTOR = 3.0
"""Limit for a pair's answer, as a multiple of the largest deviation of decode alone."""

LEAST_LIMIT = 1e-3
"""Lowest limit: such a deviation of the mean logprob changes no answer, but exceeds float32's."""


@dataclass(frozen=True)
class Answer:
    """Tokens of a prompt and of its answer, the answer's logprobs, and the pair that computed them.

    ``pair``  empty for an answer of decode alone; None if routed to a pair, but decode received no
              KV or reported no times
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    pair: str | None


class Service:
    def __init__(self, url: str, model: str | None, answer_tokens: int) -> None:
        self._url = url
        self._answer_tokens = answer_tokens
        self._model = model or ask(f"{url}/v1/models", REQUEST_S)[0]["data"][0]["id"]

    def answer(self, prompt: str, alone: bool = False) -> Answer:
        """Return the answer of a pair, or with ``alone`` of decode without transferred KV."""
        fields: dict[str, Any] = {
            "max_tokens": self._answer_tokens,
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        # A unique salt keeps caches and stores from supplying the prompt's KV.
        fields |= {"prompt_logprobs": 0} if alone else {"cache_salt": secrets.token_hex()}
        choice, headers = self._complete(prompt, fields)
        served = json.loads(headers.get("x-tandem-decision", "{}")).get("served", {})
        pair = (
            f"prefill {served.get('prefill')} -> decode {served.get('decode')}" if served.get("received_kv") else None
        )
        return Answer(
            choice["prompt_token_ids"],
            choice["token_ids"],
            choice["logprobs"]["token_logprobs"],
            pair if headers.get("x-tandem-route") == "remote" else "",
        )

    def score(self, answer: Answer) -> list[float]:
        """Return one engine's logprobs of the answer; for them, vLLM reads no cached KV."""
        whole = answer.prompt + answer.tokens
        choice, _ = self._complete(whole, {"max_tokens": 1, "prompt_logprobs": 0})
        scored = choice["prompt_logprobs"][len(answer.prompt) :]
        return [one[str(token)]["logprob"] for one, token in zip(scored, answer.tokens, strict=True)]

    def _complete(self, prompt: str | list[int], fields: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        body = {"model": self._model, "prompt": prompt, "temperature": 0, **fields}
        url = f"{self._url}/v1/completions"
        answer, headers = ask(url, REQUEST_S, "POST", body, **{"x-tandem-explain": "1"})
        return answer["choices"][0], headers


def deviation(own: Sequence[float], scored: Sequence[float]) -> float:
    """Return the mean absolute difference of the logprobs of an answer's tokens."""
    return sum(abs(a - b) for a, b in zip(own, scored, strict=True)) / len(own)


def limit(controls: Iterable[float]) -> float:
    """Return the largest deviation that rounding explains, given those of decode alone."""
    return max(LEAST_LIMIT, FACTOR * max(controls))


def facts(count: int, rng: random.Random) -> Iterator[str]:
    """Yield prompts whose answers repeat facts from random places of the prompt."""
    while True:
        names = ["".join(rng.choice(letters) for letters in ("bdfgklmnprstvz", "aeiou") * 2) for _ in range(count)]
        lines = [f"{name}={rng.randrange(1000):03d}" for name in names]
        yield "\n".join((*lines, "", "The same list again:", f"{rng.choice(names)}="))


def main(argv: list[str] | None = None) -> int:
    """Return 0 if all pairs agree with one engine, 1 if not, 2 if none could be compared."""
    parser = argparse.ArgumentParser(prog="tandem audit", description=" ".join((__doc__ or "").split()))
    parser.add_argument("--url", default=URL, help=f"URL of the service ({URL})")
    parser.add_argument("--model", help="name of the model (the first one that the service lists)")
    parser.add_argument("--count", type=int, default=20, help="number of prompts (20)")
    parser.add_argument("--facts", type=int, default=100, help="facts of a prompt, of 4 to 10 tokens each (100)")
    parser.add_argument("--prompts", type=Path, help="send the lines of this file instead")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer (48)")
    options = parser.parse_args(argv)
    if options.tokens < 2:
        parser.error("--tokens must be at least 2: with `first_token: prefill`, decode does not compute the first one")
    try:
        prompts = options.prompts.read_text().splitlines() if options.prompts else facts(options.facts, random.Random())
        return compare(Service(options.url, options.model, options.tokens), prompts, options.count)
    except (ServiceError, OSError, KeyboardInterrupt) as error:
        print(f"tandem audit: {str(error) or 'interrupted'}", file=sys.stderr)
        return 2


def compare(service: Service, prompts: Iterable[str], count: int) -> int:
    """Send at most ``count`` prompts, print what each pair deviates, and return the exit status."""
    controls: list[float] = []
    pairs: dict[str, list[float]] = {}
    without = 0
    for _, prompt in zip(range(count), prompts, strict=False):
        for answer in (service.answer(prompt), service.answer(prompt, alone=True)):
            if answer.pair is None:
                without += 1
                continue
            found = pairs.setdefault(answer.pair, []) if answer.pair else controls
            found.append(deviation(answer.logprobs, service.score(answer)))
    if without:
        print(
            f"not compared, without received KV: {without}. Their transfers failed (decode's log says why), or decode "
            "runs with `disable_log_stats`, which hides it"
        )
    if not pairs:
        raise ServiceError(
            "no transferred KV was compared; if all transfers failed, decode's log says why"
            if without
            else "no request was routed to a prefill-decode pair: the response header x-tandem-local-reason says why"
        )
    most = limit(controls)
    print(f"{len(controls)} answers of decode alone deviate by at most {max(controls):.1e}; limit {most:.1e}")
    for pair, found in sorted(pairs.items()):
        wrong = sum(one > most for one in found)
        print(
            f"{'WRONG' if wrong else 'ok   '} {pair}: {wrong} of {len(found)} answers above it, worst {max(found):.1e}"
        )
    if any(one > most for found in pairs.values() for one in found):
        print("Drain the engines of a wrong pair (`tandem drain ENGINE`) and file an issue with this output.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
