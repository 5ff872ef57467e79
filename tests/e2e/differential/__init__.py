"""The service beside one vLLM OpenAI server with the same model: every feature, answer by answer."""
