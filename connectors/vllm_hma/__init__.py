"""The KV connectors that vLLM loads into its processes.

TandemConnector runs the state machines of ``connectors/protocol`` and carries out their actions.
"""
