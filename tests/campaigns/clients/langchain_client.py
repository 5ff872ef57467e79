"""Call LangChain's OpenAI chat model in its own ways; print the results as JSON.

    python langchain_client.py BASE_URL MODEL PROMPT BIAS

Needs `langchain-openai` only. BIAS is a `logit_bias` for answers in JSON.
"""

import asyncio
import json
import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Forecast(BaseModel):
    """A weather forecast."""

    days: Literal[1, 2, 3]
    sunny: bool


@tool
def forecast(days: int = Field(ge=1, le=9)) -> str:
    """The forecast for some days."""
    return f"{days}"


def main(base_url: str, model: str, prompt: str, bias: str) -> None:
    llm = ChatOpenAI(base_url=base_url, api_key="unused", model=model, temperature=0, max_tokens=30, max_retries=0)
    settings = {"max_tokens": 100, "logit_bias": json.loads(bias)}
    writer = ChatOpenAI(base_url=base_url, api_key="unused", model=model, temperature=0, max_retries=0, **settings)
    calls = writer.bind_tools([forecast], tool_choice="required", strict=True).invoke(prompt).tool_calls
    structured = writer.with_structured_output(Forecast, method="json_schema").invoke(prompt)
    said = {
        "whole": llm.invoke(prompt).content,
        "streamed": "".join(part.content for part in llm.stream(prompt)),
        "batch": [answer.content for answer in asyncio.run(llm.abatch([prompt] * 4))],
        "tool": calls[0]["args"],
        "structured": structured.model_dump(),
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
