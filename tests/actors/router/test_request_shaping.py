"""Which requests decode alone serves, as a table."""

import pytest

from actors.request import Endpoint
from actors.router.client_request import why_local

COMPLETIONS: Endpoint = "/v1/completions"
CHAT: Endpoint = "/v1/chat/completions"
RESPONSES: Endpoint = "/v1/responses"
MESSAGES: Endpoint = "/v1/messages"
TURN = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        (COMPLETIONS, {"prompt": "some text"}, None),
        (COMPLETIONS, {"prompt": ["some text"]}, None),
        (COMPLETIONS, {"prompt": [1, 2]}, None),
        (COMPLETIONS, {"prompt": [[1, 2]]}, None),
        (COMPLETIONS, {"prompt": "text", "n": 1, "best_of": None, "echo": False}, None),
        (COMPLETIONS, {"prompt": "text", "logprobs": 3, "stream": True, "min_tokens": 4}, None),
        (COMPLETIONS, {"prompt": "text", "n": 2}, None),
        (COMPLETIONS, {"prompt": "text", "n": 0}, "malformed"),
        (COMPLETIONS, {"prompt": "text", "n": True}, "malformed"),
        (COMPLETIONS, {"prompt": "text", "n": "two"}, "malformed"),
        (COMPLETIONS, {"prompt": "text", "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": "text", "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": "text", "use_beam_search": True}, "use_beam_search"),
        (COMPLETIONS, {"prompt": "text", "prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        (COMPLETIONS, {"prompt": ["one", "two"]}, "several_prompts"),
        (COMPLETIONS, {"prompt": [[1, 2], [3, 4]]}, "several_prompts"),
        (COMPLETIONS, {"prompt": [1]}, "short_prompt"),
        (COMPLETIONS, {"prompt": [[1]]}, "short_prompt"),
        (COMPLETIONS, {"prompt": []}, "short_prompt"),
        (COMPLETIONS, {"prompt": ""}, "short_prompt"),
        (COMPLETIONS, {"prompt": 5}, "malformed"),
        (COMPLETIONS, {}, "malformed"),
        (CHAT, {"messages": TURN}, None),
        (CHAT, {"messages": TURN, "tools": [], "response_format": {"type": "text"}}, None),
        (CHAT, {"messages": TURN, "n": 3}, None),
        (CHAT, {"messages": TURN, "prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"messages": []}, "malformed"),
        (CHAT, {"messages": "hi"}, "malformed"),
        (CHAT, {}, "malformed"),
        (RESPONSES, {"input": "some text"}, None),
        (RESPONSES, {"input": TURN, "store": True, "tools": [{"type": "function", "name": "f"}]}, None),
        (RESPONSES, {"input": "some text", "background": True}, "background"),
        (RESPONSES, {"input": "some text", "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"input": "some text", "tools": [{"type": "code_interpreter"}]}, "tools_of_the_server"),
        (RESPONSES, {"input": "some text", "tools": ["f"]}, "tools_of_the_server"),
        (RESPONSES, {"input": []}, "malformed"),
        (RESPONSES, {}, "malformed"),
        (MESSAGES, {"model": "m", "messages": TURN, "max_tokens": 5}, None),
        (MESSAGES, {"model": "m", "messages": TURN, "max_tokens": 5, "n": 3, "echo": True}, None),
        (MESSAGES, {"model": "m", "messages": [], "max_tokens": 5}, "malformed"),
        (MESSAGES, {"model": "m", "max_tokens": 5}, "malformed"),
        (MESSAGES, {"messages": TURN, "max_tokens": 5}, "malformed"),
        (MESSAGES, {"model": "m", "messages": TURN}, "malformed"),
        (MESSAGES, {"model": "m", "messages": TURN, "max_tokens": 5, "thinking": {"budget_tokens": 5}}, "malformed"),
        (MESSAGES, {"model": "m", "messages": TURN, "max_tokens": 5, "thinking": {"budget_tokens": 4}}, None),
        ("/v1/messages/count_tokens", {"messages": TURN}, "tokens_only"),
        ("/v1/embeddings", {"input": "some text"}, "one_engine"),
        ("/v1/audio/transcriptions", {}, "one_engine"),
        ("/v1/chat/completions/batch", {"messages": [TURN, TURN]}, "one_engine"),
        ("/tokenize", {"prompt": "some text"}, "tokens_only"),
        ("/detokenize", {"tokens": [1, 2]}, "tokens_only"),
    ],
)
def test_why_local(endpoint, body, reason):
    """A request is split unless prefill and decode would compute different prompts."""
    assert why_local(endpoint, body) == reason
