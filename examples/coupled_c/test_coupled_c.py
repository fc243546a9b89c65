"""A simulation in C trains a surrogate while it runs.

cc -O2 -o heat heat.c -lm && pytest test_coupled_c.py --ranks 2 --oversubscribe -k memory
"""

from pathlib import Path

from d5suite.cases.workflow import Component, Coupling, Workflow

WORKFLOW = Workflow(
    name="coupled_c",
    components=(
        Component(
            "simulation",
            "external",
            options={
                "executable": str(Path(__file__).with_name("heat")),
                "gives": {"snapshots": {"temperature": [[24, 24], "float64", "K"]}},
            },
        ),
        Component("learner", "online_training", options={"points": 24}),
    ),
    couplings=(Coupling("snapshots", "simulation", "learner"),),
    steps={"smoke": 12, "standard": 100},
)
