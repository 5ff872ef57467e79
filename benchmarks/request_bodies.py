"""Cost of reading a request: tokenization of its prompt, and decoding of a large body in a thread.

python -m benchmarks.request_bodies

The tokenizer is trained here, on Python sources of the environment: no published one is installed.
"""

import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from sysconfig import get_paths
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from actors.large_json import loads

VOCABULARY = 100_000
TRAINING_CHARACTERS = 12_000_000
HELD_OUT_FILES = 400
PROMPT_TOKENS = (1_000, 8_000, 32_000)
PROMPTS = 7
BODY_BYTES = 16 * 2**20
TICK_S = 0.0005


def train(files: list[Path]) -> Any:
    """Return a byte-level BPE of at most VOCABULARY entries."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    texts, characters = [], 0
    for file in files:
        texts.append(file.read_text(errors="ignore"))
        characters += len(texts[-1])
        if characters > TRAINING_CHARACTERS:
            break
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenization() -> None:
    """Print the time to encode prompts of each size."""
    files = sorted(Path(get_paths()["purelib"]).glob("**/*.py"))
    random.Random(0).shuffle(files)
    tokenizer = train(files)
    ids = tokenizer.encode("\n".join(file.read_text(errors="ignore") for file in files[-HELD_OUT_FILES:])).ids
    print(f"vocabulary of {tokenizer.get_vocab_size()}")
    for size in PROMPT_TOKENS:
        milliseconds = []
        for number in range(PROMPTS):
            prompt = tokenizer.decode(ids[number * size : (number + 1) * size])
            began = time.perf_counter()
            tokenizer.encode(prompt)
            milliseconds.append((time.perf_counter() - began) * 1e3)
        low, middle, high = statistics.quantiles(milliseconds, n=4)
        print(f"{size:6} tokens: {middle:.1f} ms ({low:.1f} to {high:.1f})")


def bodies() -> Iterator[tuple[str, bytes]]:
    """Yield bodies of about BODY_BYTES."""
    for name, field, one in (
        ("token ids", "prompt", b"12345"),
        ("messages", "messages", b'{"role": "user", "content": "some words of a turn"}'),
        ("short strings", "prompt", b'"ab"'),
    ):
        yield name, b'{"%s": [%s]}' % (field.encode(), b", ".join([one] * (BODY_BYTES // (len(one) + 2))))
    yield "one string", b'{"prompt": "%s"}' % (b"lorem ipsum " * (BODY_BYTES // 12))


def longest_pause_s(work: Callable[[], object]) -> tuple[float, float]:
    """Run `work` in a thread. Return the longest time in which this thread did not run, and the
    time of `work`, in seconds."""
    thread = threading.Thread(target=work)
    began = last = time.perf_counter()
    pause = 0.0
    thread.start()
    while thread.is_alive():
        time.sleep(TICK_S)
        now = time.perf_counter()
        pause, last = max(pause, now - last), now
    return pause, time.perf_counter() - began


def main() -> None:
    tokenization()
    for name, body in bodies():
        for how, decode in (("json", json.loads), ("with hooks", loads)):
            pause_s, seconds = longest_pause_s(lambda decode=decode, body=body: decode(body))  # type: ignore[misc]
            print(f"{name:14} {how:11} {pause_s * 1e3:6.0f} of {seconds * 1e3:6.0f} ms")


if __name__ == "__main__":
    main()
