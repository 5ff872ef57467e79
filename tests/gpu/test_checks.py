"""The checks of ``make gpu-check`` on the CPU, and on a GPU if there is one (``pytest -m gpu``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from configs.settings.parsing import parse_settings
from tests.campaigns.gpu import __main__ as as_module
from tests.campaigns.gpu import campaign as gpu_check
from tests.campaigns.gpu.device import set_current
from tests.campaigns.gpu.pair import Pair
from tests.campaigns.gpu.programs import configuration

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA GPU")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, NO_GPU])])
def device(request: pytest.FixtureRequest) -> torch.device:
    found = torch.device(request.param)
    set_current(found)
    return found


@pytest.fixture(scope="module")
def pair(device: torch.device) -> Iterator[Pair]:
    """Two processes. The other one is started once for all checks of a device."""
    with Pair(device, gpu_check.BULK_BYTES if device.type == "cuda" else 2**23) as both:
        yield both


@pytest.mark.parametrize("case", gpu_check.cases(gpu_check.CONFORMANCE), ids=lambda case: case.__name__)
def test_between_two_processes(pair: Pair, case: Callable[[Pair], str]) -> None:
    pair.refill()
    assert case(pair)


@pytest.mark.parametrize("case", gpu_check.cases(gpu_check.STEPS), ids=lambda case: case.__name__)
def test_of_steps(device: torch.device, case: Callable[[torch.device], str]) -> None:
    assert case(device)


def test_the_checks_run_without_vllm(pair: Pair) -> None:
    """The other process has imported transport, digests, fences and steps, and neither vLLM nor
    Ray.
    """
    imported = set(pair.call("modules"))
    assert {"torch", "nixl", "connectors"} <= imported
    assert not imported & {"vllm", "ray", "transformers", "pytest"}


def test_bundles_for_gpu_machines_find_the_checks() -> None:
    """They import them from the module that ``python -m tests.campaigns.gpu`` runs."""
    for name in ("STEPS", "CONFORMANCE", "ENGINES", "run"):
        assert getattr(as_module, name) is getattr(gpu_check, name)


@pytest.mark.gpu
@NO_GPU
def test_engines_on_a_gpu(tmp_path: Path) -> None:
    """Two shapes through vLLM, as ``make gpu-check`` runs them."""
    pytest.importorskip("vllm")
    result = list(gpu_check.run(gpu_check.ENGINES, "cuda:0", tmp_path))
    assert [each.verdict for each in result] == ["ok"], result


def test_the_service_has_the_arguments_of_gpu_yaml(tmp_path: Path) -> None:
    """Only the model differs with two GPUs; one is shared."""
    args = yaml.safe_load((ROOT / "configs" / "gpu.yaml").read_text())["applications"][0]["args"]
    for gpus in (0, 1, 2):
        path = configuration(tmp_path, gpus)
        given = parse_settings(yaml.safe_load(path.read_text())["applications"][0]["args"])
        assert (given.model, given.prefill.num_gpus, given.decode.num_gpus) == ("demo", gpus / 2, gpus / 2)
        if gpus == 2:
            assert given.engine == args["engine"] | {"max_model_len": 2048}
