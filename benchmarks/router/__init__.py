"""What a router costs: the same instant engines behind ours, vLLM's own, a plain proxy, and none."""
