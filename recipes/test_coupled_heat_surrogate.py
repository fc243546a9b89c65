"""A heat simulation trains a surrogate while it runs; the surrogate then replaces some steps.

The simulation is a stencil on all ranks but one. After every 10 steps, all its ranks give their
rows to the learner, which trains a small convolutional network to make 10 steps at once. After the
last snapshot, the learner predicts four times 10 steps; the simulation goes on from the prediction
and states the physical error.

pytest recipes/test_coupled_heat_surrogate.py --ranks 2,3 --oversubscribe -k memory
"""

from d5suite.cases.workflow import Component, Coupling, Workflow

SIZE = {"points": 48, "stride": 10}

WORKFLOW = Workflow(
    name="coupled_heat_surrogate",
    components=(
        Component("simulation", "heat", ranks=None, options=SIZE),
        Component("learner", "online_training", options=SIZE),
    ),
    couplings=(
        Coupling("snapshots", "simulation", "learner", capacity=4),
        Coupling("predicted", "learner", "simulation"),
    ),
    steps={"smoke": 24, "standard": 100, "full": 400},
    checkpoint_every=8,
)
