"""Draw docs/assets/memory.svg: what one rank holds at each stage, by zerohvd's own arithmetic.

    python docs/tools/memory_picture.py
"""

from __future__ import annotations

import math
from pathlib import Path

from zerohvd.layout import ParamSpec
from zerohvd.planning.footprint import footprint
from zerohvd.planning.workload import from_specs, units_by_name

RANKS, LAYERS, DIM, VOCAB = 8, 24, 2048, 50304
PICTURE = Path(__file__).resolve().parents[1] / "assets" / "memory.svg"
KINDS = {
    "params": ("parameters", "#00796b"),
    "grads": ("gradients", "#ffb300"),
    "optimizer": ("optimizer state", "#5c6bc0"),
    "buffers": ("on their way", "#b0bec5"),
}
STAGES = {0: "Horovod", 1: "stage 1", 2: "stage 2", 3: "stage 3"}
WIDTH, HEIGHT, BAR, LEFT = 640, 320, 84, 24


def model() -> list[ParamSpec]:
    """A GPT of 1.3 billion parameters."""
    shapes = {
        "qkv": (3 * DIM, DIM),
        "proj": (DIM, DIM),
        "up": (4 * DIM, DIM),
        "down": (DIM, 4 * DIM),
    }
    blocks = [
        ParamSpec(f"blocks.{layer}.{name}", shape)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    ]
    return [ParamSpec("tokens", (VOCAB, DIM)), *blocks]


def held() -> dict[int, dict[str, int]]:
    """Stage -> bytes of each kind."""
    units = units_by_name([spec.name for spec in model()])
    workload = from_specs(model(), units, name="GPT")
    found = {stage: footprint(workload, stage, RANKS) for stage in STAGES}
    return {
        stage: {
            "params": f.params,
            "grads": f.grads,
            "optimizer": f.optimizer,
            "buffers": f.buffers + (f.gathered or 0),
        }
        for stage, f in found.items()
    }


def draw() -> str:
    found = held()
    scale = (HEIGHT - 110) / sum(found[0].values())
    bottom = HEIGHT - 50
    count = sum(math.prod(spec.shape) for spec in model()) / 1e9
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-weight="bold">GiB per rank: {count:.1f} billion parameters, '
        f"Adam in float32, {RANKS} ranks</text>",
    ]
    for index, (stage, title) in enumerate(STAGES.items()):
        x, y = LEFT + index * (BAR + 34), float(bottom)
        for kind, (_, colour) in KINDS.items():
            height = found[stage][kind] * scale
            y -= height
            parts.append(
                f'<rect x="{x}" y="{y:.1f}" width="{BAR}" height="{height:.1f}" fill="{colour}"/>'
            )
        total = f"{sum(found[stage].values()) / 2**30:.1f}"
        for where, text in ((y - 6, total), (bottom + 20, title)):
            at = f'x="{x + BAR / 2}" y="{where:.1f}" text-anchor="middle"'
            parts.append(f"<text {at}>{text}</text>")
    x = LEFT + len(STAGES) * (BAR + 34)
    for index, (title, colour) in enumerate(KINDS.values()):
        y = 60 + 24 * index
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}" font-size="12">{title}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw())
