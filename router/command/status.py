"""`diptych status`: the status object as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.command.console import Console

MIB = 1 << 20


def show(status: dict[str, Any], console: Console) -> None:
    """Print model, workers and links."""
    state = "ready" if status["ready"] else "NOT READY"
    console.say(f"{status['model']} ({status['revision']}), {status['mode']}: {state}")
    ingresses = ", ".join(f"{item['id']} (pid {item['pid']})" for item in status["ingresses"])
    console.say(f"ingress: {ingresses}\n")
    console.table(
        ("worker", "state", "pid", "control", "run", "wait", "blocks", "computed", "made", "MiB"),
        [_worker(worker) for worker in status["workers"]],
    )
    if status["links"]:
        console.say()
        console.table(
            ("link", "transport", "state", "epoch", "GB/s"),
            [_link(link) for link in status["links"]],
        )


def _worker(worker: dict[str, Any]) -> tuple[str, ...]:
    blocks = worker["blocks"]
    free = blocks["free"] + blocks["cached"]
    return (
        worker["id"],
        worker["state"],
        str(worker["pid"]),
        worker["control"],
        str(worker["running"]),
        str(worker["waiting"]),
        f"{free}/{blocks['total']} free",
        f"{worker['prefill_tokens']} tok",
        f"{worker['generated_tokens']} tok",
        f"{worker['rss_bytes'] / MIB:.0f}",
    )


def _link(link: dict[str, Any]) -> tuple[str, ...]:
    speed = link["gb_per_s"]
    return (
        f"{link['prefill']} -> {link['decode']}",
        link["transport"],
        link["state"],
        str(link["epoch"]),
        "-" if speed is None else f"{speed:.2f}",
    )
