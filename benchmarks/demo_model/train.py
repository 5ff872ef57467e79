"""Train the demo model on key-value recall from scratch.

    python -m benchmarks.demo_model.train --out DIR

Every training sequence has a block of facts followed by many questions with their answers. Only the
answers contribute to the loss. Lengths grow over the run (`STAGES`).
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch.nn.functional import cross_entropy
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig, PreTrainedTokenizerFast

from benchmarks.demo_model.tokenizer import BOS, EOS, MODEL_TURN, TURN_END, USER_TURN, build_tokenizer
from testing.facts import FACT_TOKENS, SEPARATORS, RecallPrompt, make_prompt

MAX_TOKENS = 4096
IGNORED = -100
"""Label of a position without loss."""


@dataclass(frozen=True)
class Stage:
    """One part of the run: its share of all steps, and the sequences it draws."""

    share: float
    shortest: int
    """Tokens in the shortest sequence."""
    longest: int
    """Tokens in the longest sequence."""
    batch_tokens: int
    """Total number of tokens in one step's batch."""


STAGES = (
    Stage(share=0.50, shortest=24, longest=128, batch_tokens=2048),
    Stage(share=0.20, shortest=24, longest=512, batch_tokens=4096),
    Stage(share=0.30, shortest=24, longest=1088, batch_tokens=6144),
)


def model_config(tokenizer: PreTrainedTokenizerFast) -> Gemma3TextConfig:
    """Return the architecture: 6 layers, of which every third has full attention, and 4 KV heads.

    Two departures from Gemma's values keep a small head exact over long prompts. The RoPE base of
    the full layers is so large that most of the 32 dimensions barely turn within MAX_TOKENS
    positions and can match content at any distance. `query_pre_attn_scalar` below head_dim sharpens
    the attention, whose normalised queries and keys would otherwise start with logits of at most
    5.7.
    """
    return Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        query_pre_attn_scalar=8,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1e9},
        },
        initializer_range=128**-0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


@torch.no_grad()
def initialise(model: Gemma3ForCausalLM) -> None:
    """Initialise the model with an approximate recall circuit, which training completes.

    From random weights the model guesses the first digit for a long time and looks up the others by
    the digits before them. So the initial weights have the part that is hard to learn. The heads of
    the first sliding layer look 1, 2, 3 and 4 tokens back. Head h of the first full layer compares
    what its query's token saw h back with what its keys' tokens saw h + 1 back. This is the same
    name if the key's token is the next digit of the answer. All other weights are random.
    """
    config = model.config
    heads, width = config.num_attention_heads, config.head_dim
    half = width // 2
    scale = config.initializer_range
    model.model.embed_tokens.weight[:, 0] = 4 * scale  # a constant that positional queries can read
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.fill_(-0.5)
        layer.post_feedforward_layernorm.weight.fill_(-0.8)

    look_back = model.model.layers[0]
    look_back.post_attention_layernorm.weight.fill_(1.0)
    attention = look_back.self_attn
    attention.q_norm.weight.fill_(0.5)
    attention.k_norm.weight.fill_(0.5)
    fast_pairs = 4
    angles = 10_000.0 ** (-torch.arange(fast_pairs) / half)  # radians per position of the fastest pairs
    shared_value = torch.nn.init.orthogonal_(torch.empty(width, config.hidden_size))
    shared_value[:, 0] = 0
    seen = torch.nn.init.orthogonal_(torch.empty(config.hidden_size, heads * width))
    attention.q_proj.weight.mul_(0.1)
    attention.k_proj.weight.mul_(0.1)
    attention.o_proj.weight.copy_(seen)
    for head in range(heads):
        row, back = head * width, head + 1
        attention.q_proj.weight[row : row + fast_pairs, 0] = 1.0
        attention.k_proj.weight[row : row + fast_pairs, 0] = torch.cos(back * angles)
        attention.k_proj.weight[row + half : row + half + fast_pairs, 0] = torch.sin(back * angles)
        attention.v_proj.weight[row : row + width] = shared_value

    match = model.model.layers[config.layer_types.index("full_attention")].self_attn
    match.q_norm.weight.fill_(0.5)
    match.k_norm.weight.fill_(0.5)
    match.o_proj.weight.copy_(torch.nn.init.orthogonal_(torch.empty_like(match.o_proj.weight)))
    match.v_proj.weight.copy_(match.o_proj.weight.T)  # copies the token attended to
    for head in range(heads - 1):
        row = head * width
        compare = torch.nn.init.orthogonal_(torch.empty(width, width))
        # pairs that turn too fast to match content
        compare[[*range(6), *range(half, half + 6)]] = 0
        match.q_proj.weight[row : row + width] = compare @ seen[:, row : row + width].T
        match.k_proj.weight[row : row + width] = compare @ seen[:, row + width : row + 2 * width].T


def training_segments(prompt: RecallPrompt, asked: list[int], chat: bool) -> Iterator[tuple[str, bool]]:
    """Return a training sequence as (text, whether it contributes to the loss), in order.

    It starts with the facts, followed by a question and its answer for each index in `asked`. A
    chat asks each question in its own turn, the first in the turn that states the facts.
    """
    yield BOS + (USER_TURN if chat else "") + prompt.facts_text, False
    for position, index in enumerate(asked):
        fact = prompt.facts[index]
        if chat:
            opening = USER_TURN if position else ""
            yield f"{opening}{fact.name}?{TURN_END}{MODEL_TURN}", False
            yield f"{fact}{TURN_END}", True
        else:
            yield f"{fact.name}?", False
            yield f"{fact.value}{EOS}", True


def draw_batch(rng: Random, tokenizer: PreTrainedTokenizerFast, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw token ids and labels, both int64 [sequences, tokens].

    All sequences of a batch have the same numbers of facts and questions, so they need no padding.
    """
    length = rng.randint(stage.shortest, stage.longest)
    chat = rng.random() < 0.3
    question_tokens = FACT_TOKENS + (5 if chat else 0)
    fact_count = max(int(length * rng.uniform(0.4, 0.95)) // FACT_TOKENS, 1)
    question_count = min(max((length - fact_count * FACT_TOKENS) // question_tokens, 1), fact_count)
    sequences = max(stage.batch_tokens // length, 1)
    texts: list[str] = []
    trained: list[bool] = []
    for _ in range(sequences):
        prompt = make_prompt(rng, fact_count, separator=rng.choice(SEPARATORS))
        asked = rng.sample(range(fact_count), question_count)
        for text, is_trained in training_segments(prompt, asked, chat):
            texts.append(text)
            trained.append(is_trained)
    ids: list[int] = []
    labels: list[int] = []
    segments = tokenizer(texts, add_special_tokens=False).input_ids
    for segment, is_trained in zip(segments, trained, strict=True):
        ids.extend(segment)
        labels.extend(segment if is_trained else [IGNORED] * len(segment))
    return torch.tensor(ids).view(sequences, -1), torch.tensor(labels).view(sequences, -1)


def learning_rate_factor(step: int, steps: int, warmup: int = 30) -> float:
    """Return the share of the peak learning rate at `step`: linear warm-up, then a cosine down
    to 2 %.
    """
    decay = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min((step + 1) / warmup, 1.0) * (0.02 + 0.98 * decay)


def stage_at(step: int, steps: int) -> Stage:
    """Return the stage of `step` in a run of `steps`."""
    end = 0.0
    for stage in STAGES:
        end += stage.share
        if step < end * steps:
            return stage
    return STAGES[-1]


def save(model: Gemma3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a complete checkpoint to `out`: config, float32 weights, tokenizer, generation
    config.
    """
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(TURN_END)],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)


def train(steps: int, seed: int, peak_rate: float, out: Path, save_every: int) -> None:
    """Train for `steps` steps, print the loss and the share of right tokens, and save to `out`
    periodically.
    """
    rng = Random(f"train {seed}")
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(MAX_TOKENS)
    model = Gemma3ForCausalLM(model_config(tokenizer))
    initialise(model)
    print(f"{model.num_parameters():,} parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    began = time.monotonic()
    for step in range(steps):
        ids, labels = draw_batch(rng, tokenizer, stage_at(step, steps))
        targets = labels[:, 1:]
        rows, columns = (targets != IGNORED).nonzero(as_tuple=True)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[rows, columns])
        loss = cross_entropy(logits, targets[rows, columns])
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            correct = logits.argmax(-1) == targets[rows, columns]
            first = labels[rows, columns] == IGNORED
            print(
                f"step {step} loss {loss.item():.4f} right: tokens {correct.float().mean():.4f}, "
                f"first of an answer {correct[first].float().mean():.4f} "
                f"shape {tuple(ids.shape)} {time.monotonic() - began:.0f} s",
                flush=True,
            )
        if (step + 1) % save_every == 0:
            save(model, tokenizer, out)
    save(model, tokenizer, out)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak-rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--save-every", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=2, help="torch CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.steps, arguments.seed, arguments.peak_rate, arguments.out, arguments.save_every)


if __name__ == "__main__":
    main()
