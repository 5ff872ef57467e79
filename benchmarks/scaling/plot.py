"""Plot benchmarks/results/scaling.json: `python -m benchmarks.scaling.plot` writes
docs/images/scaling-*.svg.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from benchmarks.scaling.__main__ import shown

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "scaling.json"
IMAGES = ROOT / "docs" / "images"
COLOURS = {"together": "#0b6e4f", "Serve's": "#b5651d", "chosen": "#4a4a8a"}


def main() -> None:
    """Write both figures."""
    plt.switch_backend("svg")
    # With a fixed salt, equal results give equal files.
    plt.rcParams.update(
        {"svg.hashsalt": "tandem", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    loads = json.loads(RESULTS.read_text())["loads"]
    IMAGES.mkdir(parents=True, exist_ok=True)
    _save(_attainment(loads), "scaling-attainment.svg")
    _save(_replicas(loads), "scaling-replicas.svg")


def _attainment(loads: dict[str, Any]) -> Any:
    """Plot a panel for each load: GPU-hours against the share of requests that met both
    objectives.
    """
    ours_shown, serves_shown = shown(loads)
    columns = 2
    rows = -(-len(loads) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(9, 2.9 * rows), squeeze=False)
    for panel in axes.flat[len(loads) :]:
        panel.set_visible(False)
    for panel, (name, load) in zip(axes.flat, loads.items(), strict=False):
        for policy, outcome in load["policies"].items():
            ours = policy.startswith("together")
            singled = policy in (ours_shown, serves_shown)
            panel.scatter(
                outcome["gpu_hours"],
                100 * outcome["attained"],
                color=COLOURS["together" if ours else "chosen" if singled else "Serve's"],
                marker="o" if ours else "s" if singled else "x",
                s=46 if singled else 26,
                label="together" if ours else serves_shown if singled else "Serve's, other targets",
            )
        panel.set_title(f"{name}: {load['about']}", fontsize=8.5)
        panel.set_xlabel("GPU-hours")
        panel.set_ylabel("both objectives met (%)")
        panel.grid(alpha=0.3)
    handles = {label: handle for handle, label in zip(*axes.flat[0].get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    return figure


def _replicas(loads: dict[str, Any]) -> Any:
    """Plot a row for each load and a column for each policy: engines that are ready, and engines
    paid for.
    """
    figure, axes = plt.subplots(len(loads), 2, figsize=(9, 2.1 * len(loads)), sharex="row", sharey="row", squeeze=False)
    for row, (name, load) in zip(axes, loads.items(), strict=True):
        for panel, policy in zip(row, shown(loads), strict=True):
            outcome = load["policies"][policy]
            minutes = [point["at_s"] / 60 for point in outcome["timeline"]]
            for role, colour in (("prefill", "#1f6fb2"), ("decode", "#c0392b")):
                for state, style in (("ready", "-"), ("paid", ":")):
                    values = [point[f"{role}_{state}"] for point in outcome["timeline"]]
                    panel.step(minutes, values, style, color=colour, where="post", label=f"{role}, {state}", lw=1.2)
            panel.set_title(
                f"{name}, {policy}: {outcome['attained']:.1%}, {outcome['gpu_hours']:.1f} GPU-hours", fontsize=8.5
            )
            panel.set_ylabel("engines")
            panel.grid(alpha=0.3)
    for panel in axes[-1]:
        panel.set_xlabel("minutes")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    return figure


def _save(figure: Any, name: str) -> None:
    figure.savefig(IMAGES / name, metadata={"Date": None})
    # Matplotlib leaves trailing blanks.
    path = IMAGES / name
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    plt.close(figure)
    print(f"tandem: wrote {path}")


if __name__ == "__main__":
    main()
