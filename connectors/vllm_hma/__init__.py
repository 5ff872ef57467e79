"""The KV connectors that vLLM loads into its processes, and a tier for its OffloadingConnector.

TandemConnector runs the state machines of ``connectors/protocol`` and carries out their actions.
"""
