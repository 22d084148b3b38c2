"""What ranks say about the files they have written, and the manifest that is made of it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from zerohvd._version import __version__
from zerohvd.checkpoint.entries import Content
from zerohvd.checkpoint.manifest import Manifest, Part, ShardFile, put_together
from zerohvd.checkpoint.writer.shard import Written


def fragment_of(content: Content, written: Written, rank: int) -> dict[str, Any]:
    """What a rank says about its shard, as JSON can."""
    fragment: dict[str, Any] = {
        "file": written.file,
        "parts": written.parts,
        "values": content.values,
        "rank_state": content.rank_state,
    }
    if rank == 0:
        fragment["head"] = [
            content.framework, content.step, dict(content.config), content.state,
        ]  # fmt: skip
    return fragment


def manifest_of(
    save_id: str,
    size: int,
    fragments: Sequence[dict[str, Any]],
    further: Sequence[dict[str, Any]] = (),
) -> Manifest:
    """The manifest of files that ranks have written.

    Args:
        save_id: Of the save.
        size: Number of ranks.
        fragments: In rank order.
        further: Files beside these, of which only "file" and "parts" count.
    """
    framework, step, config, state = fragments[0]["head"]
    files = [*fragments, *further]
    found = (
        (key, dtype, shape, Part(start, stop, index, offset, sums))
        for index, fragment in enumerate(files)
        for key, dtype, shape, start, stop, offset, sums in fragment["parts"]
    )
    values: dict[str, Any] = {}
    for fragment in fragments:
        values.update(fragment["values"])
    return Manifest(
        id=save_id,
        framework=framework,
        size=size,
        step=step,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        writer=f"zerohvd {__version__}",
        config=config,
        files=tuple(ShardFile(*f["file"]) for f in files),
        tensors=put_together(found),
        values=values,
        state=state,
        rank_states=tuple(f["rank_state"] for f in fragments),
    )
