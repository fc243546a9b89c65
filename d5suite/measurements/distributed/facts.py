"""JSON schema of the facts about ranks in results. Imports its neighbours' short forms only."""

from __future__ import annotations

from typing import Any

from d5suite.measurements.schemas import boolean, choice, integer, mapping, number, or_null, text

FACTS: dict[str, Any] = {
    "scheme": text("how replicas agree"),
    "settings": {"type": "object", "description": "of the scheme"},
    "native": boolean("the scheme is the framework's own, of its settings' name"),
    "synchronous": boolean("each step equals one process's on all ranks' batches"),
    "communicator": text("what moves gradients between ranks"),
    "algorithm": text("of collectives; native: the transport's own"),
    "launcher": choice("none", "process", "mpi", description="what started the ranks"),
    "oversubscribed": boolean("ranks were allowed to share cores"),
    "trainers": integer("ranks that train; others serve", minimum=1),
    "bytes_per_step": or_null(
        number("sent by all ranks, by the scheme's definition; collectives as a ring; null: it is not known", minimum=0)
    ),
}
"""How the ranks of a result train together."""

SCALING = mapping(
    {
        "mode": choice("weak", "strong", description="weak: the same batch per rank; strong: the same batch in all"),
        "baseline": mapping(
            {"ranks": integer(), "throughput": number()},
            description="what the speed-up is relative to: fewest ranks, and their throughput",
        ),
        "speed_up": number("of images/s", minimum=0),
        "efficiency": number("speed-up over the ratio of ranks", minimum=0),
    },
    description="over the result of fewest ranks of the same run, case and backend, if there is one",
)
"""What `efficiency` adds to a result of several ranks."""
