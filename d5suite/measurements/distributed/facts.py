"""JSON schema of the facts about ranks in results. Imports the standard library only."""

from __future__ import annotations

from typing import Any

FACTS: dict[str, Any] = {
    "scheme": {"type": "string", "description": "how replicas agree"},
    "settings": {"type": "object", "description": "of the scheme"},
    "native": {"type": "boolean", "description": "the scheme is the framework's own, of its settings' name"},
    "synchronous": {"type": "boolean", "description": "each step equals one process's on all ranks' batches"},
    "communicator": {"type": "string", "description": "what moves gradients between ranks"},
    "algorithm": {"type": "string", "description": "of collectives; native: the transport's own"},
    "launcher": {"enum": ["none", "process", "mpi"], "description": "what started the ranks"},
    "oversubscribed": {"type": "boolean", "description": "ranks were allowed to share cores"},
    "trainers": {"type": "integer", "minimum": 1, "description": "ranks that train; others serve"},
    "bytes_per_step": {
        "type": ["number", "null"], "minimum": 0,
        "description": "sent by all ranks, by the scheme's definition; collectives as a ring; null: it is not known",
    },
}  # fmt: skip
"""How the ranks of a result train together."""

REQUIRED = [name for name in FACTS if name != "synchronous"]  # earlier results do not have it

SCALING: dict[str, Any] = {
    "type": "object",
    "required": ["mode", "baseline", "speed_up", "efficiency"],
    "description": "over the result of fewest ranks of the same run, case and backend, if there is one",
    "properties": {
        "mode": {
            "enum": ["weak", "strong"],
            "description": "weak: the same batch per rank; strong: the same batch in all",
        },
        "baseline": {
            "description": "what the speed-up is relative to: fewest ranks, and their throughput",
            "type": "object", "required": ["ranks", "throughput"],
            "properties": {"ranks": {"type": "integer"}, "throughput": {"type": "number"}},
        },
        "speed_up": {"type": "number", "minimum": 0, "description": "of images/s"},
        "efficiency": {"type": "number", "minimum": 0, "description": "speed-up over the ratio of ranks"},
    },
}  # fmt: skip
"""What `efficiency` adds to a result of several ranks."""
