"""Write ``build/upstream-shapes.md`` from the results of ``upstream_shapes.py``."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

from tests.campaigns.shapes.families import Family
from tests.campaigns.shapes.upstream_shapes import CASES, LIMIT_S, REQUEST_LIMIT_S, RESULTS, TODO

PAGE = Path(__file__).parents[3] / "build" / "upstream-shapes.md"
NAMES = {"tandem": "Tandem", "NixlConnector": "NixlConnector"}
KINDS = {
    "llama": "full attention, 4 KV heads",
    "gemma3": "full and sliding-window attention",
    "gpt_oss": "full and sliding-window attention, sinks",
    "llama4": "full and chunked attention",
    "deepseek_v2": "MLA: one latent head",
    "falcon_h1": "full attention and Mamba-2, 1 state group",
    "falcon_h1_two_groups": "full attention and Mamba-2, 2 state groups",
    "lfm2": "full attention and short convolutions",
    "qwen3_next": "full attention (2 KV heads) and gated delta net, bfloat16",
    "llama_1_kv_head": "full attention, 1 KV head",
    "llama_2_kv_heads": "full attention, 2 KV heads",
}
HEAD = """# Upstream shapes: Tandem and NixlConnector

<!-- Written by `make upstream-shapes` from `benchmarks/results/upstream_shapes.json`; do not edit. -->

Every row is one pair of engines on vLLM's **CPU** build with a tiny model of random weights,
created for the run. It shows which cache shapes a connector accepts and whether the answers are
right. It does not show speed, load (requests are sent one at a time), or GPUs, where vLLM has other
attention backends and cache layouts.

| verdict | means |
|---|---|
| works | all answers equal those of the decode engine alone, and KV moved for every prompt of more than one token |
| wrong | an answer differs from that of the decode engine alone |
| recomputes | the answers are right, but for some prompts no KV moved |
| refuses | an engine does not start, or the requests end with an error; both engines live |
| crashes | an engine is dead |
| hangs | no answer within the time limit |
| - | not measured |

Answers are equal if their greedy tokens are, and the first token's logprobs within 1e-4 (0.3 for
bfloat16).

## Results
"""

READING = """## Causes

From vLLM 0.32.0's source, not measured unless stated. Paths are below `vllm/`.

- *wrong* with a sliding window, also at TP 1 → 1, and only at prompts of 159 and 479 tokens: of the
  lengths sent, only for those two does the window's far edge meet a block's edge (a window of 128
  tokens, blocks of 32). The consumer's blocks are allocated for n computed tokens
  (`v1/core/single_type_kv_cache_manager.py`, `get_num_skipped_tokens`). Then token n - 1 is
  computed again (`v1/core/sched/scheduler.py`, `_update_waiting_for_remote_kv`), and its window
  begins one token earlier, in a block that was never fetched. One token of 128 is lost, so the
  answer differs by little: with gpt-oss by 1.2e-4, just above the tolerance, where Tandem's TP 1 →
  1 differs by 0. Models with a state are not affected, because the last token is left out for them
  (`_prefill_backoff` in `nixl/base_scheduler.py`).
- *crashes* with chunked attention at 256 tokens, the only length sent that is a multiple of the
  chunk (128).
- *wrong* for Falcon-H1 with one state group where the numbers of ranks differ: every rank holds the
  whole group (`mamba_utils.py`, `extra_groups_for_head_shards`), and the connector cuts it like the
  heads (`ssm_conv_transfer_utils.py`).
- *wrong* where decode's blocks are larger: CPU attention keeps a block's keys before its values
  (`platforms/cpu.py`), so two adjacent blocks of 32 are not one of 64. Other attention backends lay
  out their blocks differently; this row is the most likely to differ on a GPU.
- *wrong* for LFM2 (TP 1 → 1 and 2 → 2) cannot be attributed: on this build one engine without a
  connector disagrees with itself. The logprob of a prompt's second token, and that of the first
  token after the prompt and its first token, differ by up to 0.09 (measured at TP 1; Falcon-H1:
  5e-6). Tandem's decode computes the last prompt token in a decode step; the reference computes it
  with the rest of the prompt.
"""


def _row(name: str, family: Family, tp: tuple[int, int], results: dict[str, Any], notes: list[str]) -> str:
    cells = []
    for connector in NAMES:
        report = results.get(f"{connector} {name} {tp[0]}:{tp[1]}")
        cell = "-"
        if report:
            cell = report["verdict"] if report["verdict"] == "works" else f"**{report['verdict']}**"
            quote = f" `{report['quote']}`" if report.get("quote") else ""
            if report["verdict"] != "works" or report["reason"]:
                counts = f"{report['equal']} of {report['checked']} equal. " if report.get("checked") else ""
                first, *others = report["reason"].partition(": Engine core")[0].split("; ")
                reason = "; ".join([first, *others] if len(others) < 2 else [first, f"{len(others)} more"])
                note = f"{NAMES[connector]}: {counts}{reason}{'.' if quote else ''}{quote}"
                if note not in notes:
                    notes.append(note)
                cell += f" [{notes.index(note) + 1}]"
        cells.append(cell)
    base = name.partition("_blocks_")[0]
    sides = (family.prefill, family.decode)
    blocks = " → ".join(str((family.engine | side).get("block_size", 32)) for side in sides)
    model = re.sub(r"_(\d_kv_heads?|two_groups)$", "", base)
    return f"| {' | '.join([model, KINDS[base], f'{tp[0]} → {tp[1]}', blocks, *cells])} |"


def page(results: dict[str, Any]) -> str:
    """Return the text of the whole page."""
    notes: list[str] = []
    titles = ["Model", "KV", "TP, prefill → decode", "Blocks", *NAMES.values()]
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    rows += [_row(name, family, tp, results, notes) for name, family in CASES.items() for tp in family.pairs]
    versions = {", ".join(f"{name} {at}" for name, at in report["versions"].items()) for report in results.values()}
    days = sorted({report["on"] for report in results.values()})
    merged = any(report["command"].endswith("families") for report in results.values())
    parts = [
        HEAD,
        "\n".join(rows),
        "\n## Notes\n",
        "\n".join(f"{n}. {note}" for n, note in enumerate(notes, 1)),
        "",
        READING,
    ]
    conditions = [
        f"Versions: {'; '.join(sorted(versions))}. Measured on {' and '.join(days)} by"
        " `python -m tests.campaigns.shapes.upstream_shapes`, on 2 cores shared with other work.",
        f"{len(TODO)} prompts of {min(map(len, TODO))} to {max(map(len, TODO))} tokens, each sent once: to the prefill"
        " engine with `do_remote_decode`, then its `kv_transfer_params` unchanged to the decode engine.",
        "Whether KV moved: the bytes that the decode engine's `vllm:nixl_bytes_transferred` counts (for Tandem: the"
        " workers' trace) have grown during the request, and so has its `vllm:prompt_tokens_by_source` of"
        " `external_kv_transfer`. Its prefix cache is off.",
        f"Limits: {LIMIT_S} s for a case, {REQUEST_LIMIT_S} s for a request.",
        "NixlConnector: roles `kv_producer` and `kv_consumer`, everything else at its default: pull mode,"
        " `kv_load_failure_policy` fail, LBHNC layout, UCX. `VLLM_SSM_CONV_STATE_LAYOUT` is what vLLM's CPU platform"
        " chooses for it (DS). Its workers pin themselves to the machine's last core; they are given all cores back."
        " With the policy recompute, requests that end with an error here may be recomputed instead.",
        "Tandem: `kv_load_failure_policy` recompute, which hides no failure here: a prompt without moved KV is not"
        " counted as moved.",
        "Engines are forked from one process that has imported vLLM, where vLLM's CPU platform would spawn them; one"
        " thread a process, `torch.compile` off.",
        "Qwen3-Next is bfloat16: computing the last prompt token apart from the others rounds otherwise, by up to 0.26"
        " in a first token's logprob, to the last digit the same with either connector (TP 1 → 1, 641 tokens).",
        "A verdict holds for these settings. Hybrid cache manager, eager mode, no prefix cache, chunks of 256 tokens,"
        " float32 (Qwen3-Next bfloat16). Another layout, backend or device can change it.",
    ]
    if merged:
        conditions.append(
            "Tandem's side of the families' own pairs comes from"
            " `python -m tests.campaigns.shapes.families --prompts 24`"
            " where it was run: the same models, arguments and comparison, more prompts, three of four sent to both"
            " engines at once, engines spawned."
        )
    wrapped = (
        textwrap.fill(f"- {condition}", 100, subsequent_indent="  ", break_on_hyphens=False) for condition in conditions
    )
    return "\n".join([*parts, "## Conditions\n", *wrapped]) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
