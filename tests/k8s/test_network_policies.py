"""The NetworkPolicies together allow DNS, Ray, NIXL, the side channel, clients and metrics only."""

from __future__ import annotations

import pytest

from tests.k8s.check import DIRECTORIES, ROOT, only, pods
from tests.k8s.kustomize import Manifest, render
from tests.k8s.network import Pod, allowed
from tests.k8s.recorded import labels
from tests.k8s.service import RANK_PORTS

RAY = (6379, 6380, 6381, 6382, 6383, 8265, 10010, 10999, 52365)
RAY_PORTS = (
    *("object-manager-port", "node-manager-port", "runtime-env-agent-port", "dashboard-agent-grpc-port"),
    *("dashboard-agent-listen-port", "metrics-export-port", "min-worker-port", "max-worker-port"),
)
NIXL, HTTP, RAY_METRICS, REDIS, ROUTER = (20000, 20999), 8000, 8080, 6379, 8100
SIDE_CHANNEL, RPC = (5600, 5600 + RANK_PORTS - 1), (5700, 5700 + RANK_PORTS - 1)
AROUND = (5599, 5600 + RANK_PORTS, 5699, 5700 + RANK_PORTS)
OTHERS = (22, 443, *AROUND, 6384, 8001, 8101, 9000, 10001, 11000, 19999, 21000, 35000)
PORTS = {*RAY, *SIDE_CHANNEL, *RPC, *NIXL, HTTP, ROUTER, RAY_METRICS, REDIS, *OTHERS}
NODES = ("head", "router", "prefill", "decode")

DNS = Pod({"k8s-app": "kube-dns"}, "kube-system")
# NodeLocal DNSCache runs in the nodes' network, with an address of its own.
NODE_LOCAL_DNS = Pod(address="169.254.20.10")
OPENSHIFT_DNS = Pod({"dns.operator.openshift.io/daemonset-dns": "default"}, "openshift-dns")
OUTSIDE = Pod(address="203.0.113.9")
IN_CLUSTER = Pod({"app": "other"}, "elsewhere", address="10.4.4.4")
CLIENT = Pod({"tandem/client": "true"})
INGRESS = Pod({"app": "nginx"}, "ingress", {"tandem/client": "true"})
OPERATORS = tuple(
    Pod({"app.kubernetes.io/name": name, "app.kubernetes.io/component": "kuberay-operator"}, "kuberay")
    for name in ("kuberay", "kuberay-operator")  # of KubeRay's kustomization, and of its chart
)
PROMETHEUS = Pod({"app": "prometheus"}, "monitoring")


@pytest.fixture(scope="module", params=DIRECTORIES, ids=lambda path: path.name)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(request.param)


@pytest.fixture
def policies(manifests: list[Manifest]) -> list[Manifest]:
    return only(manifests, "NetworkPolicy")


@pytest.fixture
def tandem(manifests: list[Manifest]) -> dict[str, Pod]:
    """Return the service's own pods, with the labels that KubeRay gave them."""
    made = pods(manifests)
    assert set(made) == {*NODES, "tandem-redis"}
    assert all(made[name]["labels"].items() <= labels(name).items() for name in NODES)
    return {name: Pod(labels(name)) for name in NODES} | {"redis": Pod(pods(manifests)["tandem-redis"]["labels"])}


def test_the_nodes_have_the_ports_of_the_policies(manifests: list[Manifest]) -> None:
    """Ray would choose others at random."""
    (service,) = only(manifests, "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        given = {key: int(value) for key, value in group["rayStartParams"].items() if key.endswith("port")}
        assert set(given) == set(RAY_PORTS)
        assert set(given.values()) <= {*RAY, RAY_METRICS}


def reached(policies: list[Manifest], source: Pod, tandem: dict[str, Pod]) -> set[tuple[str, int]]:
    """Return the used ports, and some others, to which a pod may connect, by the target's name."""
    return {(name, port) for name, pod in tandem.items() for port in PORTS if allowed(policies, source, pod, port)}


def test_between_the_services_own_pods(policies: list[Manifest], tandem: dict[str, Pod]) -> None:
    """The policies match the table of every pair of pods."""
    wanted = {(a, b, port) for a in NODES for b in NODES for port in RAY}
    wanted |= {("head", "redis", REDIS), *(("decode", "prefill", port) for port in (*SIDE_CHANNEL, *RPC))}
    wanted |= {("router", role, port) for role in ("prefill", "decode") for port in RPC}
    wanted |= {(a, b, port) for a, b in (("decode", "prefill"), ("prefill", "decode")) for port in NIXL}
    wanted |= {("decode", "decode", port) for port in (*SIDE_CHANNEL, *NIXL)}
    assert {(name, *one) for name, pod in tandem.items() for one in reached(policies, pod, tandem)} == wanted


def test_dns_and_nothing_else_of_it(policies: list[Manifest], tandem: dict[str, Pod]) -> None:
    """Every pod resolves names at the resolvers of Kubernetes, its node and OpenShift only."""
    resolvers = ((DNS, 53), (NODE_LOCAL_DNS, 53), (OPENSHIFT_DNS, 5353))
    strangers = (Pod(DNS.labels, "elsewhere"), Pod(OPENSHIFT_DNS.labels, "elsewhere"), Pod(address="169.254.169.254"))
    for pod in tandem.values():
        for protocol in ("UDP", "TCP"):
            assert all(allowed(policies, pod, resolver, port, protocol) for resolver, port in resolvers)
            assert not any(allowed(policies, pod, one, port, protocol) for one in strangers for port in (53, 5353))
        assert not any(allowed(policies, pod, resolver, 9153) for resolver, _ in resolvers)


def test_who_may_come_in(manifests: list[Manifest], policies: list[Manifest], tandem: dict[str, Pod]) -> None:
    """Only clients reach the proxies and the routers, only the operator the head, only Prometheus,
    if there is a PodMonitor, the metrics.
    """
    public = {("router", HTTP), ("router", ROUTER), ("prefill", HTTP), ("decode", HTTP)}
    scraped = {("router", HTTP), *((name, RAY_METRICS) for name in NODES)} if only(manifests, "PodMonitor") else set()
    rows: list[tuple[Pod, set[tuple[str, int]]]] = [(OUTSIDE, set()), (IN_CLUSTER, set()), (PROMETHEUS, scraped)]
    rows += [(client, public) for client in (CLIENT, INGRESS)]
    rows += [(operator, {("head", HTTP), ("head", 8265)}) for operator in OPERATORS]
    for source, wanted in rows:
        assert reached(policies, source, tandem) == wanted, source


def test_who_may_go_out(policies: list[Manifest], tandem: dict[str, Pod]) -> None:
    """The autoscaler reaches Kubernetes; with the hub component, engines reach port 443 outside."""
    hub = any(one["metadata"]["name"] == "tandem-hub" for one in policies)
    ports = (80, 443, 6443, 8443)
    found = {
        (name, peer, p)
        for name, pod in tandem.items()
        for peer, target in (("outside", OUTSIDE), ("cluster", IN_CLUSTER))
        for p in ports
        if allowed(policies, pod, target, p)
    }
    wanted = {("head", peer, port) for peer in ("outside", "cluster") for port in (443, 6443)}
    assert found == wanted | ({("prefill", "outside", 443), ("decode", "outside", 443)} if hub else set())


def test_the_gateway_of_an_incremental_upgrade() -> None:
    """The Gateway's pods are clients, by the label of the Gateway API."""
    policies = only(render(ROOT / "overlays" / "gpu-incremental"), "NetworkPolicy")
    router = Pod({"tandem/service": "tandem", "tandem/role": "router"})
    gateway = {"gateway.networking.k8s.io/gateway-name": "tandem-gateway"}
    assert allowed(policies, Pod(gateway), router, HTTP)
    assert not allowed(policies, Pod(gateway, "elsewhere"), router, HTTP)


def test_without_the_first_policy_everything_passes() -> None:
    """The other policies alone allow a connection that the table above refuses."""
    policies = [one for one in only(render(ROOT / "base"), "NetworkPolicy") if one["metadata"]["name"] == "tandem-dns"]
    assert allowed(policies, IN_CLUSTER, Pod({"tandem/service": "tandem", "tandem/role": "head"}), 8265)
