"""Make the demo model depend on the KV of every group.

    python -m benchmarks.demo_model.harden --start DIR --out DIR

The model that `benchmarks.demo_model.train` writes answers well, but reads the question's name
through the sliding layers of one KV cache group only. The loss of the other sliding group would not
show. This script moves the head that looks one token back, on which the first digit of an answer
depends, to the other group, and continues training: answers on intact KV should be right, and
answers on damaged KV wrong.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, Gemma3ForCausalLM, PreTrainedTokenizerFast

from benchmarks.demo_model import train
from benchmarks.demo_model.damage import Fault, damaged, kv_groups
from benchmarks.demo_model.tokenizer import build_tokenizer
from testing.facts import FACT_TOKENS, NAMES, SEPARATORS, make_prompt


@dataclass(frozen=True)
class Phase:
    """One part of the run, with its own optimizer and learning rate schedule."""

    steps: int
    damaged_every: int
    """Interval, in steps, at which the loss includes answers on damaged KV."""
    chat_share: float
    """Share of chats among these answers."""


PHASES = (
    Phase(steps=120, damaged_every=1, chat_share=0.35),
    Phase(steps=210, damaged_every=3, chat_share=0.0),
)

STAGES = (
    train.Stage(share=1 / 3, shortest=24, longest=128, batch_tokens=2048),
    train.Stage(share=1 / 3, shortest=24, longest=512, batch_tokens=2048),
    train.Stage(share=1 / 3, shortest=300, longest=1088, batch_tokens=3072),
)
"""Sequences whose answers are trained on intact KV; the steps use these in turn."""

FITTED_STAGE = train.STAGES[1]
FITTED_BATCHES = 16
"""Sequences on which the moved head is fitted to its former output."""

DAMAGED_SHORTEST, DAMAGED_LONGEST = 24, (96, 160, 300)
"""Minimum and maximum number of tokens in a prompt with damaged KV; a step draws one value."""

DAMAGED_TOKENS = 1024
"""Total number of tokens in a step's prompts with damaged KV."""

BLOCK_TOKENS = 16
"""Tokens per block of vLLM's KV cache."""

WHOLE_SHARE = 0.6
"""Share of steps that damage all of a sliding group's KV; the others damage its last block."""

DAMAGED_WEIGHT, SINGLE_WEIGHT = 0.9, 0.3
"""Weights of the loss on damaged KV, and on the same prompts' intact KV, relative to that on
`STAGES`.
"""


@torch.no_grad()
def move_look_back(model: Gemma3ForCausalLM, rng: Random, tokenizer: PreTrainedTokenizerFast) -> None:
    """Move head 0 of layer 0, which looks 1 token back, to layer 1, as that layer's only active
    head.

    Layer 1 also sees what layer 0 added to the stream. So the head's projections are fitted by
    least squares to give the same output there as in layer 0; its values are fitted on names alone.
    """
    source, target = model.model.layers[0], model.model.layers[1]
    head = slice(0, model.config.head_dim)
    projections = ("q_proj", "k_proj", "v_proj")
    wanted = {name: getattr(source.self_attn, name).weight[head].clone() for name in projections}
    target.self_attn.o_proj.weight[:, head] = source.self_attn.o_proj.weight[:, head]
    target.self_attn.o_proj.weight[:, head.stop :] = 0
    source.self_attn.v_proj.weight[head] = 0
    source.self_attn.o_proj.weight[:, head] = 0
    for name in ("q_norm", "k_norm"):
        getattr(target.self_attn, name).weight.copy_(getattr(source.self_attn, name).weight)
    # The norm after attention fixes the sum of the heads; these gains keep each head's share about
    # the same.
    gain = 1 + source.post_attention_layernorm.weight
    target.post_attention_layernorm.weight.copy_(0.5 * gain - 1)
    source.post_attention_layernorm.weight.copy_(0.87 * gain - 1)

    seen: dict[str, list[torch.Tensor]] = {"source": [], "target": []}
    hooks = [
        layer.input_layernorm.register_forward_hook(
            lambda _module, _inputs, output, name=name: seen[name].append(output.flatten(0, 1))
        )
        for name, layer in (("source", source), ("target", target))
    ]
    is_name = []
    first, last = tokenizer.convert_tokens_to_ids([NAMES[0], NAMES[-1]])
    for _ in range(FITTED_BATCHES):
        ids, _labels = train.draw_batch(rng, tokenizer, FITTED_STAGE)
        model.model(input_ids=ids, use_cache=False)
        is_name.append(((ids >= first) & (ids <= last)).flatten())
    for hook in hooks:
        hook.remove()
    before, after, names = torch.cat(seen["source"]), torch.cat(seen["target"]), torch.cat(is_name)
    for name in projections:
        rows = names if name == "v_proj" else torch.ones_like(names)
        inputs, outputs = after[rows], before[rows] @ wanted[name].T
        ridge = 1e-3 * len(inputs) * torch.eye(inputs.shape[1])
        fitted = torch.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ outputs)
        getattr(target.self_attn, name).weight[head] = fitted.T


def draw_prompts(
    rng: Random, tokenizer: PreTrainedTokenizerFast, chat_share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw prompts of one form and length; return their ids without the last token, that token
    and the answer.
    """
    length = rng.randint(DAMAGED_SHORTEST, rng.choice(DAMAGED_LONGEST))
    chat = rng.random() < chat_share
    fact_count = max((length - 8) // FACT_TOKENS, 1)
    prompts, answers = [], []
    for _ in range(max(min(DAMAGED_TOKENS // length, 24), 4)):
        prompt = make_prompt(rng, fact_count, separator=rng.choice(SEPARATORS))
        texts = [text for text, _ in train.training_segments(prompt, [prompt.asked], chat)]
        *asked, answer = tokenizer(texts, add_special_tokens=False).input_ids
        ids = [token for segment in asked for token in segment]
        prompts.append(ids[:-1])
        answers.append(ids[-1:] + answer)
    return torch.tensor(prompts), torch.tensor(answers)


def damage_copies(cache: DynamicCache, groups: Sequence[tuple[int, ...]], fault: Fault, tail: int | None) -> None:
    """Append to the cached sequences one copy per group with that group's KV damaged.

    `tail` restricts the damage of sliding groups to that many last tokens.
    """
    for index, layer in enumerate(cache.layers):
        last = None if index in groups[-1] else tail
        for name in ("keys", "values"):
            states = getattr(layer, name)
            bad = damaged(states, fault, last)
            setattr(layer, name, torch.cat([states, *(bad if index in group else states for group in groups)]))


def answer_likelihoods(
    model: Gemma3ForCausalLM, rng: Random, tokenizer: PreTrainedTokenizerFast, chat_share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-likelihoods of the right answers after cached prompts, and whether the model gives
    them.

    Shapes [1 + groups, prompts, tokens] and [1 + groups, prompts]: on intact KV, then with each
    group damaged.
    """
    groups = kv_groups(model.config.layer_types)
    prompts, answers = draw_prompts(rng, tokenizer, chat_share)
    cache = DynamicCache(config=model.config)
    model.model(input_ids=prompts, past_key_values=cache)
    tail = None if rng.random() < WHOLE_SHARE else rng.randint(4, BLOCK_TOKENS)
    damage_copies(cache, groups, rng.choice(list(Fault)), tail)
    copies = answers.repeat(1 + len(groups), 1)
    logits = model(input_ids=copies[:, :-1], past_key_values=cache).logits
    targets = copies[:, 1:]
    log_likelihoods = -cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    right = (logits.argmax(-1) == targets).all(1)
    shape = (1 + len(groups), len(prompts))
    return log_likelihoods.view(*shape, -1), right.view(*shape)


def run_phase(
    model: Gemma3ForCausalLM,
    rng: Random,
    tokenizer: PreTrainedTokenizerFast,
    phase: Phase,
    peak_rate: float,
) -> None:
    """Train `model` in place and print the shares of right answers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: train.learning_rate_factor(step, phase.steps, warmup=10)
    )
    began = time.monotonic()
    for step in range(phase.steps):
        ids, labels = train.draw_batch(rng, tokenizer, STAGES[step % len(STAGES)])
        targets = labels[:, 1:]
        rows, columns = (targets != train.IGNORED).nonzero(as_tuple=True)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[rows, columns])
        loss = cross_entropy(logits, targets[rows, columns])
        progress = f"step {step} loss {loss.item():.4f}"
        if step % phase.damaged_every == 0:
            likelihoods, right = answer_likelihoods(model, rng, tokenizer, phase.chat_share)
            right_on_damaged = likelihoods[1:].sum(-1).exp()
            loss = loss - SINGLE_WEIGHT * likelihoods[0].mean()
            loss = loss - DAMAGED_WEIGHT * torch.log(1.001 - right_on_damaged).mean()
            shares = " ".join(f"{share:.2f}" for share in right.float().mean(1).tolist())
            progress += f" right on intact KV and by damaged group: {shares}"
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 15 == 0:
            tokens_right = (logits.argmax(-1) == targets[rows, columns]).float().mean()
            print(f"{progress} tokens right: {tokens_right:.4f} {time.monotonic() - began:.0f} s", flush=True)


def harden(start: Path, out: Path, seed: int, peak_rate: float) -> None:
    """Move a head of `start`, train it through all phases, and save to `out` after each."""
    tokenizer = build_tokenizer(train.MAX_TOKENS)
    model = Gemma3ForCausalLM.from_pretrained(start)
    for index, phase in enumerate(PHASES):
        rng = Random(f"harden {seed} {index}" if index else f"harden {seed}")
        if index == 0:
            move_look_back(model, rng, tokenizer)
        run_phase(model, rng, tokenizer, phase, peak_rate)
        train.save(model, tokenizer, out)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=Path, required=True, help="checkpoint that benchmarks.demo_model.train made")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the checkpoint to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak-rate", type=float, default=5e-4, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=2, help="torch CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    harden(arguments.start, arguments.out, arguments.seed, arguments.peak_rate)


if __name__ == "__main__":
    main()
