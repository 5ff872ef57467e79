"""Build the demo model's tokenizer: one token per name, and one per byte of any other text."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from testing.facts import NAMES

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
USER_TURN, MODEL_TURN, TURN_END = "<start_of_turn>user\n", "<start_of_turn>model\n", "<end_of_turn>\n"
SPECIAL_TOKENS = (PAD, EOS, BOS, USER_TURN, MODEL_TURN, TURN_END)
"""Special tokens in the order of their ids, from 0.

The frame of a turn reads like Gemma's, but is one token.
"""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer') -%}
{%- set ns.system = ns.system + message['content'] | trim + '\\n' -%}
{%- else -%}
{%- set role = 'model' if message['role'] == 'assistant' else 'user' -%}
{{- '<start_of_turn>' + role + '\\n' + ns.system + message['content'] | trim + '<end_of_turn>\\n' -}}
{%- set ns.system = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""
"""Gemma's turns; system text opens the next user turn, because Gemma has no system role."""


def build_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the demo model, for sequences of up to `max_tokens` tokens.

    Byte-level BPE without merges: a run of lower-case letters that is in the vocabulary is one
    token (`ignore_merges`), and all other text is split into bytes. So any text encodes without an
    unknown token and decodes to itself.
    """
    words = (*SPECIAL_TOKENS, *NAMES, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    vocab = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[a-z]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocab[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[USER_TURN, MODEL_TURN, TURN_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
        padding_side="left",
    )
