"""Flows that a set of NetworkPolicies allows, as in Kubernetes: both ends must allow a flow.

A pod without policies for a direction is open in it; with several, any one of them may allow the
flow.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Pod:
    """One end of a flow.

    Without labels it is an address outside the cluster, which no policy restricts.
    """

    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = "tandem"
    namespace_labels: dict[str, str] = field(default_factory=dict)
    address: str = "10.1.2.3"


def allowed(policies: Iterable[dict[str, Any]], source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
    """Return whether `source` may connect to `port` of `target`.

    The policies are in namespace `tandem`.
    """
    listed = list(policies)
    return _passes(listed, "Egress", source, target, port, protocol) and _passes(
        listed, "Ingress", target, source, port, protocol
    )


def _passes(policies: list[dict[str, Any]], direction: str, own: Pod, peer: Pod, port: int, protocol: str) -> bool:
    selecting = [
        one["spec"]
        for one in policies
        if own.namespace == "tandem"
        and own.labels
        and direction in one["spec"]["policyTypes"]
        and selects(one["spec"]["podSelector"], own.labels)
    ]
    if not selecting:
        return True
    rules = [rule for spec in selecting for rule in spec.get(direction.lower(), [])]
    side = "to" if direction == "Egress" else "from"
    return any(_peers(rule.get(side), peer) and _ports(rule.get("ports"), port, protocol) for rule in rules)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether Kubernetes' label selector matches: all matchLabels and matchExpressions;
    an empty one matches all.
    """
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    expressions = selector.get("matchExpressions", [])
    assert all(one["operator"] == "In" for one in expressions), "k8s/ uses no other operator"
    return all(labels.get(one["key"]) in one["values"] for one in expressions)


def _peers(peers: list[dict[str, Any]] | None, pod: Pod) -> bool:
    return peers is None or any(_peer(one, pod) for one in peers)


def _peer(peer: dict[str, Any], pod: Pod) -> bool:
    if "ipBlock" in peer:
        address = ipaddress.ip_address(pod.address)
        inside = address in ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return inside and not any(address in ipaddress.ip_network(one) for one in peer["ipBlock"].get("except", []))
    if not pod.labels:
        return False
    if "namespaceSelector" not in peer:
        return pod.namespace == "tandem" and selects(peer["podSelector"], pod.labels)
    name = {"kubernetes.io/metadata.name": pod.namespace}
    return selects(peer["namespaceSelector"], pod.namespace_labels | name) and selects(
        peer.get("podSelector", {}), pod.labels
    )


def _ports(ports: list[dict[str, Any]] | None, port: int, protocol: str) -> bool:
    return ports is None or any(
        one.get("protocol", "TCP") == protocol and one["port"] <= port <= one.get("endPort", one["port"])
        for one in ports
    )
