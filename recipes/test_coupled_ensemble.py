"""An ensemble of simulations feeds one trainer, which chooses the next points to simulate.

Every member simulates the cooling of a plate for the time that the trainer asks for, so members
take different times. The trainer fits a small network to the answers, and asks a member again as
soon as it has answered: at points where the curve is steep and other known points are far.

pytest recipes/test_coupled_ensemble.py --ranks 2,3 --oversubscribe -k memory
"""

from d5suite.cases.workflow import Component, Coupling, Workflow

WORKFLOW = Workflow(
    name="coupled_ensemble",
    components=(
        Component("members", "ensemble_member", ranks=None, options={"points": 32, "longest": 400}),
        Component("trainer", "active_learning", options={"points": 32, "longest": 400}),
    ),
    couplings=(
        Coupling("questions", "trainer", "members"),
        Coupling("answers", "members", "trainer"),
    ),
    steps={"smoke": 16, "standard": 64, "full": 256},
)
