"""Train the demo model on key-value recall from scratch, and write a checkpoint to OUT.

Architecture and tokenizer are those of the committed checkpoint. Every training sequence has a
block of facts followed by many questions with their answers. Only the answers contribute to the
loss. Lengths grow over the run.

The first phase gives a model that answers well, but reads the question's name through the sliding
layers of one KV cache group only. The loss of the other sliding group would not show. So the head
that looks one token back, on which the first digit of an answer depends, then moves to the other
group, and two phases harden the model: answers on intact KV should be right, and answers on damaged
KV wrong.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import cos, pi
from random import Random

import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoTokenizer,
    DynamicCache,
    Gemma3ForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from app.demo.paths import MODEL_DIR
from benchmarks.demo_model.sensitivity import Fault, damaged, kv_groups
from testing.facts import FACT_TOKENS, NAMES, SEPARATORS, RecallPrompt, make_prompt

BOS, EOS = "<bos>", "<eos>"
USER_TURN, MODEL_TURN, TURN_END = "<start_of_turn>user\n", "<start_of_turn>model\n", "<end_of_turn>\n"
IGNORED = -100
"""Label of a position without loss."""


@dataclass(frozen=True)
class Batch:
    """Shortest and longest sequence of a batch, and all its tokens."""

    shortest: int
    longest: int
    tokens: int


@dataclass(frozen=True)
class Phase:
    """A part of the run with its own optimizer; one step for each of ``batches``.

    ``damaged_every``  interval, in steps, at which the loss includes answers on damaged KV; 0: none
    ``chat_share``     share of chats among these answers
    """

    seed: str
    batches: Sequence[Batch]
    peak_rate: float
    warmup: int
    damaged_every: int = 0
    chat_share: float = 0.0


FITTED = Batch(24, 512, 4096)
LEARNT = [Batch(24, 128, 2048)] * 300 + [FITTED] * 120 + [Batch(24, 1088, 6144)] * 180
KEPT = [Batch(24, 128, 2048), Batch(24, 512, 2048), Batch(300, 1088, 3072)]
PHASES = (
    Phase("train 0", LEARNT, 1e-3, warmup=30),
    Phase("harden 0", KEPT * 40, 5e-4, warmup=10, damaged_every=1, chat_share=0.35),
    Phase("harden 0 1", KEPT * 70, 5e-4, warmup=10, damaged_every=3),
)

FITTED_BATCHES = 16
"""Sequences on which the moved head is fitted to its former output."""

DAMAGED_TOKENS, DAMAGED_SHORTEST, DAMAGED_LONGEST = 1024, 24, (96, 160, 300)
"""Tokens of a step's prompts with damaged KV, and of the shortest and longest of them."""

BLOCK_TOKENS = 16

WHOLE_SHARE = 0.6
"""Share of steps that damage all of a sliding group's KV; the others damage its last block."""

DAMAGED_WEIGHT, SINGLE_WEIGHT = 0.9, 0.3
"""Weights of the loss on damaged KV, and on the same prompts' intact KV, relative to that on
the phase's sequences.
"""


@torch.no_grad()
def initialise(model: Gemma3ForCausalLM) -> None:
    """Initialise the model with an approximate recall circuit, which training completes.

    From random weights the model guesses the first digit for a long time and looks up the others by
    the digits before them. So the initial weights have the part that is hard to learn. The heads of
    the first sliding layer look 1, 2, 3 and 4 tokens back. Head h of the first full layer compares
    what its query's token saw h back with what its keys' tokens saw h + 1 back. This is the same
    name if the key's token is the next digit of the answer. All other weights are random.

    The configuration helps: the RoPE base of the full layers is so large that most dimensions
    barely turn and can match content at any distance, and `query_pre_attn_scalar` below head_dim
    sharpens the attention, whose logits would otherwise start at 5.7 or less.
    """
    config = model.config
    heads, width = config.num_attention_heads, config.head_dim
    half = width // 2
    model.model.embed_tokens.weight[:, 0] = 4 * config.initializer_range  # a constant for positional queries
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


@torch.no_grad()
def move_look_back(model: Gemma3ForCausalLM, rng: Random, tokenizer: PreTrainedTokenizerBase) -> None:
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

    seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    hooks = [
        layer.input_layernorm.register_forward_hook(
            lambda _module, _inputs, output, outputs=outputs: outputs.append(output.flatten(0, 1))
        )
        for layer, outputs in zip((source, target), seen, strict=True)
    ]
    is_name = []
    first, last = tokenizer.convert_tokens_to_ids([NAMES[0], NAMES[-1]])
    for _ in range(FITTED_BATCHES):
        ids, _labels = draw_batch(rng, tokenizer, FITTED)
        model.model(input_ids=ids, use_cache=False)
        is_name.append(((ids >= first) & (ids <= last)).flatten())
    for hook in hooks:
        hook.remove()
    before, after, names = torch.cat(seen[0]), torch.cat(seen[1]), torch.cat(is_name)
    for name in projections:
        rows = names if name == "v_proj" else torch.ones_like(names)
        inputs, outputs = after[rows], before[rows] @ wanted[name].T
        ridge = 1e-3 * len(inputs) * torch.eye(inputs.shape[1])
        fitted = torch.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ outputs)
        getattr(target.self_attn, name).weight[head] = fitted.T


def segments(prompt: RecallPrompt, asked: Sequence[int], chat: bool) -> Iterator[tuple[str, bool]]:
    """Yield a training sequence as (text, whether it contributes to the loss), in order.

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


def draw_batch(rng: Random, tokenizer: PreTrainedTokenizerBase, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw token ids and labels, both int64 [sequences, tokens].

    All sequences of a batch have the same numbers of facts and questions, so they need no padding.
    """
    length = rng.randint(batch.shortest, batch.longest)
    chat = rng.random() < 0.3
    question_tokens = FACT_TOKENS + (5 if chat else 0)
    fact_count = max(int(length * rng.uniform(0.4, 0.95)) // FACT_TOKENS, 1)
    question_count = min(max((length - fact_count * FACT_TOKENS) // question_tokens, 1), fact_count)
    sequences = max(batch.tokens // length, 1)
    drawn: list[tuple[str, bool]] = []
    for _ in range(sequences):
        prompt = make_prompt(rng, fact_count, separator=rng.choice(SEPARATORS))
        drawn += segments(prompt, rng.sample(range(fact_count), question_count), chat)
    ids: list[int] = []
    labels: list[int] = []
    tokens = tokenizer([text for text, _ in drawn], add_special_tokens=False).input_ids
    for segment, (_, is_trained) in zip(tokens, drawn, strict=True):
        ids += segment
        labels += segment if is_trained else [IGNORED] * len(segment)
    return torch.tensor(ids).view(sequences, -1), torch.tensor(labels).view(sequences, -1)


def answer_likelihoods(
    model: Gemma3ForCausalLM, rng: Random, tokenizer: PreTrainedTokenizerBase, chat_share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw prompts of one form and length; return log-likelihoods of the right answers after cached
    prompts, and whether the model gives them.

    Shapes [1 + groups, prompts, tokens] and [1 + groups, prompts]: on intact KV, then with each
    group damaged.
    """
    groups = kv_groups(model.config.layer_types)
    length = rng.randint(DAMAGED_SHORTEST, rng.choice(DAMAGED_LONGEST))
    chat = rng.random() < chat_share
    fact_count = max((length - 8) // FACT_TOKENS, 1)
    sequences = []
    for _ in range(max(min(DAMAGED_TOKENS // length, 24), 4)):
        prompt = make_prompt(rng, fact_count, separator=rng.choice(SEPARATORS))
        texts = [text for text, _ in segments(prompt, [prompt.asked], chat)]
        parts = tokenizer(texts, add_special_tokens=False).input_ids
        sequences.append([token for part in parts for token in part])
    ids = torch.tensor(sequences)
    cached = ids.shape[1] - len(parts[-1]) - 1  # the last token of a prompt is computed after the damage
    prompts, answers = ids[:, :cached], ids[:, cached:]
    cache = DynamicCache(config=model.config)
    model.model(input_ids=prompts, past_key_values=cache)
    tail = None if rng.random() < WHOLE_SHARE else rng.randint(4, BLOCK_TOKENS)
    fault = rng.choice(list(Fault))
    for index, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            states = getattr(layer, name)
            bad = damaged(states, fault, None if index in groups[-1] else tail)
            setattr(layer, name, torch.cat([states, *(bad if index in group else states for group in groups)]))
    copies = answers.repeat(1 + len(groups), 1)
    logits = model(input_ids=copies[:, :-1], past_key_values=cache).logits
    targets = copies[:, 1:]
    log_likelihoods = -cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    right = (logits.argmax(-1) == targets).all(1)
    shape = (1 + len(groups), len(prompts))
    return log_likelihoods.view(*shape, -1), right.view(*shape)


def run_phase(model: Gemma3ForCausalLM, rng: Random, tokenizer: PreTrainedTokenizerBase, phase: Phase) -> None:
    """Train `model` in place and print the shares of right tokens and answers."""
    steps, began = len(phase.batches), time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.peak_rate, betas=(0.9, 0.98), weight_decay=0.01)

    def rate(step: int) -> float:
        """Return the share of the peak rate: linear warm-up, then a cosine down to 2 %."""
        decay = 0.5 * (1 + cos(pi * step / steps))
        return min((step + 1) / phase.warmup, 1.0) * (0.02 + 0.98 * decay)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step, batch in enumerate(phase.batches):
        ids, labels = draw_batch(rng, tokenizer, batch)
        targets = labels[:, 1:]
        rows, columns = (targets != IGNORED).nonzero(as_tuple=True)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[rows, columns])
        loss = cross_entropy(logits, targets[rows, columns])
        progress = f"{phase.seed}: step {step} loss {loss.item():.4f}"
        if phase.damaged_every and step % phase.damaged_every == 0:
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


def main(*, out: str = "", threads: int = 2) -> None:
    if not out:
        raise SystemExit("OUT=FOLDER is required")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = Gemma3ForCausalLM(AutoConfig.from_pretrained(MODEL_DIR))
    model.generation_config = GenerationConfig.from_pretrained(MODEL_DIR)
    initialise(model)
    for number, phase in enumerate(PHASES):
        rng = Random(phase.seed)
        if number == 1:
            move_look_back(model, rng, tokenizer)
        run_phase(model, rng, tokenizer, phase)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out, save_jinja_files=False)
