"""Stand-in for kubectl: at each `get`, operator, autoscaler and Serve take one step.

Like KubeRay 1.7.0 and Ray 2.60 in a trial: the operator copies the whole spec, and a deleted pod
stays until its replica runs elsewhere, or until its drain ends.
"""

import copy
import json
import os
import sys
from pathlib import Path

DRAIN = 6


def main(arguments: list[str]) -> None:
    file = Path(os.environ["FAKE_CLUSTER"])
    cluster = json.loads(file.read_text(encoding="utf-8"))
    if arguments[3:] == ["config", "current-context"]:
        sys.exit(print(cluster["context"]))
    assert arguments[2] == f"--context={cluster['begun_in']}"
    answer = run(cluster, *arguments[3:])  # after --namespace NAME --context=NAME
    cluster["context"] = "another"  # chosen in another shell
    file.write_text(json.dumps(cluster), encoding="utf-8")
    print(json.dumps(answer))


def run(cluster: dict, verb: str, *arguments: str) -> dict:
    """Change the cluster as kubectl would, and return what it prints."""
    rest = [*arguments]
    if verb == "get":
        advance(cluster)
        return {"items": [cluster["service"], cluster["cluster"], *cluster["pods"]]}
    if verb == "exec":
        if not cluster["serving"]:
            sys.exit("error: unable to upgrade connection")
        return {"applications": {"tandem": {"status": "RUNNING", "deployments": cluster["deployments"]}}}
    if verb == "patch":
        config = cluster["service"]
        for one in json.loads(rest[-1]):
            *path, last = [int(key) if key.isdigit() else key for key in one["path"].split("/")[1:]]
            target = config
            for key in path:
                target = target[key]
            if one["op"] == "test":
                assert target[last] == one["value"]
            else:
                target[last] = one["value"]
    elif verb == "annotate":
        known = {one["metadata"]["name"]: one for one in (cluster["cluster"], *cluster["pods"])}
        (pair,) = [one for one in rest if "=" in one]
        key, value = pair.split("=")
        for name in rest[1 : rest.index(pair)]:
            known[name]["metadata"].setdefault("annotations", {})[key] = value
    elif verb == "delete":
        (pod,) = [one for one in cluster["pods"] if one["metadata"]["name"] == rest[1]]
        pod["metadata"]["deletionTimestamp"] = 0
        ready = {
            one["status"]["podIP"] for one in cluster["pods"] if one["status"]["conditions"][0]["status"] == "True"
        }
        whole = all(
            sum(one["state"] == "RUNNING" and one["node_ip"] in ready for one in deployment["replicas"])
            == deployment["target_num_replicas"]
            for deployment in cluster["deployments"].values()
        )
        alone = sum("deletionTimestamp" in one["metadata"] for one in cluster["pods"]) == 1
        assert ("--grace-period=1" in rest) == (pod["status"]["phase"] == "Pending")
        cluster["log"].append([pod["metadata"]["name"], whole and alone, len(holding(cluster, pod))])
    return {}


def on(cluster: dict, pod: dict) -> list[dict]:
    ip = pod["status"]["podIP"]
    return [one for each in cluster["deployments"].values() for one in each["replicas"] if one["node_ip"] == ip]


def holding(cluster: dict, pod: dict) -> list[dict]:
    return [one for one in on(cluster, pod) if one["state"] != "STARTING"]


def advance(cluster: dict) -> None:
    ray = cluster["cluster"]
    if ray["metadata"]["annotations"].get("ray.io/kuberay-version") == "none" and cluster["operator"]:
        ray["spec"] = copy.deepcopy(cluster["service"]["spec"]["rayClusterConfig"])
        for group in ray["spec"]["workerGroupSpecs"]:
            group["scaleStrategy"] = {}  # an empty struct of the operator's
        ray["metadata"]["annotations"] = {"ray.io/kuberay-version": "v1.7.0"}
    for pod in [one for one in cluster["pods"] if "deletionTimestamp" in one["metadata"]]:
        pod["metadata"]["deletionTimestamp"] += 1
        for replica in on(cluster, pod):
            replica["state"] = "PENDING_MIGRATION" if replica["state"] == "RUNNING" else replica["state"]
        if not holding(cluster, pod) or pod["metadata"]["deletionTimestamp"] > DRAIN:
            cluster["cut"] += len(holding(cluster, pod))
            for replica in on(cluster, pod):
                replica |= {"state": "STARTING", "node_ip": None}
            cluster["pods"].remove(pod)
    cluster["serving"] = any(one["metadata"]["labels"]["ray.io/group"] == "headgroup" for one in cluster["pods"])
    if not cluster["serving"]:
        create(cluster, ray["spec"]["headGroupSpec"], "headgroup", ready=True)
        return
    for group in ray["spec"]["workerGroupSpecs"]:
        scale(cluster, group, cluster["deployments"][group["groupName"]]["replicas"])


def scale(cluster: dict, group: dict, replicas: list[dict]) -> None:
    name = group["groupName"]
    pods = [one for one in cluster["pods"] if one["metadata"]["labels"]["ray.io/group"] == name]
    staying = [one for one in pods if "deletionTimestamp" not in one["metadata"]]
    for pod in staying:  # the kubelet's probe comes after the replica
        pod["unready"] = pod.get("unready", 4) - any(one["state"] == "RUNNING" for one in on(cluster, pod))
        if not pod["unready"]:
            pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    free = [one for one in staying if not on(cluster, one)]
    homeless = [one for one in replicas if one["state"] == "PENDING_MIGRATION" or not one["node_ip"]]
    asking = [one for one in homeless[len(free) :] if not one.get("asked")]
    if asking:  # once for each replica: then the autoscaler waits for the pod that it expects
        asking[0]["asked"] = True
        group["replicas"] = min(max(group["replicas"], len(staying)) + 1, group["maxReplicas"])
    for replica, pod in zip(homeless, free, strict=False):
        works = "broken" not in pod["spec"]["containers"][0]["image"] and name != cluster["stuck"]
        replica |= {"node_ip": pod["status"]["podIP"], "state": "RUNNING" if works else "STARTING", "asked": False}
        pod["status"]["phase"] = "Running"
    for _ in range(group["replicas"] - len(pods)):
        create(cluster, group, name, ready=False)


def create(cluster: dict, group: dict, name: str, *, ready: bool) -> dict:
    cluster["made"] += 1
    pod = copy.deepcopy(cluster["recorded"][name])
    pod["metadata"]["name"] = f"{name}-{cluster['made']}"
    pod["metadata"]["annotations"] = dict(group["template"]["metadata"].get("annotations", {}))
    pod["spec"]["containers"][0]["image"] = group["template"]["spec"]["containers"][0]["image"]
    pod["status"] = {"podIP": f"10.0.0.{cluster['made']}", "phase": "Running" if ready else "Pending"}
    pod["status"]["conditions"] = [{"type": "Ready", "status": "True" if ready else "False"}]
    cluster["pods"].append(pod)
    return pod


if __name__ == "__main__":
    main(sys.argv[1:])
