"""The output of bench/retrieval.py: table, sentences, plot, and the result of a soak."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.gates import replace_section
from bench.machine import cores, machine
from bench.retrieval_truth import Checked
from bench.retrieval_world import SHARED, Stream

README = Path(__file__).parent / "README.md"
PLOT = Path(__file__).parent / "retrieval.png"
TITLE, SOAK_TITLE = "## Retrieval", "## Retrieval soak"
PACKAGES = ("torch", "sentence-transformers", "chromadb", "faiss-cpu", "fastapi", "uvicorn")
WARM_UP_S = 3.0
FLAT = 0.02
"""Memory is flat if it grew by less than this share, or by 1 MiB, in the second half of a soak."""


@dataclass(frozen=True)
class Row:
    """One measurement. Latencies in ms, `*_ms` in CPU milliseconds per query."""

    peer: str
    stream: Stream
    clients: int
    per_second: float
    p50: float
    p99: float
    server_ms: float
    encoders_ms: float
    clients_ms: float
    refused: int
    failed: int
    checked: Checked


@dataclass(frozen=True)
class Soak:
    """A long load. `memory` has samples by process: (seconds, proportional set size in MiB)."""

    row: Row
    answered: int
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class About:
    """The setting of the measurements."""

    passages: int
    embedder: str
    queries: int
    seconds: float
    flags: str

    def __str__(self) -> str:
        flags = f"; our server with `{self.flags}`" if self.flags else ""
        return (
            f"{machine(*PACKAGES)}. {self.passages:,} passages of a demo world by {self.embedder}, "
            f"{self.queries:,} distinct queries, topk 3, one query per request, "
            f"{self.seconds:g} s per load after {WARM_UP_S:g} s of warm-up; OMP_NUM_THREADS=1 for all{flags}."
        )


@dataclass(frozen=True)
class Costs:
    """CPU milliseconds per query by batch size, each part alone, with `encoder_one` on an idle machine."""

    encoder: dict[int, float]
    encoder_one: dict[int, float]
    index: dict[int, float]


HEAD = (
    "| server | stream | clients | queries/s | p50 ms | p99 ms | server CPU ms | encoder CPU ms "
    "| clients CPU ms | recall@3 | failed | crossed |"
)


def line(row: Row) -> str:
    """Return one line of the table, with CPU figures per query."""
    numbers = f"{row.per_second:.0f} | {row.p50:.1f} | {row.p99:.1f}"
    cpu = f"{row.server_ms:.2f} | {row.encoders_ms:.2f} | {row.clients_ms:.2f}"
    checked = f"{row.checked.recall:.4f} | {row.failed} | {row.checked.crossed}"
    return f"| {row.peer} | {row.stream} | {row.clients} | {numbers} | {cpu} | {checked} |"


def _find(rows: Sequence[Row], peer: str, stream: Stream, clients: int) -> Row | None:
    same = (row for row in rows if (row.peer, row.stream, row.clients) == (peer, stream, clients))
    return next(same, None)


def limit(costs: Costs, http_ms: float, clients_ms: float = 0.0) -> float:
    """Queries per second that all cores together could answer."""
    return 1000 * cores() / (min(costs.encoder.values()) + min(costs.index.values()) + http_ms + clients_ms)


def _limits(rows: Sequence[Row], costs: Costs) -> Iterator[str]:
    most = max(row.clients for row in rows)
    http, ours = _find(rows, "ours", "same", most), _find(rows, "ours", "distinct", most)
    best = {name: min(cost, key=cost.__getitem__) for name, cost in vars(costs).items()}
    one = costs.encoder_one
    yield (
        f"Encoder alone, {cores()} processes at once: {min(costs.encoder.values()):.2f} CPU ms a query at "
        f"its best batch ({best['encoder']}), {costs.encoder[1]:.2f} one by one; a single process on the "
        f"machine: {min(one.values()):.2f} and {one[1]:.2f}. Index alone: {min(costs.index.values()):.2f} at "
        f"batches of {best['index']}, {costs.index[1]:.2f} one by one."
    )
    if http is None or ours is None:
        return
    without, within = limit(costs, http.server_ms), limit(costs, http.server_ms, ours.clients_ms)
    yield (
        f"HTTP: {http.server_ms:.2f} CPU ms a query (our server answering from its cache, {most} clients). "
        f"**The limit** of {cores()} cores is {without:.0f} queries/s, and {within:.0f} when the clients' "
        f"{ours.clients_ms:.2f} ms a query come off the same cores. At {most} clients without repeats our "
        f"server reaches {ours.per_second / without:.2f} of the first and "
        f"**{ours.per_second / within:.2f}** of the second."
    )


def _ratios(rows: Sequence[Row]) -> Iterator[str]:
    most, least = max(row.clients for row in rows), min(row.clients for row in rows)
    ratios: list[str] = []
    for stream, words in (("distinct", "without repeats"), ("groups", "with repeats")):
        ours, plain = _find(rows, "ours", stream, most), _find(rows, "plain", stream, most)
        if ours and plain:
            ratios.append(
                f"{ours.per_second / plain.per_second:.1f} times its throughput {words} at {most} clients"
            )
    ours, plain = _find(rows, "ours", "distinct", least), _find(rows, "plain", "distinct", least)
    if ours and plain and least == 1:
        ratios.append(f"a p50 of {ours.p50 / plain.p50:.2f} times its own at 1 client")
    if ratios:
        yield f"Our server against the plain one: {', '.join(ratios)}."


NOTES = (
    "Streams: `distinct` never repeats a query, `groups` asks like five solver attempts at a question (four "
    f"searches each, with shared words at a probability of {SHARED:g}), and `same` repeats one query. CPU "
    "figures are milliseconds per query of the listening process, its encoders, and the clients. Recall is "
    "against exact search. Every answer is checked against its query, and `crossed` counts mismatches. "
    "Refused requests (503) are repeated, and their wait counts."
)


def publish(about: About, rows: Sequence[Row], costs: Costs, write: bool) -> None:
    """Print the section, with the fewest and the most clients. Writes it and the plot if `write`."""
    ends = (min(row.clients for row in rows), max(row.clients for row in rows))
    body = [
        f"`python -m bench.retrieval`: {about}",
        "",
        HEAD,
        "|---" * (HEAD.count("|") - 1) + "|",
        *(line(row) for row in rows if row.clients in ends),
        "",
        *(f"{sentence}\n" for sentence in (*_ratios(rows), *_limits(rows, costs))),
        NOTES,
    ]
    if write:
        plot(rows, costs, PLOT)
        body += ["", f"![throughput and latency by clients]({PLOT.name})"]
    _publish(TITLE, "\n".join(body), write)


def _publish(title: str, body: str, write: bool) -> None:
    print(body)
    if write:
        text = replace_section(README.read_text(encoding="utf-8"), title, body)
        README.write_text(text, encoding="utf-8")


def growth(samples: Sequence[tuple[float, float]]) -> float:
    """Return MiB per hour over the second half of the samples, by least squares."""
    half = np.asarray(samples[len(samples) // 2 :])
    return float(np.polyfit(half[:, 0], half[:, 1], 1)[0] * 3600) if len(half) > 1 else float("nan")


def is_flat(samples: Sequence[tuple[float, float]]) -> bool:
    """Whether the second half grew by less than `FLAT` of the memory in its own time, or by 1 MiB."""
    half = samples[len(samples) // 2 :]
    grown = growth(samples) * (half[-1][0] - half[0][0]) / 3600
    return grown < max(1.0, FLAT * half[-1][1])


def publish_soak(about: About, soak: Soak, write: bool) -> None:
    """Print the soak's section, and write it if `write`."""
    row = soak.row
    checks = {
        "memory flat": all(is_flat(samples) for samples in soak.memory.values()),
        "no error": row.failed == 0,
        "no crossed answer": row.checked.crossed == 0,
    }
    result = ", ".join(words if good else f"NOT: {words}" for words, good in checks.items())
    body = [
        f"`python -m bench.retrieval --soak {about.seconds / 60:g}`: {about}",
        "",
        f"**{result}**: {row.clients} clients, {soak.answered:,} answers, all checked "
        f"({row.checked.answers:,} of them by their scores), {row.failed} failed or lost, "
        f"{row.checked.crossed} crossed, {row.refused} refused and repeated; {row.per_second:.0f} "
        f"queries/s, p50 {row.p50:.0f} ms, p99 {row.p99:.0f} ms.",
        "",
        "| process | MiB at the start | a quarter in | half | end | slope of the second half, MiB/h |",
        "|---|---|---|---|---|---|",
    ]
    for name, samples in soak.memory.items():
        at = [samples[int(share * (len(samples) - 1))][1] for share in (0, 0.25, 0.5, 1)]
        body.append(f"| {name} | {' | '.join(f'{mib:.1f}' for mib in at)} | {growth(samples):+.1f} |")
    body += ["", "Memory is the proportional set size, sampled every 5 s."]
    _publish(SOAK_TITLE, "\n".join(body), write)


def plot(rows: Sequence[Row], costs: Costs, path: Path) -> None:
    """Plot throughput and p50/p99 by the number of clients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rates, waits) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    colours = {"ours": "tab:blue", "plain": "tab:red", "flat": "tab:green"}
    shown = [key for key in dict.fromkeys((row.peer, row.stream) for row in rows) if key[1] != "same"]
    for peer, stream in shown:
        own = [row for row in rows if (row.peer, row.stream) == (peer, stream)]
        clients = [row.clients for row in own]
        style = {"color": colours[peer], "linestyle": "-" if stream == "distinct" else "--", "marker": "o"}
        rates.plot(clients, [row.per_second for row in own], label=f"{peer}, {stream}", **style)
        waits.plot(clients, [row.p50 for row in own], label=f"{peer}, {stream}: p50", **style)
        waits.plot(clients, [row.p99 for row in own], alpha=0.35, **style)
    most = max(row.clients for row in rows)
    http, ours = _find(rows, "ours", "same", most), _find(rows, "ours", "distinct", most)
    if http and ours:
        within = limit(costs, http.server_ms, ours.clients_ms)
        rates.axhline(within, color="black", linewidth=0.8, linestyle=":", label="limit, clients included")
    rates.set(xlabel="clients", ylabel="queries a second", xscale="log", yscale="log", title="Throughput")
    waits.set(xlabel="clients", ylabel="ms", xscale="log", yscale="log", title="Latency: p50, and p99 pale")
    rates.legend(fontsize=8)
    waits.legend(fontsize=8)
    for axes in (rates, waits):
        axes.set_xticks(sorted({row.clients for row in rows}), labels=sorted({row.clients for row in rows}))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
