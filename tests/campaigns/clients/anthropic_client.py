"""Call Anthropic's SDK in its own ways; print the answers as JSON. Needs `anthropic` alone.

python anthropic_client.py BASE_URL MODEL PROMPT
"""

import json
import sys

import anthropic

TOOL = {
    "name": "forecast",
    "description": "of the weather",
    "input_schema": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["days"],
        "additionalProperties": False,
    },
}


def main(base_url: str, model: str, prompt: str) -> None:
    client = anthropic.Anthropic(base_url=base_url, auth_token="unused", max_retries=0, timeout=120)
    # Not every version of the SDK has a parameter for the temperature.
    asked = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 30}
    asked["extra_body"] = {"temperature": 0}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    # The demo model writes no valid call of a tool without a bias, which this API lacks.
    offered = client.messages.create(**asked, tools=[TOOL], tool_choice={"type": "none"})
    refusals = []
    changes: list[dict[str, object]] = [{"model": "nobody"}, {"extra_body": {"temperature": -1}}, {"messages": []}]
    for wrong in changes:
        try:
            client.messages.create(**asked | wrong)
        except anthropic.APIStatusError as error:
            refusals.append(type(error).__name__)
    routes = [
        client.messages.with_raw_response.create(**asked).headers["x-tandem-route"],
        client.messages.with_raw_response.create(**asked, stream=True).headers["x-tandem-route"],
    ]
    said = {
        "whole": whole.content[0].text,
        "streamed": streamed.content[0].text,
        "kinds": sorted(set(kinds)),
        "stop": [whole.stop_reason, streamed.stop_reason, offered.stop_reason],
        "usage": [whole.usage.output_tokens, streamed.usage.output_tokens],
        "counted": client.messages.count_tokens(model=model, messages=asked["messages"]).input_tokens,
        "refusals": refusals,
        "routes": routes,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
