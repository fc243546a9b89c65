"""An ensemble of simulations feeds one trainer, which decides what they simulate next.

Each member simulates the cooling of a plate for as long as it is asked for, so that members are not
equally fast. The trainer fits a small network to their answers and asks each member again as soon
as it has answered: where the curve is steep and its neighbours are far.

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
