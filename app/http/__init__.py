"""The HTTP interface of a router: the API of `vllm serve`, metrics, health and status page."""
