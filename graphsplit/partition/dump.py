"""A plan as text: what people read, and what workers compare before they run."""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.partition.plan import EdgeKind, PartitionPlan, SumTerm


def describe_plan(plan: PartitionPlan) -> str:
    """Placement, segments, edges and gradient sums of a plan."""
    nodes, workers = plan.placed.graph.nodes, plan.placed.workers
    lines = [plan.placed.graph.describe(), f"plan for {plan.num_workers} worker(s)"]
    for position, node in enumerate(nodes):
        if node.is_state:
            lines.append(f"  {node.kind.value} {node.target} lives on worker {workers[position]}")
    for segment, io in zip(plan.segments, plan.io, strict=True):
        names = " ".join(nodes[p].name for p in segment.nodes)
        lines.append(f"  seg{segment.index} worker {segment.worker} level {segment.level}: {names}")
        lines.append(
            f"    reads {list(io.values)} leaves {list(io.leaves)} makes "
            f"{list(io.outputs)} roots {list(io.roots)}"
        )
    for edge in plan.edges:
        what = (
            f" of contributions {list(edge.contributions)}"
            if (edge.kind is EdgeKind.GRADIENT)
            else ""
        )
        about = f" %{edge.value} {nodes[edge.value].name}"
        if edge.members:
            about = f" %{list(edge.members)}"
        lines.append(
            f"  edge{edge.index} {edge.kind.value}"
            f"{'' if edge.kind is EdgeKind.REDUCTION else about}{what}: "
            f"worker {edge.source} -> worker {edge.destination}, {edge.meta}, "
            f"{human_bytes(edge.meta.size_bytes)}"
        )
    for block in plan.blocks.values():
        lines.append(
            f"  v{list(block.members)}: parts added on workers {list(block.workers)}, blocks by "
            f"their last part {dict(block.ends)}, by edges {list(block.edges)}"
        )
    for first, chain in plan.chains.items():
        lines.append(
            f"  v{first}: updates {list(chain.updates)} of {list(chain.buffers)} of worker "
            f"{chain.owner}, on workers {list(chain.workers)}, by edges {list(chain.edges)}"
        )
    if plan.reduction is not None:
        lines.append(
            f"  reduction of {list(plan.reduction.sizes)} numbers by worker, gathered by worker "
            f"{plan.reduction.root}"
        )
    for value, terms in plan.gradient_sums.items():
        lines.append(f"  gradient of %{value} = {_sum(terms)}")
    for contribution, terms in plan.seeds.items():
        lines.append(f"  backward of leaf{contribution} begins with {_sum(terms)}")
    return "\n".join(lines)


def _sum(terms: Sequence[SumTerm]) -> str:
    parts = (
        f"leaf{t.contribution}" if t.contribution is not None else f"edge{t.edge}" for t in terms
    )
    return " + ".join(parts)


def human_bytes(size: float) -> str:
    """A number of bytes with a unit, for example ``18.0 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
